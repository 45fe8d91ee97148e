"""What a device holds: parameters, gradients, optimizer state, activations, and the peak in between.

Activations are counted by *storage*: a view shares the storage of what it views, and a storage that
several operators save is kept once.  Between forward and backward the runtime keeps what autograd saves
(``Operator.saved`` and ``saved_extra_bytes``) and the inputs and outputs of every segment.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.optimizer import state_bytes
from costmodel.units import Bytes
from searchspace.graph import DTYPE_BYTES

FRAGMENTATION = 0.04
"""Share of the activations that the caching allocator cannot use: reserved over allocated memory in
published runs lies between 2 and 8 % (torchtitan and stas00/ml-engineering report reserved GiB)."""

COMMUNICATION_BUFFERS: Bytes = 256 * 2**20
"""Staging buffers that the communication library allocates per process with several devices (NCCL: 4 MiB for
each channel, protocol and direction; 150 to 400 MiB in public logs)."""


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

    ``gradients`` are the elements of each gradient buffer that is alive at once: accumulated on the
    stage, and as the optimizer reads it where that is another layout.  With ``shared`` the optimizer
    steps on the stored elements themselves, otherwise on a copy in ``master_dtype``.  Gradients are
    accumulated and reduced in ``master_dtype``.
    """
    size, master_size = DTYPE_BYTES[dtype], DTYPE_BYTES[master_dtype]
    return ParameterBytes(
        stored=stored * size,
        gradient=sum(gradients) * master_size,
        master=0 if shared else updated * master_size,
        state=state_bytes(updated, optimizer, master_dtype),
    )


@dataclass(frozen=True)
class StorageUse:
    """One operator as memory sees it.

    ``inputs``, ``outputs`` and ``saved`` are keys of buffers, ``sizes`` the bytes of the outputs.
    ``view``: the outputs share the storage of the first input.  ``extra``: bytes saved besides.
    ``wants`` says which inputs get a gradient.
    """

    inputs: tuple[Hashable, ...]
    outputs: tuple[Hashable, ...]
    sizes: tuple[Bytes, ...]
    saved: tuple[Hashable, ...] = ()
    extra: Bytes = 0
    view: bool = False
    wants: tuple[bool, ...] = ()


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
    operators: Sequence[StorageUse],
    arriving: Mapping[Hashable, Bytes],
    kept: Iterable[Hashable] = (),
    resident: Mapping[Hashable, Bytes] | None = None,
    backward: bool = True,
) -> ActivationMemory:
    """Sweep ``operators`` forward, then backward.

    ``arriving`` are the bytes of buffers that come from elsewhere, ``kept`` the buffers that stay until
    their backward although no operator saves them, ``resident`` buffers that are counted elsewhere
    (parameters); the gradient of one is alive only while it is added to where it accumulates.
    Without ``backward`` nothing is saved.
    """
    residents = resident or {}
    root: dict[Hashable, Hashable] = {}
    size: dict[Hashable, Bytes] = {}

    def storage(key: Hashable) -> Hashable:
        return root.get(key, key)

    for key, count in arriving.items():
        size[key] = count
    for use in operators:
        for key, count in zip(use.outputs, use.sizes, strict=True):
            if use.view and use.inputs:
                root[key] = storage(use.inputs[0])
            else:
                size[key] = count

    # Kept storages are released, in backward, by the first operator in forward order that touches them.
    holder: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    saved_keys = {storage(key): None for key in kept} if backward else {}
    for index, use in enumerate(operators):
        if backward:
            saved_keys.update((storage(key), None) for key in use.saved)
        for key in use.inputs + use.outputs:
            holder.setdefault(storage(key), index)
            last[storage(key)] = index
    saved_keys = {key: None for key in saved_keys if key in size and key not in residents}
    extra = sum(use.extra for use in operators) if backward else 0
    saved = sum(size[key] for key in saved_keys) + extra

    # Forward: everything made so far, less what nobody reads any more.
    leaving: dict[int, list[Hashable]] = {}
    for key, index in last.items():
        if key not in saved_keys and key in size:
            leaving.setdefault(index, []).append(key)
    live = sum(count for key, count in arriving.items() if key not in residents)
    peak_forward = live
    for index, use in enumerate(operators):
        if not use.view:
            live += sum(use.sizes)
        live += use.extra if backward else 0
        peak_forward = max(peak_forward, live)
        live -= sum(size[key] for key in leaving.get(index, ()) if key not in residents)
    if not backward:
        return ActivationMemory(0, peak_forward, 0)

    releasing: dict[int, list[Hashable]] = {}
    for key in saved_keys:
        releasing.setdefault(holder.get(key, 0), []).append(key)
    gradients: dict[Hashable, Bytes] = {}
    held, peak_backward = saved, saved
    for index in reversed(range(len(operators))):
        use = operators[index]
        transient = 0
        for key, want in zip(use.inputs, use.wants, strict=False):
            source = storage(key)
            if want and source in residents:
                transient += residents[source]
            elif want:
                gradients.setdefault(source, size.get(source, 0))
        for key in use.outputs:
            if use.wants and any(use.wants):
                gradients.setdefault(storage(key), size.get(storage(key), 0))
        peak_backward = max(peak_backward, held + sum(gradients.values()) + transient)
        if not use.view:
            for key in use.outputs:
                gradients.pop(storage(key), None)
        held -= use.extra + sum(size[key] for key in releasing.get(index, ()))
    return ActivationMemory(saved, peak_forward, peak_backward)


def with_allowance(activations: Bytes, devices: int) -> Bytes:
    """Activations with what the allocator loses, and the communication library's buffers."""
    return round(activations * (1 + FRAGMENTATION)) + (COMMUNICATION_BUFFERS if devices > 1 else 0)
