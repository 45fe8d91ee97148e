"""The graph: a single-device model as operators over tensors.  No torch in here.

``autoplan.capture`` makes graphs.  A graph is single assignment: each tensor has one producing
operator, or is an input, parameter, buffer or constant.  Operators are in execution order.
Mutation is explicit: an operator computes a buffer's new value, and ``Graph.buffer_updates`` says
that the buffer takes it at the end of the step.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from searchspace.errors import CaptureError
from searchspace.layout import Shape
from searchspace.rule import Rule

TensorKind = Literal["input", "parameter", "buffer", "constant", "activation"]

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """A tensor of the single-device model, at its whole shape.

    Fields
        dtype: torch's name without the prefix, e.g. ``"bfloat16"``.
        requires_grad: whether a gradient flows through it; a static property.
        source: where the data of an input, parameter, buffer or constant comes from: the input's
            path (``"args.0"``, ``"kwargs.labels"``), the qualified name in the module, or the
            constant's name.
        aliases: further qualified names of a tied parameter or aliased buffer.
        batch_dim: for an input, the dimension along which the batch lies, or None.
    """

    name: str
    shape: Shape
    dtype: str
    kind: TensorKind
    requires_grad: bool = False
    source: str = ""
    aliases: tuple[str, ...] = ()
    batch_dim: int | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class InputRef:
    """Stands for the operator's input ``index`` in its argument structure."""

    index: int


@dataclass(frozen=True)
class TensorDim:
    """Dimension ``dim`` of the operator's input (or output) ``index``."""

    index: int
    dim: int
    output: bool = False


@dataclass(frozen=True)
class LocalSize:
    """An integer argument: the extent of a dimension in this rank's shard."""

    of: TensorDim


@dataclass(frozen=True)
class LocalOffset:
    """An integer argument: where this rank's shard starts in the whole dimension."""

    of: TensorDim


@dataclass(frozen=True)
class LocalEnd:
    """An integer argument: where this rank's shard ends in the whole dimension."""

    of: TensorDim


@dataclass(frozen=True)
class GlobalSize:
    """An integer argument: the extent of a dimension in the whole tensor (follows the batch)."""

    of: TensorDim


@dataclass(frozen=True)
class Symbol:
    """A dtype, device, layout or memory format, by name: ``torch.float32``, ``cpu``, ``torch.strided``.

    A device argument is ``Symbol("device")``: the rank's own device.  ``Symbol("operator")`` is an integer
    argument, :func:`operator_number` of the operator's name.
    """

    name: str


Literal_ = None | bool | int | float | complex | str
Argument = Literal_ | InputRef | LocalSize | LocalOffset | LocalEnd | GlobalSize | Symbol | tuple["Argument", ...]

Family = Literal[
    "matmul", "attention", "convolution", "normalisation", "reduction", "pointwise",
    "view", "data", "creation", "embedding", "loss", "random", "recurrent", "composite",
]  # fmt: skip


@dataclass(frozen=True)
class Context:
    """The context in which an operator runs: gradient mode, and the autocast dtype or None."""

    no_grad: bool = False
    autocast: str | None = None


@dataclass(frozen=True)
class Operator:
    """One operator.

    Fields
        target: qualified name, ``"aten.linear.default"`` or ``"autoplan.embedding.default"``.
        args, kwargs: the call; tensors appear as :class:`InputRef`.
        inputs, outputs: tensor names.  A tensor used twice (``h @ h``) is two inputs.
        rule: how it may be split.
        module: path of the module that called it, ``"transformer.h.0.attn"``; "" for the root.
        flops: floating point operations of the whole forward; backward is a property of the family.
        saved: names of the inputs and outputs that autograd keeps for backward.
        saved_extra_bytes: what autograd keeps besides (statistics, masks), whole tensor.
        family: which efficiency and backward rule of the cost model applies.
        random: draws random numbers.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: Rule
    module: str = ""
    flops: float = 0.0
    saved: tuple[str, ...] = ()
    saved_extra_bytes: int = 0
    family: Family = "pointwise"
    random: bool = False
    context: Context = Context()


@dataclass(frozen=True)
class Graph:
    """A captured model.

    Fields
        inputs: tensor names of the call's tensor leaves, in order.
        outputs: tensor names of the user's outputs, in the order of the output structure's leaves.
        loss: the scalar tensor that training minimises, or None for inference.
        buffer_updates: (buffer tensor, tensor with its new value).
        batch: extent of the batch dimension at capture, or None when no input has one.
    """

    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str | None = None
    buffer_updates: tuple[tuple[str, str], ...] = ()
    batch: int | None = None

    def __post_init__(self) -> None:
        known = {t.name for t in self.tensors if t.kind != "activation"}
        for op in self.operators:
            for name in op.inputs:
                if name not in known:
                    raise CaptureError(f"operator {op.name!r} reads {name!r} before it is produced")
            for name in op.outputs:
                if name in known:
                    raise CaptureError(f"tensor {name!r} is produced twice, again by {op.name!r}")
                known.add(name)
            op.rule.check(self.shapes(op))
        for name in (*self.outputs, *((self.loss,) if self.loss else ()), *(new for _, new in self.buffer_updates)):
            if name not in known:
                raise CaptureError(f"graph output {name!r} is never produced")

    @cached_property
    def tensor(self) -> Mapping[str, Tensor]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def operator(self) -> Mapping[str, Operator]:
        """Operators by name."""
        return {op.name: op for op in self.operators}

    @cached_property
    def producer(self) -> Mapping[str, Operator]:
        """The operator that produces each activation."""
        return {name: op for op in self.operators for name in op.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[Operator, int], ...]]:
        """(operator, input index) pairs that read each tensor."""
        found: dict[str, list[tuple[Operator, int]]] = {t.name: [] for t in self.tensors}
        for op in self.operators:
            for index, name in enumerate(op.inputs):
                found[name].append((op, index))
        return {name: tuple(users) for name, users in found.items()}

    def shapes(self, op: Operator) -> tuple[Shape, ...]:
        """Whole shapes of the operator's inputs, then outputs."""
        return tuple(self.tensor[name].shape for name in op.inputs + op.outputs)

    def of_kind(self, *kinds: TensorKind) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.kind in kinds)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.of_kind("parameter")

    @cached_property
    def fingerprint(self) -> str:
        """Identifies model and batch-independent structure: parameters, buffers and operator targets."""
        digest = hashlib.sha256()
        for line in self.signature:
            digest.update(line.encode())
        for op in self.operators:
            digest.update(op.target.encode())
        return digest.hexdigest()[:16]

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """One line per parameter and buffer: name, shape, dtype; for messages about differing models."""
        return tuple(f"{t.source} {list(t.shape)} {t.dtype}" for t in self.of_kind("parameter", "buffer"))


def operator_number(name: str) -> int:
    """A number for the operator ``name``, the same in every process and plan: random operators draw with it."""
    return zlib.crc32(name.encode())


def local_argument_sizes(arguments: Iterable[Argument]) -> bool:
    """Whether any argument depends on the shard (so that generated code differs between ranks)."""
    return any(
        isinstance(a, LocalSize | LocalOffset | LocalEnd) or (isinstance(a, tuple) and local_argument_sizes(a))
        for a in arguments
    )
