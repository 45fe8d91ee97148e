"""What a user calls: search a plan, run it, verify it.  Joins capture, search and runtime."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture import Captured, capture
from autoplan.runtime.agreement import differing, digest
from autoplan.runtime.bound import Programs
from autoplan.runtime.codegen import SegmentOptions
from autoplan.runtime.in_process import InProcess
from autoplan.runtime.launch import join, under_torchrun
from autoplan.runtime.lost import communicating
from autoplan.runtime.parallel import Nonfinite, Parallel, RuntimeOptions
from autoplan.runtime.transport import Transport
from costmodel.cluster import Cluster, detect
from costmodel.collectives import CommunicationPrices
from searchspace.conversion import ElementCount, Prices
from searchspace.errors import ClusterError, PlanMismatchError
from searchspace.graph import Graph
from searchspace.materialize import evaluation_program, forward_program, refresh_program, train_program
from searchspace.plan import Mode, Plan, Precision, Recipe

ClusterLike = Cluster | str | PathLike[str] | Mapping[str, Any]


def search(
    model: nn.Module | Captured,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: ClusterLike | None = None,
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    mode: Mode | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_args: Sequence[Any] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    memory_limit: float | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Callable[[str, float | None], None] | None = None,
) -> Plan:
    """The best plan found for training (or running) ``model`` on ``cluster``.

    Parameters
        model, args, kwargs: the single-device model and example inputs, on ``meta`` or real; or what
            :func:`capture` returned, to search again without another capture.
        cluster: ``"h100:8x8"`` (8 nodes of 8), a file, a mapping, or a ``Cluster``; default: this machine.
        global_batch: samples of one step; default: the batch of the example inputs.
        optimizer: for its memory: ``"adamw"``, ``"adam"``, ``"sgd"``, ...
        precision: ``"float32"`` (the model's own dtypes; default), ``"bf16"`` (float32 master weights),
            ``"autocast"``.
        mode: ``"train"`` (default) or ``"inference"``.
        memory_limit: bytes per device, if less than the device has.
        time_limit: seconds after which the best plan so far is returned.

    Raises CaptureError, ClusterError, or InfeasibleError (which says by how much nothing fits).
    """
    from autoplan.search import search_plan

    machine = this_cluster() if cluster is None else Cluster.parse(cluster)
    kind = "cuda" if machine.device(0).backend == "cuda" and torch.cuda.is_available() else None
    captured = _captured(model, args, kwargs, mode, precision, loss_fn, loss_args, batch_dims, kind)
    recipe = Recipe(
        mode=captured.mode,
        precision=captured.precision,
        optimizer=optimizer,
        global_batch=global_batch or captured.graph.batch,
    )
    return search_plan(
        captured.graph,
        machine,
        recipe,
        memory_limit=memory_limit,
        time_limit=time_limit,
        seed=seed,
        progress=progress,
    )


def parallelize(
    model: nn.Module | Captured,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | str | PathLike[str] | None = None,
    cluster: ClusterLike | None = None,
    optimizer: str = "adamw",
    precision: Precision | None = None,
    mode: Mode | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_args: Sequence[Any] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    memory_limit: float | None = None,
    sharded_input: bool = False,
    nonfinite: Nonfinite = "ignore",
    seed: int = 0,
    timeout_seconds: float = 600.0,
    compile: bool = False,
    dump: str | PathLike[str] | None = None,
) -> Parallel:
    """``model``, running by ``plan`` on the ranks that a launcher has started, or on all ranks in this process.

    Every rank of a ``torchrun`` job makes this call; without a launcher one process holds all the
    plan's ranks.  Without ``plan`` one is searched for ``cluster`` (default: the ranks at hand); rank
    0 searches, all ranks run its plan.  ``args`` and ``kwargs`` are examples of the global batch (on
    ``meta`` where it is not at hand).  Later calls pass the global batch on every rank, or with
    ``sharded_input`` each rank its own part: the parts in rank order are the global batch.

    ``nonfinite`` decides, on all ranks together, what happens to a step whose loss or gradients are
    NaN or infinite: ``"ignore"``, ``"raise"`` or ``"skip"``.  ``compile`` compiles every generated
    segment with torch.compile; ``dump`` is a folder that receives the generated code.

    Raises PlanMismatchError when the plan was made for another model or number of ranks, and
    IllegalPlanError naming the operator and the rule that an edited plan contradicts.
    """
    found = plan if isinstance(plan, Plan) or plan is None else Plan.load(plan)
    if found is not None:
        _agree("precision", precision, found.recipe.precision)
        _agree("mode", mode, found.recipe.mode)
        mode, precision = found.recipe.mode, found.recipe.precision
    transport: Transport | None = join(timeout_seconds) if _distributed() else None
    kind = None if transport is None else transport.device.type
    captured = _captured(model, args, kwargs, mode, precision, loss_fn, loss_args, batch_dims, kind)
    segments = SegmentOptions("inductor" if compile else None, None if dump is None else Path(dump))
    options = RuntimeOptions(sharded_input, nonfinite, seed, segments)
    if transport is not None:
        _check_ranks(transport, captured.graph, found, options)
    if found is None:
        make = partial(search, captured, cluster=cluster, optimizer=optimizer, memory_limit=memory_limit, seed=seed)
        found = make() if transport is None else _from_rank_0(make)
    check_plan(captured.graph, found, None if transport is None else transport.world)
    programs = make_programs(captured.graph, found)
    parallel = Parallel(captured, programs, transport or InProcess(found.world_size, _device(captured)), options)
    parallel.information["plan"] = found.to_json()
    return parallel


def check_plan(graph: Graph, plan: Plan, world: int | None = None) -> None:
    """Raise PlanMismatchError unless ``plan`` was made for ``graph`` and for ``world`` ranks."""
    if plan.model.fingerprint != graph.fingerprint:
        raise PlanMismatchError(_model_difference(graph, plan))
    if world is not None and plan.world_size != world:
        raise PlanMismatchError(f"the plan needs {plan.world_size} ranks, but {world} were started")


def make_programs(graph: Graph, plan: Plan) -> Programs:
    """The programs that a plan becomes."""
    prices = _prices(plan)
    train = train_program(graph, plan, prices) if plan.recipe.mode == "train" else None
    return Programs(
        train=train,
        forward=partial(forward_program, graph, plan, prices),
        evaluation=partial(evaluation_program, graph, plan, prices),
        refresh=refresh_program(graph, plan, prices),
    )


def this_cluster(ranks: int | None = None) -> Cluster:
    """The devices of this job as a cluster: CUDA devices where there are some, else CPU ranks."""
    joined = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    started = joined or int(os.environ.get("WORLD_SIZE", "0"))
    world = ranks or started or max(1, torch.cuda.device_count())
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or world)
    if world % local:
        raise ClusterError(f"{world} ranks are no whole number of nodes of {local} ranks; pass cluster=")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return detect(properties.name, local, properties.total_memory, nodes=world // local)
    return Cluster.parse(f"cpu:{world // local}x{local}")


def _captured(
    model: nn.Module | Captured,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    mode: Mode | None,
    precision: Precision | None,
    loss_fn: Callable[..., Any] | None,
    loss_args: Sequence[Any],
    batch_dims: Mapping[str, int | None] | None,
    device: str | None,
) -> Captured:
    if isinstance(model, Captured):
        _agree("mode", mode, model.mode)
        _agree("precision", precision, model.precision)
        return model
    return capture(
        model,
        args,
        kwargs,
        loss_fn=loss_fn,
        loss_args=loss_args,
        mode=mode or "train",
        precision=precision or "float32",
        batch_dims=batch_dims,
        device=device,
    )


def _agree(what: str, asked: str | None, found: str) -> None:
    if asked is not None and asked != found:
        raise PlanMismatchError(f"{what}={asked!r} was asked for, but the plan or capture is for {found!r}")


def _distributed() -> bool:
    return under_torchrun() or (torch.distributed.is_available() and torch.distributed.is_initialized())


def _check_ranks(transport: Transport, graph: Graph, plan: Plan | None, options: RuntimeOptions) -> None:
    """PlanMismatchError on all ranks unless they have the same model, plan and options."""
    texts = {
        "the model (operators, shapes or dtypes)": graph.fingerprint,
        "plan=": "" if plan is None else plan.replace(prediction=None, search=None).to_json(),
        "sharded_input=": str(options.sharded_input),
        "nonfinite=": options.nonfinite,
        "seed=": str(options.seed),
    }
    names = differing(transport, {name: digest(text) for name, text in texts.items()})
    if names:
        raise PlanMismatchError(f"the ranks were given different things, this must be the same: {', '.join(names)}")


def _from_rank_0(make: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on every rank; its failure is everybody's."""
    box: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        try:
            box = [make()]
        except Exception as error:
            box = [error]
    with communicating(torch.distributed.get_rank(), "receiving rank 0's plan"):
        torch.distributed.broadcast_object_list(box)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def _device(captured: Captured) -> torch.device:
    """Where the ranks in one process compute: where the model's values are."""
    first = next((p.device for p in captured.model.parameters() if not p.is_meta), None)
    return first or torch.device("cpu")


def _prices(plan: Plan) -> Prices:
    """The prices by which conversions choose their paths; the same on every rank."""
    try:
        return CommunicationPrices(Cluster.parse(plan.cluster.name))
    except ClusterError:
        warnings.warn(
            f"cluster {plan.cluster.name!r} of the plan is unknown here; communication paths are chosen by volume",
            stacklevel=3,
        )
        return ElementCount()


def _model_difference(graph: Graph, plan: Plan, limit: int = 5) -> str:
    """How the model differs from the plan's: missing, extra and changed parameters."""
    planned = {line.split(" ", 1)[0]: line for line in plan.model.signature}
    present = {line.split(" ", 1)[0]: line for line in graph.signature}
    lines = [f"missing here: {line}" for name, line in planned.items() if name not in present]
    lines += [f"not in the plan: {line}" for name, line in present.items() if name not in planned]
    lines += [
        f"{line}, in the plan {planned[name].split(' ', 1)[1]}"
        for name, line in present.items()
        if name in planned and planned[name] != line
    ]
    if not lines:
        lines = ["parameters agree, but the operators differ (another forward, dtype or loss)"]
    more = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
    return (
        f"the plan was made for model {plan.model.name!r}, not for {graph.name!r}: " + "; ".join(lines[:limit]) + more
    )
