"""A rank's buffers.

A buffer may be named by several keys, be saved by autograd, or be on its way to another rank; nobody can
tell from the tensor.  So a buffer is modified in place only if it is *owned*: the store itself made it,
and gave it to nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from autoplan.runtime.release import Release
from searchspace.program import Key


@dataclass(slots=True)
class Kept:
    """A segment that ran forward: outputs with their autograd graph, what went in, what was let go of.

    ``lasting`` says which leaves are the buffers themselves, the same in every micro-batch.
    """

    outputs: tuple[Tensor, ...]
    leaves: list[Tensor]
    lasting: list[bool]
    release: Release | None = None


class Store:
    """The buffers of one rank, by key, and the autograd graphs of its segments.

    Fields
        buffers: what each key holds.  None of them carries an autograd graph.
        owned: keys whose buffer nobody else can see.
        changing: the keys of which it matters whether their buffer is owned (None: all).
        collecting: gradient's key -> leaf whose ``.grad`` its buffer is.
        kept: (segment, micro-batch) -> graph, from a forward until its backward.
    """

    __slots__ = ("buffers", "changing", "collecting", "kept", "owned")

    def __init__(self, changing: frozenset[Key] | None = None) -> None:
        self.changing = changing
        self.buffers: dict[Key, Tensor] = {}
        self.owned: set[Key] = set()
        self.collecting: dict[Key, Tensor] = {}
        self.kept: dict[tuple[str, int], Kept] = {}

    def put(self, key: Key, value: Tensor, owned: bool = False) -> None:
        """Let ``key`` hold ``value``."""
        self.lend(key)
        self.buffers[key] = value
        if owned:
            self.owned.add(key)

    def add(self, key: Key, value: Tensor, dtype: torch.dtype) -> None:
        """Add ``value`` to what ``key`` holds; the buffer has ``dtype``, whatever the summands have."""
        present = self.buffers.get(key)
        if present is None:
            if value.dtype == dtype:
                self.put(key, value)
            else:
                self.put(key, value.to(dtype), owned=True)
        elif key in self.owned:
            present.add_(value)
        else:
            self.put(key, torch.add(present, value).to(dtype), owned=True)

    def own_alone(self, fresh: Mapping[Key, Tensor], others: Iterable[Tensor]) -> None:
        """Own those of the ``fresh`` gradients whose memory neither another one nor one of ``others`` uses.

        ``others`` is whatever a backward pass could have returned instead of a new tensor.
        """
        asked = [key for key in fresh if self.changing is None or key in self.changing]
        if not asked:
            return
        users = Counter(value.untyped_storage().data_ptr() for value in chain(fresh.values(), others))
        for key in asked:
            value = fresh[key]
            if users[value.untyped_storage().data_ptr()] == 1 and value.is_contiguous():
                self.owned.add(key)

    def lend(self, key: Key) -> None:
        """From now on others may see the buffer of ``key``."""
        self.owned.discard(key)
        if key in self.collecting:
            self.collected(key)

    def share(self, source: Key, target: Key) -> None:
        """Let ``target`` name the buffer of ``source`` too."""
        self.lend(source)
        self.put(target, self.buffers[source])

    def forget(self, key: Key) -> None:
        self.lend(key)
        self.buffers.pop(key, None)

    def collect(self, key: Key, leaf: Tensor) -> bool:
        """Let autograd add the gradient of ``leaf`` to the buffer of ``key``, if that is possible.

        It adds in place, as soon as the gradient is known and while it is in the cache, and gradients of
        many parameters never exist at the same time.
        """
        if self.collecting.get(key) is leaf:
            return True
        if leaf.grad is not None:  # the total of another slot that shares this leaf (a tied parameter)
            for other in [other for other, held in self.collecting.items() if held is leaf]:
                self.collected(other)
        if key not in self.owned or key in self.collecting or self.buffers[key].dtype is not leaf.dtype:
            return False
        leaf.grad = self.buffers[key]
        self.collecting[key] = leaf
        return True

    def collected(self, key: Key) -> None:
        """End what :meth:`collect` began."""
        self.collecting.pop(key).grad = None

    def clear(self) -> None:
        self.buffers.clear()
        self.owned.clear()
        self.kept.clear()
        for leaf in self.collecting.values():
            leaf.grad = None
        self.collecting.clear()
