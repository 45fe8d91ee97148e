import json
import re

import pytest

from costmodel.cluster import Cluster, Node, detect
from costmodel.device import preset
from searchspace.errors import ClusterError


@pytest.mark.parametrize(
    ("spec", "nodes", "per_node"),
    [("h100:8x8", 8, 8), ("a100-80gb:16x8", 16, 8), ("cpu:1x4", 1, 4), ("h100:8", 1, 8), (" H100 : 2 x 4 ", 2, 4)],
)
def test_texts_are_nodes_times_devices_per_node(spec, nodes, per_node):
    cluster = Cluster.parse(spec)
    assert [node.count for node in cluster.nodes] == [per_node] * nodes
    assert cluster.size == nodes * per_node
    assert cluster.homogeneous


def test_devices_count_through_nodes_of_different_kinds():
    cluster = Cluster.parse("a100-80gb:2x8+v100-32gb:1x16")
    assert cluster.size == 32
    assert not cluster.homogeneous
    assert [cluster.node_of(d) for d in (0, 7, 8, 15, 16, 31)] == [0, 0, 1, 1, 2, 2]
    assert cluster.device(15).name == "a100-80gb"
    assert cluster.device(16).name == "v100-32gb"
    with pytest.raises(ClusterError, match="has devices 0 to 31, not 32"):
        cluster.node_of(32)


def test_a_rack_is_one_domain_of_the_fast_link():
    cluster = Cluster.parse("gb200:36x4")
    assert [cluster.domain_of(d) for d in (0, 71, 72, 143)] == [0, 0, 1, 1]
    assert [cluster.node_of(d) for d in (0, 71, 72, 143)] == [0, 17, 18, 35]
    assert [Cluster.parse("h100:2x8").domain_of(d) for d in (0, 8)] == [0, 1]


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_files(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    if suffix == "json":
        entry = {
            "device": "a100-80gb",
            "count": 2,
            "devices": 4,
            "figures": {"nic.count": 1, "nic.bandwidth": "100 Gb/s"},
        }
        path.write_text(json.dumps({"name": "lab", "nodes": [entry]}))
    else:
        path.write_text(
            'name = "lab"\n[[nodes]]\ndevice = "a100-80gb"\ncount = 2\ndevices = 4\n'
            'figures = { "nic.count" = 1, "nic.bandwidth" = "100 Gb/s" }\n'
        )
    for spec in (path, str(path)):
        cluster = Cluster.parse(spec)
        assert (cluster.name, cluster.size) == ("lab", 8)
        assert (cluster.device(0).nics, cluster.device(0).nic.bandwidth) == (1, 12.5e9)


def test_mappings_and_clusters():
    cluster = Cluster.parse({"nodes": [{"device": "h100"}]})
    assert cluster.size == 8
    assert Cluster.parse(cluster) is cluster
    assert Cluster.of("h100", 1, 8).nodes == cluster.nodes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("h1000:8", "unknown device 'h1000': did you mean 'h100'? known devices are"),
        ("cpu:0", "0 devices in cluster spec 'cpu:0'; for processes on CPUs write \"cpu:1x4\""),
        ("h100:0x8", "0 devices in cluster spec 'h100:0x8'"),
        ("h100:8x0", "0 devices in cluster spec 'h100:8x0'"),
        ("h100", "expected a cluster spec like 'h100:8x8' (nodes x devices per node)"),
        ("h100:-1", "expected a cluster spec like"),
        ({"nodes": []}, "0 devices in cluster spec 'cluster'"),
        ({"nodes": [{"device": "h100", "devices": 0}]}, "/nodes/0: 0 devices in cluster spec 'cluster'"),
        ({"nodes": [{"device": "h1000"}]}, "/nodes/0: unknown device 'h1000'"),
        ({"nodes": [{"device": "h100", "cores": 2}]}, "/nodes/0: unknown keys ['cores']"),
        ({"nodes": [{"devices": 2}]}, "/nodes/0: expected a mapping with 'device'"),
        ({"nodes": [{"device": "h100", "count": 1.5}]}, "/nodes/0: expected whole numbers"),
        ({"devices": 2}, "expected 'nodes'"),
        ({"nodes": [{"device": "h100", "figures": {"nic.sped": 1}}]}, "/nodes/0: a device has no figure 'nic.sped'"),
        ("missing.toml", "missing.toml: cannot read the cluster"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        Cluster.parse(spec)


def test_broken_files(tmp_path):
    (tmp_path / "a.json").write_text('{"nodes": [')
    (tmp_path / "b.toml").write_text("nodes = [")
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(ClusterError, match=r"a.json: not JSON"):
        Cluster.parse(tmp_path / "a.json")
    with pytest.raises(ClusterError, match=r"b.toml: not TOML"):
        Cluster.parse(tmp_path / "b.toml")
    with pytest.raises(ClusterError, match=r"c.json: expected a mapping"):
        Cluster.parse(tmp_path / "c.json")
    with pytest.raises(ClusterError, match="0 devices in a node of h100"):
        Node(preset("h100"), 0)


def test_detection():
    cluster = detect("NVIDIA H100 80GB HBM3", 8, 85_000_000_000, nodes=2)
    assert (cluster.name, cluster.size) == ("h100:2x8", 16)
    assert cluster.device(0).memory == 85_000_000_000
    cpu = detect("cpu", 4, 6 * 1024**3, backend="cpu")
    assert (cpu.name, cpu.device(0).memory) == ("cpu:1x4", 6 * 1024**3)
    with pytest.raises(ClusterError, match="0 devices in cluster spec 'detected'"):
        detect("cpu", 0, 1, backend="cpu")
    with pytest.warns(UserWarning, match="no preset describes 'FooChip'; costs are those of rtx4090"):
        assert detect("FooChip", 1, 24 * 1024**3).size == 1


def test_description():
    text = Cluster.parse("a100-80gb:2x8+v100-32gb:1x16").describe()
    assert text.splitlines()[0] == "a100-80gb:2x8+v100-32gb:1x16: 32 devices"
    assert "2 x 8 NVIDIA A100 SXM4 80 GB: 80.0 GiB, 2039 GB/s" in text
    assert "link 300 GB/s, 8 x 200 Gb/s between nodes" in text
