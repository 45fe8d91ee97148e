"""Rule texts: what they mean, how they print, and what is refused.

Facts marked nnScaler are observed behaviour of nnScaler v0.8's annotations (arXiv 2301.08984; OSDI'24).
"""

from __future__ import annotations

import itertools

import pytest

from searchspace.errors import RuleError
from searchspace.layout import Split
from searchspace.notation import format_rule, parse, parse_rule
from searchspace.rule import DimUse, Rule


@pytest.mark.parametrize(
    ("text", "space", "normalised"),
    [
        ("a b, b c -> a c", [(0, 0), (0, 1), (1, 1)], "a b, b c -> a c"),
        ("a^ b, b c -> a^ c", [(0, 1), (1, 1)], "a^ b, b c -> a^ c"),
        ("a b, (b n) c -> a (n c)", [(0, 0), (0, 1)], "a b, (b n^) c^ -> a (n^ c^)"),
        ("a b, (b n) c -> a (n b c)", [(0, 0)], "a b^, (b^ n^) c^ -> a (n^ b^ c^)"),
        ("a b, (d^ n) c -> a (c n) d^", [(0, 0), (0, 1), (1, 1)], "a b, (d^ n^) c -> a (c n^) d^"),
        ("m k+, n k+ -> m n", [(0, 0), (0, 1), (1, 0)], "m k+, n k+ -> m n"),
        ("a b^ -> a 2", [(0, 0)], "a b^ -> a 2"),
        ("a^ b -> (4 a^) b", [(0, 1)], "a^ b -> (4 a^) b"),
        ("b^ -> 4 (2 b^)", [], "b^ -> 4 (2 b^)"),
        ("a b c^ -> a b 3, a b 3", [(0, 0), (0, 1)], "a b c^ -> a b 3, a b 3"),
        ("*, n+ e -> * e", [(0, 0), (1, 0), (1, 1)], "*, n+ e -> * e"),
        ("* k+, n k+ -> * n", [(0, 0), (0, 1), (1, 0)], "* k+, n k+ -> * n"),
        ("a^ b c, ? -> b c", [(0, 1), (0, 2)], "a^ b c, ? -> b c"),
        ("N^ C^, N^ -> 1", [], "N^ C^, N^ -> 1"),
    ],
)
def test_split_space_as_in_nnscaler(text: str, space: list[tuple[int, int]], normalised: str) -> None:
    """(Each shared identifier is listed where nnScaler lists it: at its first input.)"""
    notation = parse(text)
    first: dict[str, tuple[int, int]] = {}
    for index, dim in notation.split_space:
        term = notation.inputs[index]
        assert term is not None
        shift = dim - term.leading
        name = str(term.dims[shift][-1 if len(term.dims[shift]) == 1 else 0]) if shift >= 0 else "*"
        first.setdefault(name, (index, dim))
    assert list(first.values()) == space
    assert notation.normalised == normalised


def placements(rule: Rule, label: str) -> tuple[str, ...]:
    choice = rule.choices[label]
    return tuple(str(p) for p in (*choice.inputs, *choice.outputs))


def test_matrix_product() -> None:
    """nnScaler: splits of (0,0), (0,1), (1,0) give D0, V, D1."""
    shapes = [(4, 8), (6, 8)]
    assert parse("m k+, n k+ -> m n").output_shapes(shapes) == ((4, 6),)
    rule = parse_rule("m k+, n k+ -> m n", shapes)
    assert placements(rule, "m") == ("S(0)", "R", "S(0)")
    assert placements(rule, "k") == ("S(1)", "S(1)", "P")
    assert placements(rule, "n") == ("R", "S(0)", "S(1)")


def test_merged_dimension_takes_the_outer_part_by_units() -> None:
    notation = parse("(h t) k -> h t k")
    assert notation.output_shapes([(1024, 8)], h=8) == ((8, 128, 8),)
    rule = notation.rule([(1024, 8)], h=8)
    assert rule.identifiers == ("h", "k")
    assert placements(rule, "h") == ("S(0,128)", "S(0)")
    assert placements(rule, "k") == ("S(1)", "S(2)")


def test_ones_do_not_hide_an_identifier() -> None:
    rule = parse_rule("(1 h) l^ d^, (1 h) l^ d^ -> (1 h) l^ d^", [(6, 4, 4)] * 2)
    assert rule.inputs[0][0] == DimUse("h")
    assert rule.identifiers == ("h",)


def test_linear_with_a_bias_may_reduce() -> None:
    rule = parse_rule("* k+, n k+, n & -> * n", [(2, 3, 4), (6, 4), (6,)], linear=((0, 2),))
    assert rule.identifiers == ("l0", "l1", "k", "n")
    assert placements(rule, "k") == ("S(2)", "S(1)", "P", "P")
    assert placements(rule, "n") == ("R", "S(0)", "S(0)", "S(2)")
    assert placements(rule, "+0,2") == ("P", "R", "P", "P")


@pytest.mark.parametrize(
    ("text", "shapes", "outputs"),
    [
        ("a b^ -> a 2", [(10, 1)], ((10, 2),)),
        ("a^ b -> (4 a^) b", [(3, 2)], ((12, 2),)),
        ("b^ -> 4 (2 b^)", [(3,)], ((4, 6),)),
        ("a b c^ -> a b 3, a b 3", [(4, 5, 6)], ((4, 5, 3), (4, 5, 3))),
        ("a e d^, a b^ d^, a b^ c -> a e c", [(8, 128, 64), (8, 256, 64), (8, 256, 32)], ((8, 128, 32),)),
        ("a b^ c^ d -> a (b^ c^) d", [(2, 3, 4, 5)], ((2, 12, 5),)),
        ("a 1 b 512 -> a 1 (b 16) 32", [(2048, 1, 2, 512)], ((2048, 1, 32, 32),)),
        ("a (b 6) 16 c -> a b 3 32 c", [(10, 12, 16, 18)], ((10, 2, 3, 32, 18),)),
        ("a 16 b c -> 1 (a 16) b c", [(2, 16, 32, 32)], ((1, 32, 32, 32),)),
        ("a 12 16 b -> a 16 12 b", [(10, 12, 16, 18)], ((10, 16, 12, 18),)),
        ("a^ b, c d -> c d b", [(4, 2), (3, 5)], ((3, 5, 2),)),
        ("a+ b+ -> 1", [(4, 2)], ((1,),)),
        ("* k+, n k+ -> * n", [(7, 4), (6, 4)], ((7, 6),)),
        ("* k+, n k+ -> * n", [(4,), (6, 4)], ((6,),)),
        ("a b, b c -> ?", [(4, 2), (2, 3)], (None,)),
    ],
)
def test_output_shapes_as_in_nnscaler(
    text: str, shapes: list[tuple[int, ...]], outputs: tuple[tuple[int, ...] | None, ...]
) -> None:
    assert parse(text).output_shapes(shapes) == outputs


def test_zero_dimensional_results() -> None:
    rule = parse_rule("a+ b+ -> 1", [(4, 2), ()])
    assert rule.outputs == ((),)
    assert placements(rule, "b") == ("S(1)", "P")


def test_missing_identifier_is_summed_as_in_einsum() -> None:
    assert parse_rule("a b, b c -> a c", [(4, 2), (2, 3)]).reductions == (("b", "sum"),)
    assert parse_rule("a b+max -> a", [(4, 2)]).reductions == (("b", "max"),)


def test_extent_one_is_never_split() -> None:
    assert parse_rule("a b -> a b", [(1, 5)]).identifiers == ("b",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b^, b^ c -> a c^", "'c' is marked '' in one place and '\\^' in another"),
        ("a b, b c", "expected one '->'"),
        ("a -> b -> c", "expected one '->'"),
        ("a ! -> a", "unexpected '!' at character 2"),
        ("(a b -> a b", "'\\(' is never closed"),
        ("a () -> a", "'\\)' cannot stand at character 3"),
        ("a * -> a", "'\\*' cannot stand at character 2"),
        ("a, , b -> a", "a tensor without dimensions"),
    ],
)
def test_malformed_texts(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("a b, b c -> a c", [(4, 2)], "describes 2 input tensors, got 1"),
        ("a b -> a", [(4, 2, 3)], r"2 dimensions for a tensor of shape \[4, 2, 3\]"),
        ("a b, b c -> a c", [(4, 2), (3, 5)], "b is a multiple of 2, but the tensor has 3"),
        ("(a 3) -> a 3", [(8,)], r"\(a 3\) is a multiple of 3, but the tensor has 8"),
        ("(a b) -> a b", [(8,)], r"the sizes of \['a', 'b'\] do not follow from the shapes"),
        ("* a, * b -> * a b", [(2, 3), (4, 5)], r"'\*' means \[2\] and \[4\]"),
        ("a b -> a 2", [(5, 1), (5, 3)], "2 is a multiple of 2, but the tensor has 3"),
    ],
)
def test_texts_that_do_not_fit_the_tensors(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_rule(text, shapes)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("a b k+, n k+, n & -> a b n", [(2, 3, 4), (6, 4), (6,), (2, 3, 6)]),
        ("a (h 4) s 8, a h 7 8, a h 7 f -> a (h 4) s f", [(2, 8, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3), (2, 8, 5, 3)]),
        ("a b+max -> a", [(2, 3), (2,)]),
        ("a+ (b+ 2) -> 1", [(2, 6), ()]),
        ("-> a 3", [(4, 3)]),
        ("a 1 b, c -> a c b", [(2, 1, 3), (5,), (2, 5, 3)]),
    ],
)
def test_format_is_the_inverse_of_parse(text: str, shapes: list[tuple[int, ...]]) -> None:
    rule = parse_rule(text, shapes)
    assert format_rule(rule, shapes) == text


def test_every_split_of_a_reshape_cuts_both_sides_alike() -> None:
    """nnScaler: every listed split equals chunk-then-reshape, for every divisor; here for every count of parts."""
    numpy = pytest.importorskip("numpy")
    for text, before in [
        ("a (b 6) 16 c -> a b 3 32 c", (10, 12, 16, 18)),
        ("a 16 b c -> 1 (a 16) b c", (2, 16, 32, 32)),
        ("a 1 b 512 -> a 1 (b 16) 32", (8, 1, 2, 512)),
    ]:
        (after,) = parse(text).output_shapes([before])
        rule = parse_rule(text, [before, after])
        whole = numpy.arange(numpy.prod(before)).reshape(before)
        for label, parts in itertools.product(rule.identifiers, range(2, 9)):
            units = rule.units(label, [before, after])
            if parts > units:
                continue
            cut_in, cut_out = rule.choices[label].inputs[0], rule.choices[label].outputs[0]
            assert isinstance(cut_in, Split)
            assert isinstance(cut_out, Split)
            edges = [i * units // parts for i in range(1, parts)]
            pieces = numpy.split(whole, [e * cut_in.unit for e in edges], cut_in.dim)
            wanted = numpy.split(whole.reshape(after), [e * cut_out.unit for e in edges], cut_out.dim)
            for piece, result in zip(pieces, wanted, strict=True):
                assert (piece.reshape(result.shape) == result).all()
