"""What a device holds: parameters, gradients, optimizer state, activations, and the peak in between.

Activations are counted by *storage*: a view shares the storage of what it views, and a storage that
several operators save is kept once.  Between forward and backward the runtime keeps what autograd saves
(``Operator.saved`` and ``saved_extra_bytes``) and the inputs and outputs of every segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.optimizer import state_bytes
from costmodel.units import Bytes
from searchspace.graph import DTYPE_BYTES

BufferKey = int
"""Number of a buffer; equal numbers are the same data."""

FRAGMENTATION = 0.04
"""Share of the activations that the caching allocator cannot use (assumed; reserved over allocated memory)."""


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of one parameter on the fullest device of one stage."""

    stored: Bytes = 0
    gradient: Bytes = 0
    master: Bytes = 0
    state: Bytes = 0

    @property
    def total(self) -> Bytes:
        return self.stored + self.gradient + self.master + self.state

    def __add__(self, other: ParameterBytes) -> ParameterBytes:
        return ParameterBytes(
            self.stored + other.stored,
            self.gradient + other.gradient,
            self.master + other.master,
            self.state + other.state,
        )


def parameter_bytes(
    stored: int,
    gradients: Sequence[int],
    updated: int,
    *,
    dtype: str,
    master_dtype: str,
    shared: bool,
    optimizer: str,
) -> ParameterBytes:
    """Bytes of a parameter of which a device stores ``stored`` elements and updates ``updated``.

    ``gradients`` are the elements of its gradient as it accumulates on the stage, and as the optimizer reads
    it where that is another layout: one parameter after the other goes from the first to the second.
    With ``shared`` the optimizer steps on the stored elements themselves, otherwise on a copy in
    ``master_dtype``.  Gradients are accumulated and reduced in ``master_dtype``.
    """
    size, master_size = DTYPE_BYTES[dtype], DTYPE_BYTES[master_dtype]
    return ParameterBytes(
        stored=stored * size,
        gradient=max(gradients, default=0) * master_size,
        master=0 if shared else updated * master_size,
        state=state_bytes(updated, optimizer, master_dtype),
    )


@dataclass(frozen=True)
class StorageUse:
    """One operator as memory sees it.

    ``inputs``, ``outputs`` and ``saved`` are keys of buffers, ``sizes`` the bytes of the outputs.
    ``view``: the outputs share the storage of the first input.  ``extra``: bytes saved besides.
    ``transient``: bytes that the operator itself needs while it runs.  ``wants`` says which inputs
    get a gradient.
    """

    inputs: tuple[BufferKey, ...]
    outputs: tuple[BufferKey, ...]
    sizes: tuple[Bytes, ...]
    saved: tuple[BufferKey, ...] = ()
    extra: Bytes = 0
    transient: Bytes = 0
    view: bool = False
    wants: tuple[bool, ...] = ()


@dataclass(frozen=True)
class SegmentUse:
    """A segment: its operators, what arrives for it, and what the runtime keeps of it until its backward.

    ``arriving``: bytes of inputs that no operator of the stage makes (converted, received), and whether the
    segment's recompute region makes them again.
    ``gathered``: bytes of parameters that are there only while the segment runs, forward and backward.
    ``kept``: keys of inputs and outputs.  ``region``: the recompute region, or None.
    """

    operators: tuple[StorageUse, ...]
    arriving: tuple[tuple[BufferKey, Bytes, bool], ...] = ()
    gathered: Bytes = 0
    kept: tuple[BufferKey, ...] = ()
    region: int | None = None


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of one stage and micro-batch.

    ``saved`` stay between forward and backward.  ``forward`` and ``backward`` are the peaks while either
    runs: forward of all that it makes, backward of what is saved and of the gradients on their way.
    """

    saved: Bytes = 0
    forward: Bytes = 0
    backward: Bytes = 0


def activation_memory(
    segments: Sequence[SegmentUse], resident: Mapping[BufferKey, Bytes] | None = None, backward: bool = True
) -> ActivationMemory:
    """Sweep a stage's segments forward, then backward.

    ``resident`` buffers are counted elsewhere (parameters); the gradient of one lives only until it is
    added to where it accumulates.  Of a recompute region only what comes from outside is kept; the rest
    is there again while the region runs backward.  Without ``backward`` nothing is kept.
    """
    sweep = _Sweep(segments, resident or {}, backward)
    forward = sweep.forward()
    return ActivationMemory(sweep.saved, forward, sweep.backward()) if backward else ActivationMemory(0, forward, 0)


class _Sweep:
    """Storages, who keeps them, and the two passes."""

    def __init__(self, segments: Sequence[SegmentUse], resident: Mapping[BufferKey, Bytes], backward: bool) -> None:
        self.segments, self.resident = segments, resident
        self.root: dict[BufferKey, BufferKey] = {}
        self.size: dict[BufferKey, Bytes] = {}
        self.first: dict[BufferKey, int] = {}
        self.last: dict[BufferKey, int] = {}
        keeps: list[dict[BufferKey, None]] = []
        index = 0
        for segment in segments:
            for key, count, _ in segment.arriving:
                self.size.setdefault(key, count)
            keep: dict[BufferKey, None] = dict.fromkeys(segment.kept) if backward else {}
            for use in segment.operators:
                for key, count in zip(use.outputs, use.sizes, strict=True):
                    if use.view and use.inputs:
                        self.root[key] = self.storage(use.inputs[0])
                    else:
                        self.size[key] = count
                if backward:
                    keep.update(dict.fromkeys(use.saved))
                for key in use.inputs + use.outputs:
                    self.first.setdefault(self.storage(key), index)
                    self.last[self.storage(key)] = index
                index += 1
            keeps.append({self.storage(key): None for key in keep})
        self.kept: dict[BufferKey, None] = {}
        self.again: dict[int, dict[BufferKey, None]] = {}
        made: dict[int, dict[BufferKey, None]] = {}
        for segment in segments:
            if segment.region is not None:
                inside = made.setdefault(segment.region, {})
                inside.update((self.storage(key), None) for use in segment.operators for key in use.outputs)
                inside.update((key, None) for key, _, remade in segment.arriving if remade)
        for segment, keep in zip(segments, keeps, strict=True):
            for key in keep:
                if key in self.size and key not in resident:
                    region = segment.region
                    remade = region is not None and key in made[region]
                    (self.again.setdefault(region or 0, {}) if remade else self.kept)[key] = None
        self.extra = sum(use.extra for s in segments if s.region is None for use in s.operators) if backward else 0
        self.saved: Bytes = sum(self.size[key] for key in self.kept) + self.extra
        self.with_backward = backward

    def storage(self, key: BufferKey) -> BufferKey:
        return self.root.get(key, key)

    def forward(self) -> Bytes:
        """Everything made so far, less what nobody reads any more."""
        leaving: dict[int, list[BufferKey]] = {}
        for key, index in self.last.items():
            if key not in self.kept and key in self.size and key not in self.resident:
                leaving.setdefault(index, []).append(key)
        live = peak = index = 0
        for segment in self.segments:
            live += sum(count for key, count, _ in segment.arriving if key not in self.resident)
            for use in segment.operators:
                live += 0 if use.view else sum(use.sizes)
                if self.with_backward and segment.region is None:
                    live += use.extra
                peak = max(peak, live + segment.gathered + use.transient)
                live -= sum(self.size[key] for key in leaving.get(index, ()))
                index += 1
        return peak

    def backward(self) -> Bytes:
        """What is kept, what is recomputed, and the gradients on their way."""
        releasing: dict[int, list[BufferKey]] = {}
        for key in {**self.kept, **{key: None for group in self.again.values() for key in group}}:
            releasing.setdefault(self.first.get(key, 0), []).append(key)
        gradients: dict[BufferKey, Bytes] = {}
        flowing = 0
        held = peak = self.saved
        index = sum(len(segment.operators) for segment in self.segments)
        recomputed: set[int] = set()
        for segment in reversed(self.segments):
            if segment.region is not None and segment.region not in recomputed:
                recomputed.add(segment.region)
                held += sum(self.size[key] for key in self.again.get(segment.region, ()) if key not in self.kept)
                held += sum(use.extra for s in self.segments if s.region == segment.region for use in s.operators)
            for use in reversed(segment.operators):
                index -= 1
                transient = use.transient
                differentiable = any(use.wants)
                for key in use.outputs if differentiable else ():
                    flowing += self._begin(gradients, self.storage(key))
                for key, want in zip(use.inputs, use.wants, strict=False):
                    source = self.storage(key)
                    if want and source in self.resident:
                        transient += self.resident[source]
                    elif want:
                        flowing += self._begin(gradients, source)
                peak = max(peak, held + flowing + transient + segment.gathered)
                if not use.view:
                    flowing -= sum(gradients.pop(self.storage(key), 0) for key in use.outputs)
                held -= use.extra + sum(self.size[key] for key in releasing.get(index, ()))
            # The gradient of what arrived has been converted and handed on.
            flowing -= sum(gradients.pop(key, 0) for key, _, _ in segment.arriving)
        return peak

    def _begin(self, gradients: dict[BufferKey, Bytes], key: BufferKey) -> Bytes:
        if key in gradients or key in self.resident:
            return 0
        gradients[key] = self.size.get(key, 0)
        return gradients[key]


def with_allowance(activations: Bytes) -> Bytes:
    """Activations with what the allocator loses."""
    return round(activations * (1 + FRAGMENTATION))
