"""What an optimizer must see to be exact: single elements, whole tensors, or the whole model.

Each rank steps on its shards alone.  An element-wise optimizer does the same on shards as on the whole; one
that looks at a whole matrix (its norm, its singular vectors) does not where that matrix is cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from autoplan.runtime.parameters import ParameterShard, Shards
from autoplan.runtime.transport import Transport
from searchspace.errors import ExecutionError
from searchspace.layout import whole

Needs = Literal["elements", "tensors", "model"]

_ELEMENTS = "SGD Adam AdamW NAdam RAdam Adagrad RMSprop Rprop ASGD Adamax Adadelta"
_TENSORS = "Muon Adafactor"

_registered: dict[type, Needs] = {}


def register_optimizer(optimizer: type[Optimizer], needs: Needs) -> None:
    """Say what an optimizer class must see, so that it may step on the shards of a parallel model.

    Parameters
        optimizer: the class, and subclasses that do not define ``step`` anew.
        needs: ``"elements"``: each element is updated by the values of that element alone (its gradient and its
            state), and by numbers that are equal on all ranks; exact by every plan.  ``"tensors"``: one parameter
            at a time; exact where it is whole.  ``"model"``: all parameters together, as a class of which nothing
            was said; exact where every rank holds the whole model.

    torch's own optimizers are known.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
        raise ExecutionError(f"expected a subclass of torch.optim.Optimizer, got {optimizer!r}")
    if needs not in get_args(Needs):
        raise ExecutionError(f"expected needs to be one of {', '.join(get_args(Needs))}, got {needs!r}")
    _registered[optimizer] = needs


def needs_of(optimizer: type[Optimizer]) -> Needs | None:
    """What the class needs: that of the class whose ``step`` it has; None when nobody has said."""
    own = inspect.unwrap(optimizer.step)  # torch wraps the step of each class that is instantiated
    for base in optimizer.__mro__:
        if base in _registered and inspect.unwrap(base.step) is own:  # type: ignore[attr-defined]
            return _registered[base]
    return None


class OptimizerCheck:
    """Refuses steps of optimizers that would compute something else than on a single device."""

    def __init__(self, shards: Shards, transport: Transport) -> None:
        self._shards = {id(shard.parameter): shard for shard in shards}  # the shards live as long as this
        self._alone = transport.world == 1
        self._everywhere = len(transport.ranks) == 1 and all(
            len(shards.owners(name)) == 1 and len(shards.slots[binding.optimizer].mesh.devices) == transport.world
            for name, binding in shards.bindings.items()
        )
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer) -> None:
        """Raise ExecutionError unless a step of ``optimizer`` is exact on the shards that it holds."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._alone or self._seen.get(optimizer) == len(parameters):
            return
        held = [self._shards[id(p)] for p in parameters if id(p) in self._shards]
        needs = needs_of(type(optimizer))
        if held and needs != "elements" and not self._everywhere:
            cut = next((shard for shard in held if shard.region != whole(shard.shape)), None)
            if needs != "tensors" or cut is not None:
                raise ExecutionError(_refusal(type(optimizer), needs, cut))
        self._seen[optimizer] = len(parameters)


def _refusal(optimizer: type[Optimizer], needs: Needs | None, cut: ParameterShard | None) -> str:
    name = optimizer.__qualname__
    where = "a rank holds only a part of the model (or several ranks' parts)"
    if cut is not None:
        where = f"{cut.name} of shape {list(cut.shape)} is split; rank {cut.rank} holds {_text(cut)}"
    advice = "use an element-wise optimizer (AdamW, SGD), or a plan that keeps all of it on every rank"
    if needs == "tensors":
        return f"{name} needs whole parameters to be exact, but {where}; {advice}"
    if needs == "model":
        return f"{name} needs the whole model at once to be exact, but {where}; {advice}"
    return (
        f"whether {name} is exact on shards is not known, and {where}; say what its step looks at, for example "
        f'autoplan.register_optimizer({name}, needs="elements") if it updates each element by itself, or {advice}'
    )


def _text(shard: ParameterShard) -> str:
    return f"[{', '.join(f'{low}:{high}' for low, high in shard.region)}]"


def _known() -> Mapping[type, Needs]:
    lists: tuple[tuple[Needs, str], ...] = (("elements", _ELEMENTS), ("tensors", _TENSORS), ("model", "LBFGS"))
    return {
        found: needs
        for needs, names in lists
        for name in names.split()
        if (found := getattr(torch.optim, name, None)) is not None
    }


_registered.update(_known())
