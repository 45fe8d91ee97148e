"""Programs: what each rank executes.  No torch; the runtime turns these records into calls.

A program is one global list of :class:`Step`; a step holds one instruction for each rank that
takes part.  A rank's program is its projection.  Since every rank meets the steps in the same
order, no schedule can deadlock.

Data lies in *buffers*, addressed by :data:`Key`: (slot, micro-batch).  A slot is a tensor in one
layout on one mesh; micro-batch ``ONCE`` is for what does not depend on the micro-batch.
Gradients are slots of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from searchspace.graph import Operator
from searchspace.layout import Layout, Placement, Reduction, Region, Shape
from searchspace.mesh import Device, Mesh

Rank = Device
SlotName = str
ONCE = -1
Key = tuple[SlotName, int]
Slices = tuple[tuple[int, int], ...]
"""Half-open interval per dimension, in the local coordinates of a buffer."""


@dataclass(frozen=True)
class Slot:
    """A tensor as one mesh holds it.

    ``time`` is the placement on the time axis: ``S(d)`` when each micro-batch holds a part, ``P``
    when micro-batches hold summands, ``R`` when they all hold the same.
    """

    name: SlotName
    tensor: str
    mesh: Mesh
    layout: Layout
    dtype: str
    time: Placement
    gradient: bool = False


@dataclass(frozen=True)
class BoundOperator:
    """An operator inside a segment: variables for its inputs and outputs, and the regions they hold.

    Variables are indices into the segment's variable numbering: ``0 .. len(inputs) - 1`` are the
    segment's inputs, the others are produced inside.
    """

    operator: Operator
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    regions: tuple[Region, ...]
    whole: tuple[Shape, ...]


@dataclass(frozen=True)
class SegmentCode:
    """Communication-free straight-line code for one rank and one micro-batch shape.

    ``inputs`` variables come first; ``outputs`` are the variables that are returned.
    ``differentiable`` says which inputs need a gradient, ``output_gradients`` which outputs get one.
    """

    name: str
    operators: tuple[BoundOperator, ...]
    inputs: int
    outputs: tuple[int, ...]
    differentiable: tuple[bool, ...]
    output_gradients: tuple[bool, ...]


@dataclass(frozen=True)
class Forward:
    """Run a segment.  With ``keep`` the autograd graph is kept under (segment, micro_batch).

    What autograd would save of the inputs in ``released`` (indices) is not saved: the segment's
    :class:`Backward` reads them again from the same keys (a gathered parameter, ZeRO-3).
    """

    segment: SegmentCode
    micro_batch: int
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    keep: bool
    released: tuple[int, ...] = ()


@dataclass(frozen=True)
class Backward:
    """Differentiate the kept segment and drop its graph.

    ``output_gradients`` gives the gradient of each output (None: not differentiable; a key that
    holds nothing counts as zero).  For each input with a key in ``input_gradients`` the gradient is
    *added* to that key in the dtype of its slot (stored if it holds nothing; zero if autograd
    returns none): a float32 slot accumulates bfloat16 gradients in float32.  ``fetched`` are the
    keys of the released inputs, present again.
    """

    segment: str
    micro_batch: int
    output_gradients: tuple[Key | None, ...]
    input_gradients: tuple[Key | None, ...]
    fetched: tuple[Key, ...] = ()


ExchangeKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive", "local"]


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a communication: buffer ``source`` becomes buffer ``target``.

    All kinds share one meaning.  The target buffer has ``shape`` and ``dtype`` and starts as zeros.
    For each ``(peer, slices)`` in ``receive`` the slices of the target are filled with what that peer
    sends to this rank: its entry ``(this rank, slices)`` in ``send``, of its source cast to the
    target's dtype first.  Several entries for one peer match in order.  With ``reduction`` the
    entries that fill the same slices are combined.  An entry for the rank itself is a local copy.

    ``group`` are the ranks that take part, ascending in mesh order.  ``all_reduce``: every member
    sends its whole buffer to every member.  ``all_gather``: every member sends its whole buffer;
    ``reduce_scatter``: member j's target is the reduction of everybody's slices for j.  ``local``
    only has entries for the rank itself; with no entry at all the target is zeros.
    ``source`` is None for ranks that only receive, ``target`` for ranks that only send.
    """

    kind: ExchangeKind
    group: tuple[Rank, ...]
    source: Key | None
    target: Key | None
    send: tuple[tuple[Rank, Slices], ...] = ()
    receive: tuple[tuple[Rank, Slices], ...] = ()
    reduction: Reduction | None = None
    shape: Shape = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Accumulate:
    """Add ``source`` to ``target``, in the dtype of the target's slot.

    A target that holds nothing takes the source's data; booleans combine by "or".
    """

    source: Key
    target: Key


@dataclass(frozen=True)
class Alias:
    """Let ``target`` name the same data as ``source`` (same layout, another slot)."""

    source: Key
    target: Key


@dataclass(frozen=True)
class Ones:
    """Set ``target`` to ones: the seed of the backward pass."""

    target: Key
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class Free:
    """Forget buffers that no later instruction of this rank reads."""

    keys: tuple[Key, ...]


Instruction = Forward | Backward | Exchange | Accumulate | Alias | Ones | Free


@dataclass(frozen=True)
class Step:
    """One position in the global order: an instruction for each rank that takes part."""

    ranks: Mapping[Rank, Instruction]


@dataclass(frozen=True)
class ParameterBinding:
    """Which slots belong to a parameter.

    ``optimizer`` is the shard that the optimizer steps on, ``gradient`` the slot in which its
    gradient arrives (same mesh and layout), ``stored`` the slots that segments and conversions read.
    A stored slot in ``shared`` has the optimizer slot's layout, mesh and dtype, and is the same buffer.
    """

    tensor: str
    source: str
    optimizer: SlotName
    gradient: SlotName | None
    stored: tuple[SlotName, ...]
    shared: tuple[SlotName, ...]


@dataclass(frozen=True)
class Program:
    """A program for all ranks.

    Before it runs, the runtime binds ``inputs`` (graph input tensor -> slot: the global batch on
    every rank), ``parameters``, ``buffers`` and ``constants`` (tensor -> slot, whole on every rank),
    all under micro-batch ``ONCE``.  After it has run, ``outputs`` names the slots of the results
    (graph tensor -> slot, whole on every rank), ``loss`` that of the loss, and ``buffer_updates`` says
    which key is the new value of which buffer slot.
    """

    slots: Mapping[SlotName, Slot]
    steps: tuple[Step, ...]
    ranks: tuple[Rank, ...]
    inputs: Mapping[str, SlotName]
    parameters: tuple[ParameterBinding, ...]
    buffers: Mapping[str, SlotName]
    constants: Mapping[str, SlotName]
    outputs: Mapping[str, SlotName] = field(default_factory=dict)
    loss: SlotName | None = None
    buffer_updates: tuple[tuple[Key, SlotName], ...] = ()

    def of_rank(self, rank: Rank) -> tuple[Instruction, ...]:
        """The projection on one rank."""
        return tuple(step.ranks[rank] for step in self.steps if rank in step.ranks)
