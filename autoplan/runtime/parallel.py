"""``Parallel``: a model that runs by a plan, with the face of a module that trains itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoplan.operators.randomness import set_step
from autoplan.runtime import agreement, gradients, progress
from autoplan.runtime.agreement import Agreed
from autoplan.runtime.bound import BoundProgram, Programs
from autoplan.runtime.codegen import SegmentCompiler, SegmentOptions
from autoplan.runtime.optimizers import OptimizerCheck
from autoplan.runtime.parameters import ParameterShard, Shards
from autoplan.runtime.state import State
from autoplan.runtime.transport import Transport
from searchspace.errors import ExecutionError, NonFiniteError
from searchspace.graph import Graph
from searchspace.plan import Mode

if TYPE_CHECKING:
    from autoplan.runtime.checkpoint import Scheduler
    from autoplan.runtime.checkpoint_holding import Holding

Nonfinite = Literal["ignore", "raise", "skip"]


class Model(Protocol):
    """What the runtime needs of a captured model (``autoplan.capture.Captured`` has it)."""

    @property
    def graph(self) -> Graph: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def constants(self) -> Mapping[str, Tensor]: ...

    @property
    def training(self) -> bool: ...

    def difference(self, training: bool) -> str: ...

    def flatten_call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        loss_args: Sequence[Any] | None,
        *,
        batch: int | None,
    ) -> dict[str, Tensor]: ...

    def batch_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, loss_args: Sequence[Any]
    ) -> int | None: ...

    def unflatten_outputs(self, tensors: Sequence[Tensor | None]) -> Any: ...


@dataclass(frozen=True)
class RuntimeOptions:
    """How a plan is run.

    Fields
        sharded_input: each rank passes its own part of the batch; the parts of all ranks, in the order of
            the ranks, are the global batch.  Otherwise every rank passes the whole of it.
        nonfinite: what happens when the loss or a gradient is NaN or infinite on any rank: ``"ignore"``,
            ``"raise"`` NonFiniteError on all ranks, or ``"skip"``: the call leaves no gradient on any rank.
        seed: of dropout and other random operators; together with the count of calls it fixes every mask.
        segments: how generated code is compiled and where it is written.
    """

    sharded_input: bool = False
    nonfinite: Nonfinite = "ignore"
    seed: int = 0
    segments: SegmentOptions = field(default_factory=SegmentOptions)

    def __post_init__(self) -> None:
        if self.nonfinite not in ("ignore", "raise", "skip"):
            raise ExecutionError(f'expected nonfinite to be "ignore", "raise" or "skip", got {self.nonfinite!r}')


class Parallel:
    """A model that runs by a plan on the ranks of ``transport``.

    Every method but the properties and ``parameters`` is collective: all ranks call it, in the same order.
    The user's module is read, not changed: parameters and buffers are copied, each rank only its part.
    Where the ranks' modules have different values (nobody set the seed), rank 0's count.
    """

    def __init__(
        self, model: Model, programs: Programs, transport: Transport, options: RuntimeOptions = RuntimeOptions()
    ) -> None:
        self.graph = model.graph
        self.options = options
        self.transport = transport
        self.step = 0
        """Calls of :meth:`train_step` so far; a checkpoint keeps it."""
        self.skipped = 0
        """Calls whose gradients were dropped because they were not finite."""
        self.information: dict[str, Any] = {}
        """What a checkpoint says besides: the plan, by whoever made it."""
        self._model = model
        reference = programs.train or programs.forward()
        ranks = reference.ranks
        if not set(transport.ranks) <= set(ranks) or transport.world > len(ranks):
            raise ExecutionError(f"the plan runs on ranks {list(ranks)}, but {transport.world} ranks were started")
        self._bind = partial(
            BoundProgram, transport=transport, compiler=SegmentCompiler(transport.device, options.segments)
        )
        values = {tensor.name: model.model.get_parameter(tensor.source) for tensor in model.graph.parameters}
        self.shards = Shards(model.graph, reference, transport, Agreed(transport, values))
        self._state = State(model, self.shards, transport)
        self._refresh = self._bind(programs.refresh)
        self._train = self._bind(programs.train) if programs.train is not None else None
        self._programs = programs
        self._stored: dict[Any, Tensor] = {}
        self._compared: set[BoundProgram] = set()
        self._versions: list[int] | None = None
        self._check_optimizer = OptimizerCheck(self.shards, transport)
        self._notice_steps()
        self._training = model.training
        self._differences: dict[bool, str] = {model.training: ""}

    # -- what the user steps on ------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """The shards that the optimizer of this process updates.

        Element-wise optimizers are exact on them; a step of another one is refused (ExecutionError) unless what
        it needs is whole, see :func:`autoplan.register_optimizer`.
        """
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Shards with their names in the model.

        With all ranks in one process a name comes once per rank that holds a part.
        """
        yield from self.shards.named_parameters()

    @property
    def mode(self) -> Mode:
        """``"train"``, or ``"inference"``, which has no ``train_step``."""
        return "inference" if self._train is None else "train"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget (or zero) all gradients."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @property
    def training(self) -> bool:
        """Whether any module was in training mode when the model was captured, until :meth:`train` is called."""
        return self._training

    def train(self, mode: bool = True) -> Parallel:
        """The model runs in the mode in which it was captured.

        Raises ExecutionError when the other mode is asked for and would compute something else.
        """
        if problem := self._difference(mode):
            have, want = ("training", "evaluation") if self._model.training else ("evaluation", "training")
            raise ExecutionError(
                f"{self.graph.name} was captured in {have} mode and computes something else in {want} mode "
                f"({problem}); call model.{'train' if mode else 'eval'}() before parallelize"
            )
        self._training = mode
        return self

    def eval(self) -> Parallel:
        """``train(False)``."""
        return self.train(False)

    def _difference(self, training: bool) -> str:
        """What a mode would change in what was captured; found out once, by another capture."""
        if training not in self._differences:
            self._differences[training] = self._model.difference(training)
        return self._differences[training]

    # -- running ---------------------------------------------------------------------------------

    def train_step(self, *args: Any, loss_args: Sequence[Any] = (), **kwargs: Any) -> Tensor:
        """Forward and backward: the loss, the same scalar on all ranks; gradients are added to ``.grad``.

        Raises CaptureError when the call differs from the captured one, NonFiniteError as the options say.
        """
        if self._train is None:
            raise ExecutionError(f'{self.graph.name} was planned with mode="inference"; it has no train_step')
        self.step += 1
        with self._running(self._train, args, kwargs, loss_args) as run:
            loss = run.result(run.program.loss)
            found = list(run.gradients(self.shards))
            if self._usable(loss, found):
                gradients.deliver(found)
                self._state.update_buffers(run)
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, whole on every rank.  Buffers are updated as the model's forward would."""
        with self._running(self._forward, args, kwargs, None) as run:
            output = self._output(run)
            self._state.update_buffers(run)
        return output

    def eval_step(self, *args: Any, loss_args: Sequence[Any] = (), **kwargs: Any) -> Any:
        """The loss (the output, if captured without one) of ``model.eval()``, without gradient; leaves no trace.

        Raises ExecutionError where the model was captured in training mode and evaluation mode differs.
        """
        if problem := self._difference(False):
            raise ExecutionError(
                f"{self.graph.name} was captured in training mode and computes something else in evaluation mode "
                f"({problem}), so that eval_step would be wrong; evaluate by a second one, "
                'parallelize(model, ..., mode="inference"), and give it the weights by load_state_dict(state_dict()) '
                "or save and load"
            )
        with self._running(self._evaluation, args, kwargs, loss_args) as run:
            return self._output(run) if run.program.loss is None else run.result(run.program.loss)

    def _output(self, run: BoundProgram) -> Any:
        return self._model.unflatten_outputs([run.result(run.program.outputs[name]) for name in self.graph.outputs])

    @cached_property
    def _forward(self) -> BoundProgram:
        return self._bind(self._programs.forward())

    @cached_property
    def _evaluation(self) -> BoundProgram:
        return self._bind(self._programs.evaluation())

    def _bound(self) -> Iterator[BoundProgram]:
        """What has been bound so far, and reads parameters."""
        for name in ("_train", "_forward", "_evaluation"):
            bound = self.__dict__.get(name)
            if bound is not None:
                yield bound

    def _running(
        self, bound: BoundProgram, args: Sequence[Any], kwargs: Mapping[str, Any], loss_args: Sequence[Any] | None
    ) -> BoundProgram:
        """Run ``bound``; a context within which its results can be read."""
        self.shards.check_initialised()
        self._state.check_initialised()
        inputs = self._inputs(args, kwargs, loss_args)
        if bound not in self._compared:
            self._compare(inputs)
            self._compared.add(bound)
        self.refresh()
        progress.report(self.step)
        set_step(self.options.seed, self.step)
        bound.bind_state(self.shards, self._stored, self._state)
        bound.run(inputs)
        return bound

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], loss_args: Sequence[Any] | None
    ) -> dict[str, Tensor]:
        """The graph's inputs on this process's device; without those of the loss where ``loss_args`` is None."""
        model, device, batch = self._model, self.transport.device, self.graph.batch
        if self.options.sharded_input:
            batch = model.batch_of(args, kwargs, loss_args or ())
        flat = {n: t.detach().to(device) for n, t in model.flatten_call(args, kwargs, loss_args, batch=batch).items()}
        if self.options.sharded_input:
            for name in flat:
                dim = self.graph.tensor[name].batch_dim
                if dim is not None:
                    flat[name] = self.transport.concatenate([flat[name]], dim)
                    if flat[name].shape[dim] != self.graph.batch:
                        raise ExecutionError(
                            f"the ranks' parts make a batch of {flat[name].shape[dim]}, the plan has {self.graph.batch}"
                        )
        return flat

    def _compare(self, inputs: Mapping[str, Tensor]) -> None:
        """Every rank must work on the same batch; looked at in the first call of each kind only."""
        names = agreement.differing(self.transport, {n: agreement.checksum(t) for n, t in inputs.items()})
        if names:
            sources = ", ".join(self.graph.tensor[name].source for name in names)
            raise ExecutionError(
                f"{sources}: not the same on all ranks; every rank passes the whole global batch, or, with "
                "sharded_input=True, its own part of it"
            )

    # -- parameters between steps ----------------------------------------------------------------

    def _notice_steps(self) -> None:
        """Before an optimizer's step: is it exact?  After it shards are stale, even if it wrote to ``.data``."""
        reference = weakref.ref(self)

        def stepping(optimizer: Optimizer, *_: Any) -> None:
            parallel = reference()
            if parallel is not None:
                parallel._check_optimizer(optimizer)

        def stepped(*_: Any) -> None:
            parallel = reference()
            if parallel is not None:
                parallel._versions = None

        for handle in (register_optimizer_step_pre_hook(stepping), register_optimizer_step_post_hook(stepped)):
            weakref.finalize(self, handle.remove)

    def refresh(self) -> None:
        """Bring what segments read up to date with the shards, if an optimizer has changed them.

        Happens by itself before the next step: a write to a shard is seen by its version counter, an
        optimizer's step by a hook.  (Only a write to ``parameter.data`` by hand is not seen.)
        """
        if not self._refresh.program.steps:
            return
        versions = [shard.parameter._version for shard in self.shards]
        stale = versions != self._versions
        if not self._refresh.local:  # a rank without shards takes part, and cannot see that others changed
            flags = [torch.tensor([stale], dtype=torch.int32)] * len(self.transport.ranks)
            stale = bool(self.transport.reduce(flags, "max"))
        if stale:
            self._refresh.bind_state(self.shards, {}, self._state)
            self._refresh.run({})
            self._stored = self._refresh.stored_parameters()
            self._refresh.clear()
            self._versions = versions
            for bound in self._bound():
                bound.unbind_state()

    # -- gradients -------------------------------------------------------------------------------

    def _usable(self, loss: Tensor, found: Sequence[tuple[ParameterShard, Tensor]]) -> bool:
        """Whether this call's gradients count; decided by all ranks together."""
        if self.options.nonfinite == "ignore":
            return True
        finite = gradients.all_finite([loss, *(gradient for _, gradient in found)])
        flags = [torch.tensor([not finite], dtype=torch.int32)] * len(self.transport.ranks)
        if not bool(self.transport.reduce(flags, "max")):
            return True
        if self.options.nonfinite == "skip":
            self.skipped += 1
            return False
        own = list(dict.fromkeys(shard.name for shard, gradient in found if not gradients.all_finite([gradient])))
        where = f"; on this rank in the gradients of {', '.join(own[:3])}" if own else ""
        raise NonFiniteError(f"step {self.step}: the loss is {loss.item()}, or a gradient is NaN or infinite{where}")

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the model as one vector: a float64 scalar, equal on all ranks."""
        return gradients.total_norm(self.shards, self.transport, float(norm_type))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before.

        The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)``, at most 1.
        """
        norm = self.grad_norm(norm_type)
        gradients.scale(self.parameters(), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every parameter's gradient, whole, by its name in the model; None where no rank has one."""
        return self._state.full_gradients()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Names and whole tensors as the single-device model's ``state_dict()``, on every rank."""
        return self._state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take parameters and buffers from a single-device state, each rank its part.

        Raises CheckpointError for a wrong shape and, with ``strict``, for missing or unexpected names.
        """
        self._state.load_state_dict(state, strict)
        self._forget_bound_state()

    def save(
        self,
        path: str | PathLike[str],
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint in the single-device model's names; see :mod:`autoplan.runtime.checkpoint`."""
        from autoplan.runtime import checkpoint

        self.shards.check_initialised()
        self._state.check_initialised()
        checkpoint.save(self._holding(), path, optimizer=optimizer, scheduler=scheduler, extra=extra)

    def load(
        self,
        path: str | PathLike[str],
        *,
        optimizer: Optimizer | None = None,
        scheduler: Scheduler | None = None,
        random_state: bool = True,
    ) -> Mapping[str, Any]:
        """Go on from a checkpoint of any plan, world size, or the plain model; returns the user's ``extra``."""
        from autoplan.runtime import checkpoint

        self._state.allocate()
        restored = checkpoint.load(
            self._holding(), path, optimizer=optimizer, scheduler=scheduler, random_state=random_state
        )
        self._state.others.update(restored.objects)
        self.shards.uninitialised.clear()
        self.step = restored.information.get("step", self.step)
        self.options = replace(self.options, seed=restored.information.get("seed", self.options.seed))
        self._forget_bound_state()
        return restored.extra

    def _holding(self) -> Holding:
        from autoplan.runtime.checkpoint_holding import parallel_model

        return parallel_model(
            self._state, self.shards, {**self.information, "step": self.step, "seed": self.options.seed}
        )

    def initialize(self, function: Callable[[str, tuple[int, ...]], Tensor]) -> None:
        """Give every parameter, and every buffer without a value, ``function(name, shape)``, one at a time."""
        for name in self.shards.bindings:
            tensor = self.graph.tensor[name]
            self.shards.load(name, function(tensor.source, tensor.shape))
        for name, buffer in self._state.buffers.items():
            if buffer.is_meta:
                tensor = self.graph.tensor[name]
                self._state.load_buffer(name, function(tensor.source, tensor.shape))
        self._forget_bound_state()

    def buffers(self) -> dict[str, Tensor]:
        """The buffers' present values by their names in the model, non-persistent ones too."""
        return {self.graph.tensor[name].source: value for name, value in self._state.buffers.items()}

    def _forget_bound_state(self) -> None:
        self._versions = None
        for bound in self._bound():
            bound.unbind_state()
