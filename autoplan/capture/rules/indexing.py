"""Selecting, joining and scattering along a dimension, which then stays whole; all other dimensions split."""

from __future__ import annotations

from autoplan.capture.call import Call, Traits
from autoplan.capture.rules.building import (
    Mark,
    broadcast,
    dims_of,
    elements,
    frozen,
    input_index,
    integers,
    letters,
    packet,
    traits,
)
from searchspace.graph import Argument, InputRef

_WHOLE = 2**63 - 1  # what x[:] passes as the end of a slice


def slicing(call: Call) -> Traits | None:
    """slice and narrow.  A step that divides the extent lets the dimension split in units of the step."""
    x, y = call.inputs[0], call.outputs[0]
    dim = dims_of(call.argument("dim"), len(x.shape))[0]
    marks: list[Mark] = [*letters(len(x.shape))]
    output = list(marks)
    replace: dict[str, Argument] = {}
    if packet(call.target) == "narrow":
        marks[dim] = output[dim] = None
    else:
        start, step = int(call.argument("start") or 0), int(call.argument("step"))  # type: ignore[arg-type]
        extent = x.shape[dim]
        if 0 <= start < step and extent % step == 0 and y.shape[dim] == extent // step:
            marks[dim] = (str(marks[dim]), step)
            replace["end"] = _WHOLE
        else:
            marks[dim] = output[dim] = None
    return traits(call, {0: marks}, [output], family="data", linear=((0,),), replace=replace)


def select(call: Call) -> Traits | None:
    """``a b^ c -> a c``."""
    x = call.inputs[0]
    dim = dims_of(call.argument("dim"), len(x.shape))[0]
    marks: list[Mark] = [*letters(len(x.shape))]
    marks[dim] = None
    return traits(call, {0: marks}, [marks[:dim] + marks[dim + 1 :]], family="data", linear=((0,),))


def concatenate(call: Call) -> Traits | None:
    """cat: ``a b^, a c^ -> a d^``; empty one-dimensional operands, which cat ignores, stay whole."""
    rank = len(call.outputs[0].shape)
    marks: list[Mark] = [*letters(rank)]
    marks[dims_of(call.argument("dim"), rank)[0]] = None
    inputs = {i: marks if len(t.shape) == rank else frozen(t) for i, t in enumerate(call.inputs)}
    return traits(call, inputs, [marks], family="data", linear=(range(len(call.inputs)),))


def stack(call: Call) -> Traits | None:
    """``a b, a b -> a 2 b``."""
    rank = len(call.outputs[0].shape)
    marks: list[Mark] = [*letters(rank)]
    dim = dims_of(call.argument("dim"), rank)[0]
    marks[dim] = None
    own = marks[:dim] + marks[dim + 1 :]
    inputs = dict.fromkeys(range(len(call.inputs)), own)
    return traits(call, inputs, [marks], family="data", linear=(range(len(call.inputs)),))


def pad(call: Call) -> Traits | None:
    """Padded dims stay whole.  The widths come last dim first, in pairs."""
    x = call.inputs[0]
    widths = integers(call.argument("pad"))
    marks: list[Mark] = [*letters(len(x.shape))]
    constant = packet(call.target) == "constant_pad_nd" or call.argument("mode") == "constant"
    for pair in range(len(widths) // 2):
        if not constant or widths[2 * pair] or widths[2 * pair + 1]:
            marks[len(marks) - 1 - pair] = None
    zero = not constant or not call.argument("value")
    return traits(call, {0: marks}, [marks], family="data", linear=((0,),) if zero else ())


def gather(call: Call) -> Traits | None:
    """``a b^, a c -> a c`` along ``dim``; other dims split where table and index agree."""
    x, index = call.inputs[0], call.inputs[1]
    dim = dims_of(call.argument("dim"), len(x.shape))[0] if x.shape else 0
    marks: list[Mark] = [*letters(len(x.shape))]
    own: list[Mark] = [mark if d == dim or x.shape[d] == index.shape[d] else None for d, mark in enumerate(marks)]
    table = [None if d == dim else mark for d, mark in enumerate(own)]
    return traits(call, {0: table, 1: own}, [own], family="data", linear=((0,),), saves=(1,))


def index_select(call: Call) -> Traits | None:
    """``a b^ c, i -> a i c``."""
    x, index = call.inputs[0], call.inputs[1]
    dim = dims_of(call.argument("dim"), len(x.shape))[0]
    marks: list[Mark] = [*letters(len(x.shape))]
    output = list(marks)
    marks[dim] = None
    own: list[Mark] = [output[dim]] if index.shape else []
    return traits(call, {0: marks, 1: own}, [output], family="data", linear=((0,),), saves=(1,))


def embedding(call: Call) -> Traits | None:
    """``v^ e, a b -> a b e``; scaled by frequency, gradients need all indices: ``v^ e, a^ b^ -> a^ b^ e``."""
    rank = len(call.inputs[1].shape)
    marks: list[Mark] = [None] * rank if call.argument("scale_grad_by_freq") else [*letters(rank, skip="e")]
    return traits(call, {0: [None, "e"], 1: marks}, [[*marks, "e"]], family="embedding", linear=((0,),), saves=(1,))


def advanced(call: Call) -> Traits | None:
    """index.Tensor: indices broadcast to one run of dims, where they stood if adjacent, else in front."""
    found = _advanced_marks(call)
    if found is None:
        return None
    inputs, result = found
    return traits(call, inputs, [result], family="data", linear=((0,),), saves=range(1, len(call.inputs)))


def index_put(call: Call) -> Traits | None:
    """Like advanced indexing, written to: indexed dims stay whole, summed values may come in parts."""
    found = _advanced_marks(call)
    values = input_index(call, "values")
    if found is None or values is None:
        return None
    inputs, block = found
    table = inputs[0]
    positions = {mark for marks in inputs for mark in inputs[marks] if mark is not None} - set(table)
    accumulate = bool(call.argument("accumulate"))
    if not accumulate:
        inputs = {i: [None if mark in positions else mark for mark in marks] for i, marks in inputs.items()}
        block = [None if mark in positions else mark for mark in block]
    whole = _block_shape(call)
    shape = call.inputs[values].shape
    inputs[values] = broadcast(block, shape, whole)
    if any(mark in positions and mark not in inputs[values] for mark in block):
        return None
    return traits(
        call, inputs, [table], family="data", reductions=dict.fromkeys(sorted(map(str, positions)), "sum"),
        added=(0,) if accumulate else (), linear=((0, values),), saves=range(1, len(call.inputs)),
    )  # fmt: skip


def _indices(call: Call) -> list[int | None] | None:
    """The input that indexes each dimension of the table, or None where boolean masks make shapes depend on data."""
    given = call.argument("indices")
    assert isinstance(given, tuple)
    found = [entry.index if isinstance(entry, InputRef) else None for entry in given]
    if any(i is not None and call.inputs[i].dtype in ("bool", "uint8") for i in found):
        return None
    return found + [None] * (len(call.inputs[0].shape) - len(found))


def _advanced_marks(call: Call) -> tuple[dict[int, list[Mark]], list[Mark]] | None:
    """Marks of table and indices, and of the block that they select."""
    given = _indices(call)
    if given is None:
        return None
    x = call.inputs[0]
    used = [d for d, i in enumerate(given) if i is not None]
    rank = max(len(call.inputs[given[d] or 0].shape) for d in used)
    names = letters(len(x.shape) + rank)
    table: list[Mark] = [None if d in used else names[d] for d in range(len(x.shape))]
    run: list[Mark] = [*names[len(x.shape) :]]
    shape = _run_shape(call, given)
    inputs: dict[int, list[Mark]] = {0: table}
    for d in used:
        index = given[d]
        assert index is not None
        inputs[index] = broadcast(run, call.inputs[index].shape, shape)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    rest = [mark for d, mark in enumerate(table) if d not in used]
    before = sum(1 for d in range(first) if d not in used)
    return inputs, [*rest[:before], *run, *rest[before:]]


def _run_shape(call: Call, given: list[int | None]) -> tuple[int, ...]:
    shapes = [call.inputs[i].shape for i in given if i is not None]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(extents) for extents in zip(*padded, strict=True))


def _block_shape(call: Call) -> tuple[int, ...]:
    given = _indices(call)
    assert given is not None
    x = call.inputs[0]
    used = [d for d, i in enumerate(given) if i is not None]
    rest = [extent for d, extent in enumerate(x.shape) if d not in used]
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    return (*rest[:first], *_run_shape(call, given), *rest[first:])


def scatter(call: Call) -> Traits | None:
    """scatter, scatter_add, scatter_reduce: dims but ``dim`` split where table, index and source agree.

    Sums (scatter_add) also take the index in parts: ``a b^ &, a i+, a i+ -> a b^``.
    """
    x, index = call.inputs[0], call.inputs[1]
    dim = dims_of(call.argument("dim"), len(x.shape))[0] if x.shape else 0
    names = letters(len(x.shape) + 1)
    others = call.inputs[1:]
    marks: list[Mark] = [
        names[d] if d != dim and all(t.shape[d] == x.shape[d] for t in others) else None for d in range(len(x.shape))
    ]
    adds = packet(call.target) == "scatter_add"
    own = list(marks)
    if adds and x.shape and call.inputs[2].shape[dim] == index.shape[dim]:
        own[dim] = names[-1]
    inputs = {0: marks, **dict.fromkeys(range(1, len(call.inputs)), own)}
    return traits(
        call, inputs, [marks], family="data", reductions={names[-1]: "sum"} if adds else {}, added=(0,) if adds else (),
        linear=((0, 2),) if adds or (packet(call.target) == "scatter" and len(call.inputs) == 3) else (),
        saves=range(len(call.inputs)) if packet(call.target) == "scatter_reduce" else (1,),
    )  # fmt: skip


def index_add(call: Call) -> Traits | None:
    """index_add, index_copy, index_fill along ``dim``; sums also take source and index in parts."""
    x = call.inputs[0]
    dim = dims_of(call.argument("dim"), len(x.shape))[0] if x.shape else 0
    names = letters(len(x.shape) + 1)
    table: list[Mark] = [None if d == dim else names[d] for d in range(len(x.shape))]
    adds = packet(call.target) == "index_add"
    part = names[-1] if adds else None
    inputs: dict[int, list[Mark]] = {0: table, 1: [part] * len(call.inputs[1].shape)}
    if len(call.inputs) > 2:
        source = call.inputs[2].shape
        inputs[2] = [part if d == dim else table[d] for d in range(len(x.shape))] if source else []
    return traits(
        call, inputs, [table], family="data", reductions={names[-1]: "sum"} if adds else {}, added=(0,) if adds else (),
        linear=((0, 2),) if len(call.inputs) > 2 and call.inputs[2].shape else (),
        saves=(1,),
    )  # fmt: skip


def written_view(call: Call) -> Traits | None:
    """slice_scatter, select_scatter, diagonal_scatter: a tensor with a part of it replaced; untouched dims."""
    x = call.inputs[0]
    rank = len(x.shape)
    name = packet(call.target)
    pair = ("dim1", "dim2") if name == "diagonal_scatter" else ("dim",)
    touched = {dims_of(call.argument(which), rank)[0] for which in pair}
    marks: list[Mark] = [None if d in touched else mark for d, mark in enumerate(letters(rank))]
    rest = [mark for d, mark in enumerate(marks) if d not in touched]
    source = {"slice_scatter": marks, "select_scatter": rest, "diagonal_scatter": [*rest, None]}[name]
    return traits(call, {0: marks, 1: source}, [marks], family="data", linear=((0, 1),))


def one_hot(call: Call) -> Traits | None:
    """``a -> a c^``."""
    marks: list[Mark] = [*letters(len(call.inputs[0].shape))]
    return traits(call, {0: marks}, [[*marks, None]], family="data", flops=elements(call.outputs[0]))


def unfold(call: Call) -> Traits | None:
    """Windows along ``dimension``, whose elements come last; other dims."""
    x = call.inputs[0]
    marks: list[Mark] = [*letters(len(x.shape))]
    marks[int(call.argument("dimension")) % len(x.shape)] = None  # type: ignore[arg-type]
    return traits(call, {0: marks}, [[*marks, None]], family="data", linear=((0,),))


def triangle(call: Call) -> Traits | None:
    """autoplan.triangle: every dim; the diagonal moves with the block."""
    from searchspace.graph import LocalOffset, TensorDim

    rank = len(call.inputs[0].shape)
    marks: list[Mark] = [*letters(rank)]
    return traits(
        call, {0: marks}, [marks], family="data", linear=((0,),),
        replace={
            "row": LocalOffset(TensorDim(0, rank - 2)),
            "column": LocalOffset(TensorDim(0, rank - 1)),
        },
    )  # fmt: skip
