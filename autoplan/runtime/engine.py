"""The engine: turns one rank's instructions into calls, bound once and run many times.

Everything but communication happens here.  Backward is ``torch.autograd.grad`` over the inputs and
outputs of a segment; a segment's inputs are cut from whatever produced them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.dtypes import torch_dtype
from autoplan.runtime.release import Release
from autoplan.runtime.store import Kept, Store
from searchspace.errors import ExecutionError
from searchspace.program import (
    Accumulate,
    Alias,
    Backward,
    Exchange,
    Forward,
    Free,
    Instruction,
    Key,
    Ones,
    Slot,
    SlotName,
)

Call = Callable[[], None]


class Engine:
    """Binds the local instructions of one rank to its store."""

    def __init__(self, store: Store, slots: Mapping[SlotName, Slot], compiler: SegmentCompiler) -> None:
        self.store = store
        self.slots = slots
        self.compiler = compiler
        self.device = compiler.device

    def bind(self, instruction: Instruction) -> Call:
        """The call that carries ``instruction`` out; exchanges belong to the communicators."""
        match instruction:
            case Forward():
                return self._forward(instruction)
            case Backward():
                return self._backward(instruction)
            case Accumulate(source, target):
                return self._accumulate(source, target)
            case Alias(source, target):
                return lambda: self.store.share(source, target)
            case Ones(target, shape, dtype):
                # never owned, hence never modified: one buffer serves all runs
                ones = torch.ones(shape, dtype=torch_dtype(dtype), device=self.device)
                return lambda: self.store.put(target, ones)
            case Free(keys):
                return self._free(keys)
            case Exchange():
                raise ExecutionError("an exchange needs a communicator")

    def _forward(self, op: Forward) -> Call:
        segment = self.compiler(op.segment)
        buffers, owned, kept = self.store.buffers, self.store.owned, self.store.kept
        inputs, outputs, touched = op.inputs, op.outputs, op.inputs + op.outputs
        identity, released = (op.segment.name, op.micro_batch), op.released
        differentiable = op.segment.differentiable
        tensors = [self.slots[key[0]].tensor for key in inputs]
        again = [tensor in tensors[:i] for i, tensor in enumerate(tensors)]

        def forward() -> None:
            with torch.no_grad():
                results = segment(*[buffers[key] for key in inputs])
            for key, result in zip(outputs, results, strict=True):
                buffers[key] = result.detach() if result.requires_grad else result
            if owned:  # outputs may be views of inputs, and autograd saves both
                owned.difference_update(touched)

        def forward_and_keep() -> None:
            leaves, lasting = [], []
            for key, wanted, second in zip(inputs, differentiable, again, strict=True):
                value = buffers[key]
                # parameters are leaves already, but two slots of one may share a buffer and want a gradient each
                own = value.requires_grad is wanted and not second
                leaves.append(value if own else value.detach().requires_grad_(wanted))
                lasting.append(own)
            if released:
                with torch.enable_grad():
                    release = Release(leaves, released)
                    with release.saving():
                        results = segment(*release.arguments)
                kept[identity] = Kept(results, release.leaves, lasting, release)
            else:
                with torch.enable_grad():
                    results = segment(*leaves)
                kept[identity] = Kept(results, leaves, lasting)
            for key, result in zip(outputs, results, strict=True):
                buffers[key] = result.detach() if result.requires_grad else result
            if owned:
                owned.difference_update(touched)

        return forward_and_keep if op.keep else forward

    def _backward(self, op: Backward) -> Call:
        store, buffers = self.store, self.store.buffers
        identity = (op.segment, op.micro_batch)
        seeds = [(i, key) for i, key in enumerate(op.output_gradients) if key is not None]
        wanted = [
            (i, key, torch_dtype(self.slots[key[0]].dtype))
            for i, key in enumerate(op.input_gradients)
            if key is not None
        ]

        def backward() -> None:
            kept = store.kept.pop(identity)
            results, leaves = kept.outputs, kept.leaves
            if kept.release is not None:
                kept.release.restore([buffers[key] for key in op.fetched])
            outs, grads = [], []
            for i, key in seeds:
                grad = buffers.get(key)
                if grad is not None and results[i].requires_grad:
                    outs.append(results[i])
                    grads.append(grad)
                    store.lend(key)  # autograd may return this very buffer
            sources = [leaves[i] for i, _, _ in wanted]
            added = [store.collect(key, leaf) for (_, key, _), leaf in zip(wanted, sources, strict=True)]
            found = _gradients(outs, grads, sources, added)
            fresh = {}
            for (i, key, dtype), leaf, grad, done in zip(wanted, sources, found, added, strict=True):
                if done:
                    if not kept.lasting[i]:
                        store.collected(key)
                elif grad is not None:
                    leaf.grad = None
                    if key in buffers or grad.dtype is not dtype:
                        store.add(key, grad, dtype)
                    else:
                        buffers[key] = fresh[key] = grad
                elif key not in buffers:
                    store.put(key, torch.zeros_like(leaf, dtype=dtype, requires_grad=False), owned=True)
            store.own_alone(fresh, (*results, *grads, *leaves))

        return backward

    def _accumulate(self, source: Key, target: Key) -> Call:
        store = self.store
        dtype = torch_dtype(self.slots[target[0]].dtype)

        def accumulate() -> None:
            store.lend(source)  # the target may take the very buffer
            store.add(target, store.buffers[source], dtype)

        return accumulate

    def _free(self, keys: tuple[Key, ...]) -> Call:
        forget = self.store.forget

        def free() -> None:
            for key in keys:
                forget(key)

        return free


def _gradients(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor], added: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The gradient of each input; where ``added``, autograd adds it to the input's ``.grad`` instead."""
    if not outputs or not inputs:
        return (None,) * len(inputs)
    if not any(added):
        return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
    torch.autograd.backward(outputs, seeds, inputs=inputs)
    return [None if done else leaf.grad for leaf, done in zip(inputs, added, strict=True)]


def describe(instruction: Instruction) -> str:
    """An instruction in a few words, for messages."""
    match instruction:
        case Forward(segment, micro_batch):
            return f"forward of segment {segment.name}, micro-batch {micro_batch}"
        case Backward(segment, micro_batch):
            return f"backward of segment {segment}, micro-batch {micro_batch}"
        case Exchange(kind, group, source, target):
            return f"{kind} from {_key(source)} to {_key(target)} among ranks {list(group)}"
        case Accumulate(source, target) | Alias(source, target):
            return f"{type(instruction).__name__.lower()} {_key(source)} to {_key(target)}"
        case Ones(target):
            return f"ones in {_key(target)}"
        case Free(keys):
            return f"free {', '.join(map(_key, keys))}"


def _key(key: Key | None) -> str:
    if key is None:
        return "nothing"
    return key[0] if key[1] < 0 else f"{key[0]}[{key[1]}]"


def run_calls(calls: Sequence[Call], labels: Sequence[object]) -> None:
    """Run the calls in order; an error says at which instruction it happened."""
    position = 0
    try:
        for call in calls:
            call()
            position += 1
    except Exception as error:
        label = labels[position]
        text = label if isinstance(label, str) else describe(label)  # type: ignore[arg-type]
        error.add_note(f"at instruction {position + 1} of {len(calls)}: {text}")
        raise
