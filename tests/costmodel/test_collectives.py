from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cluster import Cluster
from costmodel.collectives import CommunicationPrices
from searchspace.conversion import Prices
from searchspace.mesh import Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MiB, GiB = 2**20, 2**30
ALPHA, NIC_ALPHA, LAUNCH = 1.8e-6, 5e-6, 4e-6
LINK, NIC = 300e9 * 0.77, 25e9 * 0.9
"""Of an A100 SXM: achieved bytes per second of the link, and of one of 8 interfaces."""


def line(size, first=0):
    return Mesh.line(size, first=first)


@pytest.fixture
def node():
    return CommunicationPrices(Cluster.parse("a100-80gb:1x8"))


@pytest.fixture
def nodes():
    return CommunicationPrices(Cluster.parse("a100-80gb:4x8"))


def test_it_is_the_plug_of_conversions(node):
    plug: Prices = node
    assert plug.local(1) > 0


def test_rings_inside_a_node(node):
    p, n = 8, 256 * MiB
    gather = LAUNCH + (p - 1) * ALPHA + (p - 1) / p * n / LINK
    assert node.collective("all_gather", line(8), (0,), n) == pytest.approx(gather)
    assert node.collective("reduce_scatter", line(8), (0,), n) == pytest.approx(gather)
    assert node.collective("all_to_all", line(8), (0,), n) == pytest.approx(gather)
    reduce = LAUNCH + 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * n / LINK
    assert node.collective("all_reduce", line(8), (0,), n) == pytest.approx(reduce)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_costs_nothing(node, kind):
    assert node.collective(kind, Mesh((("a", 1), ("b", 8)), tuple(range(8))), (0,), GiB) == 0
    assert node.collective(kind, line(8), (), GiB) == 0


def test_small_messages_between_nodes_go_through_a_tree(nodes):
    mesh = line(32)
    chain = LAUNCH + 2 * (7 * ALPHA + log2(4) * NIC_ALPHA)
    assert nodes.collective("all_reduce", mesh, (0,), 0) == pytest.approx(chain)
    ring = LAUNCH + 2 * (28 * ALPHA + 3 * NIC_ALPHA)
    assert chain < ring


def test_a_ring_through_all_devices_has_all_interfaces(nodes):
    n = 8 * GiB
    expected = LAUNCH + 2 * (28 * ALPHA + 3 * NIC_ALPHA) + 2 * 31 / 32 * n / (8 * NIC)
    assert nodes.collective("all_reduce", line(32), (0,), n) == pytest.approx(expected)


def test_concurrent_groups_share_the_interfaces(nodes):
    """8 groups, one member per node each: every one has one of 8 interfaces."""
    mesh = Mesh((("dp", 4), ("tp", 8)), tuple(range(32)))
    n = 8 * GiB
    assert nodes.collective("all_gather", mesh, (0,), n) == pytest.approx(LAUNCH + 3 * NIC_ALPHA + 3 / 4 * n / NIC)
    pairs = Mesh((("dp", 4), ("cp", 2), ("tp", 4)), tuple(range(32)))
    inside = nodes.collective("all_gather", pairs, (0, 1), n)
    assert inside == pytest.approx(LAUNCH + 4 * ALPHA + 3 * NIC_ALPHA + 7 / 8 * n / (2 * NIC))


def test_one_member_per_node_drives_one_interface():
    prices = CommunicationPrices(Cluster.parse("a100-80gb:2x8"))
    alone = Mesh((("x", 2),), (0, 8))
    n = 8 * GiB
    assert prices.collective("all_gather", alone, (0,), n) == pytest.approx(LAUNCH + NIC_ALPHA + n / 2 / NIC)


def test_few_interfaces_are_a_bottleneck_for_all_groups_together():
    spec = {"nodes": [{"device": "a100-80gb", "count": 2, "figures": {"nic.count": 1}}]}
    prices = CommunicationPrices(Cluster.parse(spec))
    mesh = Mesh((("dp", 2), ("tp", 8)), tuple(range(16)))
    n = GiB
    assert prices.collective("all_gather", mesh, (0,), n) == pytest.approx(LAUNCH + NIC_ALPHA + n / 2 / (NIC / 8))


def test_all_to_all_between_nodes_leaves_through_shared_interfaces(nodes):
    n = 8 * GiB
    expected = LAUNCH + 7 * ALPHA + 24 * NIC_ALPHA + 8 * 24 / 32 * n / (8 * NIC)
    assert nodes.collective("all_to_all", line(32), (0,), n) == pytest.approx(expected)


def test_crossing_nodes_costs_more_than_staying(nodes):
    for kind in KINDS:
        assert nodes.collective(kind, Mesh.line(8, first=4), (0,), GiB) > nodes.collective(kind, line(8), (0,), GiB)


def test_a_rack_is_as_fast_as_a_node():
    prices = CommunicationPrices(Cluster.parse("gb200:36x4"))
    inside = prices.collective("all_gather", Mesh.line(8), (0,), GiB)
    across = prices.collective("all_gather", Mesh.line(8, first=68), (0,), GiB)
    assert across > 2 * inside


def test_the_slower_kind_decides():
    mixed = CommunicationPrices(Cluster.parse("h100:1x8+v100-32gb:1x8"))
    both = Mesh((("x", 2),), (0, 8))
    slow = CommunicationPrices(Cluster.parse("v100-32gb:2x8"))
    assert mixed.collective("all_gather", both, (0,), GiB) == slow.collective("all_gather", both, (0,), GiB)


@given(st.sampled_from(KINDS), st.integers(0, 2**34), st.integers(0, 2**30), st.sampled_from([(0,), (1,), (0, 1)]))
@settings(max_examples=200, deadline=None)
def test_more_bytes_never_cost_less(kind, size, more, axes):
    prices = _PRICES
    mesh = Mesh((("dp", 4), ("tp", 8)), tuple(range(32)))
    assert 0 <= prices.collective(kind, mesh, axes, size) <= prices.collective(kind, mesh, axes, size + more)


_PRICES = CommunicationPrices(Cluster.parse("a100-80gb:4x8"))
_COPY = st.tuples(st.integers(0, 31), st.integers(0, 31), st.integers(1, 2**30)).filter(lambda c: c[0] != c[1])


@given(st.lists(_COPY, min_size=1, max_size=12), _COPY)
@settings(max_examples=200, deadline=None)
def test_more_copies_never_cost_less(copies, one):
    assert 0 < _PRICES.transfer(copies) <= _PRICES.transfer([*copies, one])


def test_transfers_are_bound_by_the_busiest_port(nodes):
    n = GiB
    assert nodes.transfer([(0, 1, n)]) == pytest.approx(LAUNCH + ALPHA + n / LINK)
    assert nodes.transfer([(0, 1, n), (2, 3, n)]) == pytest.approx(LAUNCH + ALPHA + n / LINK)
    assert nodes.transfer([(0, 1, n), (0, 2, n)]) == pytest.approx(LAUNCH + ALPHA + 2 * n / LINK)
    assert nodes.transfer([(0, 8, n)]) == pytest.approx(LAUNCH + NIC_ALPHA + n / NIC)
    everybody = [(i, 8 + i, n) for i in range(8)]
    assert nodes.transfer(everybody) == pytest.approx(LAUNCH + NIC_ALPHA + n / NIC)
    fan_in = [(i, 8, n) for i in range(8)]
    assert nodes.transfer(fan_in) == pytest.approx(LAUNCH + NIC_ALPHA + 8 * n / NIC)


def test_local_copies_read_and_write(node):
    assert node.local(GiB) == pytest.approx(LAUNCH + 2 * GiB / (2039e9 * 0.85))


@pytest.mark.parametrize(
    ("spec", "size", "measured"),
    [
        # VIA-Research/vTrain, trace/a100 and trace/v100: 1,024 and 256 MiB on 8 devices.
        ("a100-80gb:1x8", 1024 * MiB, 8193.0e-6),
        ("a100-80gb:1x8", 256 * MiB, 2162.3e-6),
        ("v100-32gb:1x8", 1024 * MiB, 13969.0e-6),
        ("v100-32gb:1x8", 256 * MiB, 3527.4e-6),
        # NVIDIA/nccl-tests issue 309: 8 nodes of 8 H100.
        ("h100:8x8", 4096 * MiB, 21882.0e-6),
        ("h100:8x8", 1024 * MiB, 5640.1e-6),
    ],
)
def test_all_reduce_is_near_published_measurements(spec, size, measured):
    cluster = Cluster.parse(spec)
    assert CommunicationPrices(cluster).collective("all_reduce", line(cluster.size), (0,), size) == pytest.approx(
        measured, rel=0.12
    )
