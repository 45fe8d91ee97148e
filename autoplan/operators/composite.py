"""Composite operators: a user's function or module class that is captured whole.

Called as ever, a composite runs as it is written.  While a model is captured (:func:`capturing`) a call becomes one
operator ``autoplan_composite.<name>.default(Tensor[] tensors, int key, int[] starts) -> Tensor[]``: ``tensors`` are
those among the arguments and then, for a module, its parameters and buffers; ``key`` names a :class:`Binding`, which
knows all that is no tensor; ``starts`` hold where this rank's parts begin.  A rank computes it by running the
function on its parts (:meth:`Binding.run`), whatever control flow or autograd functions it has inside.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autoplan.operators.registry import register
from searchspace.errors import CaptureError, RuleError
from searchspace.notation import Name, parse

NAMESPACE = "autoplan_composite"

Target = TypeVar("Target", bound=Callable[..., Any])

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_capturing: ContextVar[bool] = ContextVar("autoplan_capturing", default=False)


@contextmanager
def capturing(active: bool = True) -> Iterator[None]:
    """While active, calls of composites become operators."""
    token = _capturing.set(active)
    try:
        yield
    finally:
        _capturing.reset(token)


def is_capturing() -> bool:
    """Whether a model is being captured, and no composite of it is running."""
    return _capturing.get()


@dataclass(frozen=True)
class Binding:
    """A call of a composite without its tensors.

    Fields
        owner: the composite that is called.
        module: the module it is called on, with tensors on ``meta``; None for a function.
        names: qualified names of the module's parameters and buffers, which follow the arguments' tensors.
        spec, leaves, places: structure of (args, kwargs), its leaves without tensors, and where those go.
        results: the structure of what was returned, known after the first run.
    """

    owner: Composite
    module: nn.Module | None
    names: tuple[str, ...]
    spec: Any
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    results: list[Any] = field(default_factory=list)

    def run(self, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
        """What the composite returns for ``tensors``, flat."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=False):
            leaves[place] = tensor
        args, kwargs = _pytree.tree_unflatten(leaves, self.spec)
        kwargs = {**kwargs, **dict(zip(self.owner.offsets, starts, strict=True))}
        with capturing(False):
            if self.module is None:
                returned = self.owner.function(*args, **kwargs)
            else:
                state = dict(zip(self.names, tensors[len(self.places) :], strict=True))
                returned = torch.func.functional_call(self.module, state, args, kwargs)
        found, spec = _pytree.tree_flatten(returned)
        if not all(isinstance(leaf, Tensor) for leaf in found) or not found:
            raise CaptureError(
                f"composite {self.owner.name} returned {[type(leaf).__name__ for leaf in found]}; "
                "expected tensors (in nested containers, if you like)"
            )
        if not self.results:
            self.results.append(spec)
        # an operator's outputs are tensors of their own, not views of its inputs or of each other
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        return [leaf.clone() if leaf.untyped_storage()._cdata in given else leaf for leaf in found]


@dataclass(frozen=True, eq=False)
class Composite:
    """A function or a module class with a dimension rule; made by :func:`composite`.

    Fields
        function: the function, or the class's own ``forward``.
        rule: text in the notation of :mod:`searchspace.notation`, one term for each tensor.
        offsets: keyword arguments of ``function`` that receive where this rank's part of an identifier starts.
        sizes: extents of identifiers that shapes do not determine.
        linear: sets of inputs whose partial sums pass through.
        shapes: what gives the results on ``meta`` where the function cannot run on tensors without data.
        flops: floating point operations as a function of the tensors' shapes, where they cannot be counted.
    """

    name: str
    function: Callable[..., Any]
    rule: str
    offsets: Mapping[str, str]
    sizes: Mapping[str, int]
    linear: tuple[tuple[int, ...], ...]
    shapes: Callable[..., Any] | None
    flops: Callable[..., float] | None

    @property
    def target(self) -> str:
        return f"{NAMESPACE}.{self.name}.default"

    def call(self, module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as one operator; what it returns has the structure that the function returns."""
        tensors, key = self.bind(module, args, kwargs)
        returned = getattr(getattr(torch.ops, NAMESPACE), self.name)(tensors, key, [0] * len(self.offsets))
        return _pytree.tree_unflatten(returned, _BINDINGS[key].results[0])

    def bind(
        self, module: nn.Module | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], int]:
        """The tensors of a call, and the key of the binding that holds all else."""
        leaves, spec = _pytree.tree_flatten((args, dict(kwargs)))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        if not places:
            raise CaptureError(f"composite {self.name} is called without a tensor: there is nothing to split")
        plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        state = {} if module is None else {**dict(module.named_parameters()), **dict(module.named_buffers())}
        skeleton = None if module is None else _skeleton(module, self.name)
        binding = Binding(self, skeleton, tuple(state), spec, plain, places)
        return [leaves[i] for i in places] + list(state.values()), _key(binding)


_BINDINGS: list[Binding] = []
"""Bindings by key, in order of their first capture in this process."""
_KEYS: dict[tuple[Composite, bytes], int] = {}


def composite(
    rule: str,
    *,
    offsets: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    shapes: Callable[..., Any] | None = None,
    flops: Callable[..., float] | None = None,
    name: str | None = None,
) -> Callable[[Target], Target]:
    """Make a function or an ``nn.Module`` class one operator that is split as ``rule`` says.

        @autoplan.composite("t d, t e+, e d h, e h d -> t d")
        def experts(x, gates, up, down): ...

    Parameters
        rule: dimension notation (:mod:`searchspace.notation`) with one term for each tensor among the arguments,
            in order; for a class these are followed by its parameters and buffers, in the order of
            ``named_parameters()`` and ``named_buffers()``.  An argument that is None or no tensor has no term.
        offsets: keyword arguments of the function (or ``forward``), with default 0, that are given where this rank's
            part of an identifier starts in the whole, as in ``{"first_expert": "e"}``.
        sizes: extents of identifiers inside merged dimensions such as ``(h d)``.
        linear: sets of inputs (by index of the tensor) in which the function is linear.
        shapes: called like the function, returns tensors on ``meta`` of the whole results' shapes and dtypes.  Needed
            only where the function cannot run on tensors without data and its results do not have the shapes that
            the rule gives and the dtype of its first tensor.
        flops: of the whole forward, called with the tensors' shapes, where they cannot be counted.
        name: of the operator, by default the function's or class's own.

    The function must compute its part from parts of its arguments: no number of its own may stand for a dimension
    that is split, it draws no random numbers, and writes to no argument.  Capture checks the rule by running the
    function on small tensors, whole and split; :func:`autoplan.verify_rule` does so with tensors of the user's.
    Raises RuleError for a rule that cannot be read.
    """
    terms = [term for term in parse(rule).inputs if term is not None]
    known = {atom.id for term in terms for dim in term.dims for atom in dim if isinstance(atom, Name)}
    for argument, identifier in (offsets or {}).items():
        if identifier not in known:
            raise RuleError(f"offsets: {argument!r} is to start {identifier!r}, which no input of rule {rule!r} has")

    def decorate(target: Target) -> Target:
        is_class = isinstance(target, type) and issubclass(target, nn.Module)
        if not is_class and (isinstance(target, type) or not callable(target)):
            raise CaptureError(f"expected a function or an nn.Module class, got {target!r}")
        function = target.forward if is_class else target  # type: ignore[attr-defined]
        found = Composite(
            _identifier(name or target.__name__), function, rule, dict(offsets or {}), dict(sizes or {}),
            tuple(map(tuple, linear)), shapes, flops,
        )  # fmt: skip
        _define(found)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _capturing.get():
                return function(*args, **kwargs)
            return found.call(args[0], args[1:], kwargs) if is_class else found.call(None, args, kwargs)

        call.autoplan_composite = found  # type: ignore[attr-defined]
        if is_class:
            target.forward = call  # type: ignore[attr-defined]
            return target
        return call  # type: ignore[return-value]

    return decorate


def composite_of(target: Any) -> tuple[Composite, nn.Module | None] | None:
    """The composite that ``target`` is (a decorated function, or a module of a decorated class), or None."""
    found = getattr(target.forward if isinstance(target, nn.Module) else target, "autoplan_composite", None)
    return None if found is None else (found, target if isinstance(target, nn.Module) else None)


def binding(key: int) -> Binding:
    """The binding of an operator's ``key`` argument."""
    return _BINDINGS[key]


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise CaptureError(f"expected the name of a composite operator to be an identifier, got {name!r}")
    return name


def _define(found: Composite) -> None:
    """Register the operator; a definition of the same name (of a reloaded module, say) takes the place of the old."""

    def run(tensors: Sequence[Tensor], key: int, starts: Sequence[int]) -> list[Tensor]:
        return _BINDINGS[key].run(tensors, starts)

    if register(found.target, run):
        _LIBRARY.define(f"{found.name}(Tensor[] tensors, int key, int[] starts) -> Tensor[]")
        torch.library.register_fake(f"{NAMESPACE}::{found.name}", without_data, lib=_LIBRARY)
        _LIBRARY.impl(found.name, without_data, "Autograd")
    run._schema = getattr(getattr(torch.ops, NAMESPACE), found.name).default._schema  # type: ignore[attr-defined]


def without_data(tensors: Sequence[Tensor], key: int, starts: Sequence[int]) -> list[Tensor]:
    """Results of the right shapes, dtypes and gradients for tensors that have no data."""
    trained = [t for t in tensors if t.requires_grad]
    results = []
    for meta in results_of(_BINDINGS[key], tensors, starts):
        made = tensors[0].new_empty(meta.shape, dtype=meta.dtype)
        with capturing(False):  # an autograd function, as a composite may use
            results.append(_Joined.apply(made, *trained) if meta.requires_grad else made)
    return results


def results_of(bound: Binding, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """What the composite returns, on ``meta``: the function is run on tensors without data.

    Where its control flow needs data, ``shapes`` or the rule says.  CaptureError for a function that fails.
    """
    device = tensors[0].device
    with _disable_current_modes():
        given = [_like(t) for t in tensors]
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), _NoDrawing(bound.owner.name):
                fakes = [_like(t, device) for t in tensors]
                found = bound.run(fakes, starts)
        except CaptureError:
            raise
        except Exception as error:
            if not _needs_data(error):
                raise CaptureError(f"composite {bound.owner.name} fails: {type(error).__name__}: {error}") from error
            return _declared(bound, given, error)
        written = [i for i, fake in enumerate(fakes) if fake._version]
        if written:
            raise CaptureError(f"composite {bound.owner.name} writes to its tensors {written}; work on a copy")
        return [_like(t) for t in found]


def _declared(bound: Binding, tensors: Sequence[Tensor], error: Exception) -> list[Tensor]:
    """Results as ``shapes`` or the rule gives them, for a function whose control flow needs the data."""
    owner = bound.owner
    if owner.shapes is not None:
        declared = replace(owner, function=owner.shapes, offsets={})
        found = replace(bound, owner=declared, module=None).run(tensors, ())
    else:
        try:
            shapes = parse(owner.rule).output_shapes([tuple(t.shape) for t in tensors], **owner.sizes)
        except RuleError as unknown:
            raise CaptureError(f"composite {owner.name}: {unknown}, or give shapes=") from error
        found = [tensors[0].new_empty(shape) for shape in shapes if shape is not None]
        if len(found) > 1 and not bound.results:
            raise CaptureError(
                f"composite {owner.name} cannot run without data ({error}), so that the structure of its results "
                "is not known; give shapes=, a function that returns tensors on meta"
            ) from error
        if not bound.results:
            bound.results.append(_pytree.tree_structure(0))
    flows = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return [t.detach().requires_grad_(flows and t.is_floating_point()) for t in found]


def _like(tensor: Tensor, device: torch.device | str = "meta") -> Tensor:
    """Another tensor of the same shape and dtype, that requires a gradient where ``tensor`` does."""
    made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


class _Joined(torch.autograd.Function):
    """Makes a result require a gradient because the inputs do; it is never differentiated."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor) -> Tensor:
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("tensors without data have no gradients")


_DATA_ERRORS = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")


def _needs_data(error: BaseException) -> bool:
    """Whether a function failed because its tensors have no data."""
    return type(error).__name__ in _DATA_ERRORS or "meta tensor" in str(error) or "FakeTensor" in str(error)


class _NoDrawing(TorchDispatchMode):
    """Refuses random operators: replicas would draw differently, and parts would draw alike."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise CaptureError(
                f"composite {self.name} draws random numbers ({func}), which parts and replicas cannot agree on; "
                "draw them outside and pass them in"
            )
        return func(*args, **(kwargs or {}))


def _skeleton(module: nn.Module, name: str) -> nn.Module:
    """The module with its tensors on ``meta``."""
    try:
        with _disable_current_modes():
            memo: dict[int, Any] = {id(p): nn.Parameter(_like(p), p.requires_grad) for p in module.parameters()}
            memo.update({id(buffer): _like(buffer) for buffer in module.buffers()})
            return copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"composite {name}: the module cannot be copied ({type(error).__name__}: {error}); keep what is no tensor "
            "in plain attributes, and tensors in parameters and buffers"
        ) from error


def _key(found: Binding) -> int:
    """The number of an equal binding (so that repeated layers are equal operators), or a new one."""
    exact = _exact((found.spec, found.leaves, found.places, found.names, found.module))
    if exact is None or (found.owner, exact) not in _KEYS:
        if exact is not None:
            _KEYS[found.owner, exact] = len(_BINDINGS)
        _BINDINGS.append(found)
        return len(_BINDINGS) - 1
    return _KEYS[found.owner, exact]


class _Pickler(pickle.Pickler):
    """Pickles by content: tensors without data are their shapes, and no object refers to an earlier one."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_meta:
            return tuple(value.shape), str(value.dtype), value.requires_grad
        return None


def _exact(value: Any) -> bytes | None:
    """Equal bytes for equal values; None where that cannot be known, so that the value equals nothing."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except Exception:  # objects of the user's that cannot be pickled, cycles
        return None
    return stream.getvalue()
