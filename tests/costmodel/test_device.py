import re

import pytest

from costmodel.device import Link, customised, preset, preset_names, recognised, sources
from searchspace.errors import ClusterError

GB, TB = 1000**3, 1000**4
MiB = 1024**2

# Written a second time, in plain numbers: memory [bytes], memory bandwidth, bfloat16 (V100, CPU: float16) peak,
# link [bytes/s, one direction], interfaces, bytes/s of one.  A slip of 1024/1000 or of bits and bytes shows.
EXPECTED = {
    "v100-16gb": (16160 * MiB, 900 * GB, 125 * TB, 150 * GB, 4, 12.5 * GB),
    "v100-32gb": (32510 * MiB, 900 * GB, 125 * TB, 150 * GB, 4, 12.5 * GB),
    "a100-40gb": (40536 * MiB, 1555 * GB, 312 * TB, 300 * GB, 8, 25 * GB),
    "a100-80gb": (81920 * MiB, 2039 * GB, 312 * TB, 300 * GB, 8, 25 * GB),
    "h100": (81559 * MiB, 3350 * GB, 989 * TB, 450 * GB, 8, 50 * GB),
    "h100-pcie": (81559 * MiB, 2000 * GB, 756 * TB, 63 * GB, 4, 25 * GB),
    "h800": (81559 * MiB, 3350 * GB, 989 * TB, 200 * GB, 8, 50 * GB),
    "h200": (143771 * MiB, 4800 * GB, 989 * TB, 450 * GB, 8, 50 * GB),
    "b200": (183359 * MiB, 8000 * GB, 2250 * TB, 900 * GB, 8, 50 * GB),
    "gb200": (189471 * MiB, 8000 * GB, 2500 * TB, 900 * GB, 4, 50 * GB),
    "mi250x": (65536 * MiB, 1638 * GB, 191.5 * TB, 175 * GB, 4, 25 * GB),
    "mi300x": (196608 * MiB, 5300 * GB, 1307 * TB, 448 * GB, 8, 50 * GB),
    "l40s": (46068 * MiB, 864 * GB, 362 * TB, 31.5 * GB, 2, 25 * GB),
    "rtx4090": (24564 * MiB, 1008 * GB, 165.2 * TB, 31.5 * GB, 1, 12.5 * GB),
    "cpu": (4096 * MiB, 10 * GB, 0.012 * TB, 1.2 * GB, 1, 1.25 * GB),
}


def test_every_preset_is_expected():
    assert set(preset_names()) == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_figures_of_presets(name):
    device = preset(name)
    found = (
        device.memory, device.memory_bandwidth, dict(device.peak).get("bfloat16") or device.peak_of("float16"),
        device.link.bandwidth, device.nics, device.nic.bandwidth,
    )  # fmt: skip
    assert found == pytest.approx(EXPECTED[name], rel=1e-9)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_figure_has_a_source_with_a_date(name):
    device = preset(name)
    assert len(device.sources) == 15 + len(device.peak)
    for figure, source in device.sources:
        assert source.what and re.match(r"20\d\d(-\d\d)?$", source.date), figure


def test_no_source_is_unused():
    used = {source.key for name in preset_names() for _, source in preset(name).sources}
    assert used == set(sources())


def test_peaks_of_types_without_a_figure():
    v100 = preset("v100-32gb")
    assert v100.peak_of("bfloat16") == v100.peak_of("float32") == 15.7e12
    assert preset("h100").peak_of("float8_e4m3fn") == 1979e12
    no_double = customised(v100, {})
    assert no_double == v100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000", "unknown device 'h1000': did you mean 'h100'? known devices are a100-40gb, a100-80gb"),
        ("tpu-v5", "known devices are a100-40gb"),
    ],
)
def test_an_unknown_preset_names_the_known_ones(name, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        preset(name)


def test_customised_figures():
    device = customised(
        preset("h100"), {"memory.capacity": "94 GiB", "nic.bandwidth": "100 Gb/s", "peak.float16": "1 PFLOP/s"}
    )
    assert device.memory == 94 * 1024**3
    assert device.nic.bandwidth == 12.5e9
    assert device.nic.latency == preset("h100").nic.latency
    assert device.peak_of("float16") == 1e15
    with pytest.raises(ClusterError, match=r"no figure 'nic.speed'.*figures are memory.capacity"):
        customised(device, {"nic.speed": "1 GB/s"})
    with pytest.raises(ClusterError, match=r"expected a quantity in bytes/s .* got '1 GB'"):
        customised(device, {"nic.bandwidth": "1 GB"})


def test_figures_check_themselves():
    with pytest.raises(ClusterError, match=r"expected 0 < link efficiency <= 1, got 1.7"):
        Link(1e9, 1.7, 1e-6)
    with pytest.raises(ClusterError, match=r"expected link bandwidth > 0, got 0"):
        Link(0, 0.5, 1e-6)
    with pytest.raises(ClusterError, match="expected 0 <= reserved < memory"):
        customised(preset("h100"), {"memory.capacity": "1 GiB"})


@pytest.mark.parametrize(
    ("reported", "memory", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 85_045_673_984, "h100"),
        ("NVIDIA H100 PCIe", 85_000_000_000, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 42_000_000_000, "a100-40gb"),
        ("Tesla V100-SXM2-16GB", 16_945_512_448, "v100-16gb"),
        ("NVIDIA GB200", 198_000_000_000, "gb200"),
        ("NVIDIA B200", 192_000_000_000, "b200"),
        ("AMD Instinct MI300X", 206_000_000_000, "mi300x"),
    ],
)
def test_reported_names_are_recognised(reported, memory, expected):
    device, known = recognised(reported, memory)
    assert (device.name, device.memory, known) == (expected, memory, True)


def test_an_unknown_device_is_like_the_one_with_the_nearest_memory():
    device, known = recognised("FooChip", 24 * 1024**3)
    assert (device.name, known) == ("rtx4090", False)
