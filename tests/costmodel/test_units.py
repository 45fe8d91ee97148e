import pytest

from costmodel.units import GiB, as_gib, gib, quantity
from searchspace.errors import ClusterError
from searchspace.quantity_text import bytes_text, seconds_text


@pytest.mark.parametrize(
    ("text", "dimension", "expected"),
    [
        ("80 GiB", "bytes", 80 * 1024**3),
        ("80 GB", "bytes", 80 * 1000**3),
        ("81559 MiB", "bytes", 81559 * 1024**2),
        ("2039 GB/s", "bytes/s", 2039 * 1000**3),
        ("3.35 TB/s", "bytes/s", 3.35 * 1000**4),
        ("400 Gb/s", "bytes/s", 400 * 1000**3 / 8),
        ("312 TFLOP/s", "flop/s", 312 * 1000**4),
        ("4 us", "seconds", 4 / 1000**2),
        ("85 %", "ratio", 0.85),
        (8, "ratio", 8.0),
    ],
)
def test_quantities_are_converted_at_the_door(text, dimension, expected):
    assert quantity(text, dimension) == pytest.approx(expected, rel=1e-12)


def test_binary_and_decimal_prefixes_differ():
    assert quantity("1 GiB", "bytes") / quantity("1 GB", "bytes") == pytest.approx(1.073741824)
    assert gib(1) == GiB == 1024**3
    assert as_gib(gib(2.5)) == 2.5


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("80 GB", "bytes/s"),
        ("80 Gb", "bytes"),
        ("80", "bytes"),
        ("2 GiFLOP/s", "flop/s"),
        ("fast", "seconds"),
        ("1.2.3 s", "seconds"),
    ],
)
def test_a_unit_that_does_not_fit_is_refused(text, dimension):
    with pytest.raises(ClusterError, match=rf"expected a quantity in {dimension} .* got {text!r}"):
        quantity(text, dimension)


def test_texts():
    assert bytes_text(79.25 * GiB) == "79.2 GiB"
    assert bytes_text(1.5 * 1024**4) == "1.5 TiB"
    assert bytes_text(512) == "512 B"
    assert [seconds_text(s) for s in (1.324, 0.0041, 7.2e-6)] == ["1.32 s", "4.10 ms", "7.2 us"]
