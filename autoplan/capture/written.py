"""State that forward writes into its modules: kept exactly, or refused by name, never dropped silently.

A traced forward runs once; the parallel program repeats its operators, not its assignments.  So

- a registered buffer that is replaced by assignment is written in place instead, which the graph keeps;
- an attribute that forward assigns before it reads it cannot influence the next call: a warning says that
  the user's module does not see it change;
- one that forward reads, and that is different afterwards (a counter, a recurrent state, a list that grows),
  would make the next call differ: it is refused.  Not so where it settles: a table that is built on the first
  call and kept (tensors that depend neither on inputs, nor on parameters and buffers, nor on random numbers),
  and numbers and strings with which the next call changes nothing more and does the same operators.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from autoplan.capture.guards import is_torch_file
from searchspace.errors import AutoplanWarning, CaptureError

_DEPTH = 3  # of containers and objects inside an attribute
_REGISTERED = ("_parameters", "_buffers", "_modules")
_CLOSED = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType)
_PLAIN = (int, float, complex, str, bytes, bool, tuple, frozenset, torch.dtype, torch.device, range, slice)

_Key = tuple[int, str]
"""A module by identity, and the name of an attribute."""
_Leaves = dict[tuple[Any, ...], Any]
"""What an attribute holds, by the way into it."""


@dataclass
class _Use:
    """How forward uses an attribute: whether it is assigned before it is read, by whom, and where."""

    assigned_first: bool
    by_torch: bool
    place: str


@dataclass(frozen=True)
class Change:
    """An attribute that is different after forward: the leaves that differ, before and after."""

    key: _Key
    name: str
    use: _Use
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.after if isinstance(leaf, torch.Tensor)]

    @property
    def where(self) -> str:
        return f"{self.name} ({self.use.place})" if self.use.place else self.name

    @property
    def is_table(self) -> bool:
        """Whether tensors took the place of tensors or nothing."""
        known = all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in self.before)
        return known and 0 < len(self.tensors) == len(self.after)

    def refuse(self) -> None:
        raise CaptureError(
            f"forward reads and changes {self.where}: the next call would differ, which the parallel program "
            "cannot follow; make it a registered buffer (changed under no_grad), or an input and an output, or "
            "change it outside forward. If only the first call changes it, call the model once before"
        )


@dataclass
class Written:
    """Follows one run of forward."""

    modules: dict[int, tuple[str, nn.Module]]
    uses: dict[_Key, _Use] = field(default_factory=dict)
    before: dict[_Key, _Leaves] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    after: dict[_Key, Any] = field(default_factory=dict)

    def find_changes(self) -> list[torch.Tensor]:
        """Note what forward changed, and write replaced buffers in place.

        Returns the tensors among what changed, which become further outputs of the traced graph.  Raises
        CaptureError for what has no meaning in a parallel program: new parameters, buffers and modules.
        """
        replaced = [pair for path, module in self.modules.values() for pair in self._registered(path, module)]
        with torch.no_grad():  # all values first: buffers may have changed places
            values = [(before, after.clone()) for before, after in replaced]
            for before, value in values:
                before.copy_(value)
        after = _snapshot(self.modules)
        for key in dict.fromkeys((*self.before, *after)):
            old, new = self.before.get(key, {}), after.get(key, {})
            ways = [way for way in dict.fromkeys((*old, *new)) if not _same(old.get(way), new.get(way))]
            if ways and key[1] not in _REGISTERED:
                path, module = self.modules[key[0]]
                use = self.uses.get(key, _Use(False, False, ""))
                if use.by_torch and (use.assigned_first or type(module).__module__.startswith("torch.")):
                    continue  # old-style weight norm, the weights of an LSTM as a list: made anew each time
                gone, come = (tuple([leaves[w] for w in ways if w in leaves]) for leaves in (old, new))
                self.changes.append(Change(key, f"{_where(path)}.{key[1]}", use, gone, come))
                self.after[key] = module.__dict__.get(key[1])
        return [tensor for change in self.changes for tensor in change.tensors]

    def _registered(self, path: str, module: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers of a module that were replaced, put back, and what they were replaced by."""
        for kind in _REGISTERED:
            now, old = module.__dict__[kind], self.before[id(module), kind]
            for name in dict.fromkeys((*(way[0] for way in old), *now)):
                before, after = old.get((name,)), now.get(name)
                if before is after:
                    continue
                use = self.uses.get((id(module), name), _Use(False, False, ""))
                where = f" ({use.place})" if use.place else ""
                full = f"{_where(path)}.{name}"
                if kind != "_buffers" or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
                    what = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}[kind]
                    raise CaptureError(
                        f"forward adds, removes or replaces the {what} {full}{where}; do it once in __init__, and "
                        "change parameters outside forward"
                    )
                if after.shape != before.shape or after.dtype != before.dtype or after.requires_grad:
                    raise CaptureError(
                        f"forward replaces the buffer {full}{where} of {before.dtype} {tuple(before.shape)} by "
                        f"{after.dtype} {tuple(after.shape)}{' with a gradient' if after.requires_grad else ''}; a "
                        "buffer keeps its shape and dtype and has no gradient (detach)"
                    )
                if (
                    sum(held is before for other in self.modules for held in self.before[other, "_buffers"].values())
                    > 1
                ):
                    raise CaptureError(
                        f"forward replaces the buffer {full}{where}, which other modules share: write it in place"
                    )
                now[name] = before
                yield before, after


@dataclass
class State:
    """What the runs of a traced forward do to the state of its modules."""

    written: Written | None = None
    code: tuple[str, ...] = ()
    unsettled: tuple[Change, ...] = ()

    def proceed(self, graph_module: fx.GraphModule) -> bool:
        """Judge the first run: whether there has to be a second one, which starts where the first ended.

        Takes the further outputs away from the traced graph.  Raises CaptureError for tensors that the next
        call would read.
        """
        self.unsettled = self._judge(graph_module)
        self.code = _code(graph_module)
        assert self.written is not None
        for change in self.unsettled:
            module = self.written.modules[change.key[0]][1]
            module.__dict__[change.key[1]] = self.written.after[change.key]
        return bool(self.unsettled)

    def settle(self, graph_module: fx.GraphModule) -> None:
        """Raise CaptureError unless the second run changed nothing more and did the same operators."""
        for change in self._judge(graph_module) or (self.unsettled if _code(graph_module) != self.code else ()):
            change.refuse()

    def tell(self) -> None:
        """Warn of attributes that the parallel program does not set."""
        assert self.written is not None
        told = [change for change in self.written.changes if change.use.assigned_first]
        if told:
            more = f" and {len(told) - 1} more" if len(told) > 1 else ""
            warnings.warn(
                f"forward assigns {told[0].where}{more}: the parallel program computes the same, but does not set "
                "attributes; return from forward what you want to see",
                AutoplanWarning,
                stacklevel=2,
            )

    def _judge(self, graph_module: fx.GraphModule) -> tuple[Change, ...]:
        assert self.written is not None
        changes = self.written.changes
        count = sum(len(change.tensors) for change in changes)
        constant = iter(_constant_outputs(graph_module.graph, count))
        for change in changes:
            fixed = all(list(itertools.islice(constant, len(change.tensors))))
            if change.tensors and not change.use.assigned_first and not (change.is_table and fixed):
                change.refuse()
        _without_outputs(graph_module, count)
        return tuple(change for change in changes if not change.use.assigned_first and not change.tensors)


@contextmanager
def written_state(*roots: Any) -> Iterator[Written]:
    """While active, assignments to attributes of the modules below ``roots`` and reads of them are followed."""
    modules = {
        id(module): (path, module)
        for root in roots
        if isinstance(root, nn.Module)
        for path, module in root.named_modules()
    }
    written = Written(modules)
    written.before = _snapshot(modules)
    uses = written.uses
    assign = nn.Module.__setattr__

    def read(module: nn.Module, name: str) -> Any:
        key = id(module), name
        if key not in uses and key[0] in modules:
            frame = sys._getframe(1)
            if frame.f_code.co_filename != nn.modules.module.__file__:
                uses[key] = _use(False)
        return object.__getattribute__(module, name)

    def write(module: nn.Module, name: str, value: Any) -> None:
        key = id(module), name
        if key[0] in modules:
            new = _use(True)
            first = uses.setdefault(key, new)
            first.place, first.by_torch = new.place, first.by_torch and new.by_torch
        assign(module, name, value)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
    try:
        yield written
    finally:
        nn.Module.__setattr__ = assign  # type: ignore[method-assign]
        del nn.Module.__getattribute__


def _where(path: str) -> str:
    return f"self.{path}" if path else "self"


def _use(assigned: bool) -> _Use:
    """The use that the caller's caller makes."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, nn.modules.module.__file__):
        frame = frame.f_back
    by_torch = is_torch_file(frame.f_code.co_filename)
    while frame.f_back is not None and is_torch_file(frame.f_code.co_filename):
        frame = frame.f_back
    return _Use(assigned, by_torch, f"{frame.f_code.co_filename}:{frame.f_lineno}")


def _snapshot(modules: dict[int, tuple[str, nn.Module]]) -> dict[_Key, _Leaves]:
    """What every attribute of every module holds; what two attributes share belongs to the first."""
    seen: dict[int, None] = {}
    found: dict[_Key, _Leaves] = {}
    for identity, (_, module) in modules.items():
        for name, value in module.__dict__.items():
            depth = 1 if name in _REGISTERED else _DEPTH
            found[identity, name] = dict(_leaves(value, (), depth, seen))
    return found


def _leaves(
    value: Any, way: tuple[Any, ...], depth: int, seen: dict[int, None]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    inside: Any = None
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list | deque) or type(value) is tuple:
        inside = list(enumerate(value))
    elif isinstance(value, set):
        inside = [(id(item), item) for item in value]
    elif hasattr(value, "__dict__") and not isinstance(value, _CLOSED):
        inside = list(vars(value).items())
    if inside is None or depth == 0:
        yield way, value
    elif not isinstance(value, tuple) and id(value) in seen:
        return
    else:
        seen[id(value)] = None
        for key, item in inside:
            yield from _leaves(item, (*way, key), depth - 1, seen)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b))


def _code(graph_module: fx.GraphModule) -> tuple[str, ...]:
    return tuple(str(module.graph) for module in graph_module.modules() if isinstance(module, fx.GraphModule))


def _constant_outputs(graph: fx.Graph, count: int) -> list[bool]:
    """Whether each of the last ``count`` outputs depends on nothing but shapes."""
    output = graph.output_node()
    entries = output.args[0]
    assert isinstance(entries, tuple | list)
    known: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        random = torch.Tag.nondeterministic_seeded in tags
        inputs = node.all_input_nodes
        known[node] = node.op != "placeholder" and not random and all(known[n] for n in inputs)
    chosen = entries[len(entries) - count :] if count else ()
    return [not isinstance(entry, fx.Node) or known[entry] for entry in chosen]


def _without_outputs(graph_module: fx.GraphModule, count: int) -> None:
    """Take the last ``count`` outputs away, and what was computed for them alone."""
    if count:
        output = graph_module.graph.output_node()
        entries = output.args[0]
        assert isinstance(entries, tuple | list)
        output.args = (tuple(entries[: len(entries) - count]),)
        graph_module.graph.eliminate_dead_code()
