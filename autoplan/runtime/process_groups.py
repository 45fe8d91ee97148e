"""One rank of many, over ``torch.distributed``: gloo on CPU, NCCL on CUDA.

Communications are issued asynchronously in program order and waited for before the first use of what
they deliver.  Since every rank issues in the same global order, none can deadlock.  Movements travel
as bytes (backends know fewer dtypes than torch); uneven parts are padded (gloo cannot gather them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.runtime.codegen import SegmentCompiler
from autoplan.runtime.engine import Call, Engine, describe, run_calls
from autoplan.runtime.exchange import Assembly, by_peer, extent, take
from autoplan.runtime.lost import communicating
from autoplan.runtime.store import Store
from autoplan.runtime.transport import Runnable
from autoplan.runtime.wire import as_bytes, cast_bytes, pack, slabs, unpack, wire_size
from searchspace.errors import ExecutionError
from searchspace.layout import Shape
from searchspace.liveness import uses
from searchspace.program import Exchange, Free, Instruction, Key, Program, Rank
from searchspace.program_check import check_program

Finish = Callable[[], None]
"""Waits for a communication and puts the target into the store."""

# torch 2.13 renames both and warns of the old names, which 2.11 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATION = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_REDUCED_AS = {torch.bool: torch.int32, torch.int16: torch.int32, torch.int8: torch.int32}
"""Dtypes that backends do not reduce, or would overflow in."""


class ProcessGroups:
    """A :class:`~autoplan.runtime.transport.Transport` for one rank of an initialised process group."""

    def __init__(self, device: torch.device, timeout: timedelta | None = None) -> None:
        if not dist.is_initialized():
            raise ExecutionError("torch.distributed is not initialised; call autoplan.runtime.launch.join first")
        self._device = device
        self.rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._groups: dict[tuple[Rank, ...], dist.ProcessGroup] = {}
        self._sends: deque[tuple[Any, tuple[Tensor, ...]]] = deque()
        self._on_cuda = device.type == "cuda"
        # Small decisions (a version changed, a gradient is infinite) are taken on the host.
        self._timeout = timeout
        self._control: dist.ProcessGroup | None = None
        if self._on_cuda:
            with communicating(self.rank, "forming the group of all ranks"):
                self._control = dist.new_group(backend="gloo", timeout=timeout)
                # NCCL wants all ranks in a communicator's first use, which may be a send otherwise
                dist.all_reduce(torch.zeros(1, device=device))

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return (self.rank,)

    @property
    def world(self) -> int:
        return self._world

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def control(self) -> dist.ProcessGroup | None:
        return self._control

    # -- programs --------------------------------------------------------------------------------

    def prepare(self, program: Program, stores: Mapping[Rank, Store], compiler: SegmentCompiler) -> Runnable:
        check_program(program)
        if max(program.ranks) >= self._world:
            raise ExecutionError(f"the program needs rank {max(program.ranks)}, but only {self._world} ranks run")
        for step in program.steps:
            for instruction in step.ranks.values():
                if isinstance(instruction, Exchange) and instruction.kind not in ("local", "send_receive"):
                    self._group(instruction.group)
        instructions = program.of_rank(self.rank)
        engine = Engine(stores[self.rank], program.slots, compiler)
        calls, labels = self._bind(instructions, engine)

        def run() -> None:
            try:
                run_calls(calls, labels)
            finally:
                self._reap(wait=True)

        return run

    def _bind(self, instructions: Sequence[Instruction], engine: Engine) -> tuple[list[Call], list[object]]:
        """The calls of this rank; before a buffer's first use stands the wait for what delivers it."""
        calls: list[Call] = []
        labels: list[object] = []
        arriving: dict[Key, str] = {}
        finishes: dict[Key, Finish] = {}

        def wait(key: Key) -> None:
            calls.append(lambda: finishes.pop(key)())
            labels.append("waiting for " + arriving.pop(key))

        for position, instruction in enumerate(instructions):
            for key in dict.fromkeys(key for keys in uses(instruction) for key in keys):
                if key in arriving:
                    wait(key)
            labels.append(instruction)
            if not isinstance(instruction, Exchange):
                calls.append(engine.bind(instruction))
                continue
            dies = instruction.source is not None and _dies(instruction.source, instructions, position)
            issue = self._exchange(instruction, engine.store, dies)
            calls.append(self._issue(issue, instruction, engine.store, finishes))
            if instruction.target is not None and instruction.kind != "local":
                arriving[instruction.target] = describe(instruction)
        for key in tuple(arriving):
            wait(key)
        return calls, labels

    def _issue(
        self, issue: Callable[[], Finish | None], exchange: Exchange, store: Store, finishes: dict[Key, Finish]
    ) -> Call:
        source, target, what = exchange.source, exchange.target, describe(exchange)

        def call() -> None:
            with communicating(self.rank, what):
                finish = issue()
            if source is not None:  # it may be on its way for long
                store.lend(source)
            if finish is not None and target is not None:
                finishes[target] = self._guarded(finish, what)

        return call

    def _guarded(self, finish: Finish, what: str) -> Finish:
        def wait() -> None:
            with communicating(self.rank, what):
                finish()

        return wait

    def _group(self, ranks: Sequence[Rank]) -> dist.ProcessGroup | None:
        """The group of ``ranks``, made on first use; all ranks of the world ask in the same order."""
        members = tuple(sorted(ranks))
        if members == tuple(range(self._world)):
            return dist.group.WORLD
        if members not in self._groups:
            with communicating(self.rank, f"forming the group of ranks {list(members)}"):
                self._groups[members] = dist.new_group(list(members), timeout=self._timeout)
        return self._groups[members]

    # -- exchanges -------------------------------------------------------------------------------

    def _exchange(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], Finish | None]:
        """A call that issues ``exchange`` and returns how to finish it."""
        alone = len(exchange.group) == 1
        if exchange.kind == "local" or (alone and exchange.kind != "send_receive"):
            return self._local(exchange, store, dies)
        make = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "send_receive": self._send_receive,
        }
        return make[exchange.kind](exchange, store, dies)

    def _local(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], None]:
        source, target, device = exchange.source, exchange.target, self._device
        assembly = Assembly.of(exchange)
        cuts = [slices for _, slices in exchange.send]
        assert target is not None

        def local() -> None:
            if source is None or not cuts:
                store.put(target, assembly.build((), device), owned=True)
                return
            held = store.buffers[source].detach()
            pieces = [take(held, slices) for slices in cuts]
            same = assembly.single and held.dtype == assembly.dtype
            if same and (not dies or pieces[0].shape == held.shape):
                store.lend(source)
                store.put(target, pieces[0])
            else:  # a view of a dying buffer would keep all of it alive
                store.put(target, assembly.build(pieces, device), owned=True)

        return local

    def _all_reduce(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], Finish]:
        source, target = exchange.source, exchange.target
        assert source is not None and target is not None and exchange.reduction is not None
        operation, group = _OPERATION[exchange.reduction], self._group(exchange.group)
        dtype = Assembly.of(exchange).dtype
        wire = _REDUCED_AS.get(dtype, dtype)

        def issue() -> Finish:
            held = store.buffers[source].detach()
            if dies and source in store.owned and held.dtype == wire and held.is_contiguous():
                result = held  # nobody else sees the source: reduce in place
            else:
                result = torch.empty(held.shape, dtype=wire, device=held.device).copy_(held)
            work = dist.all_reduce(result, operation, group=group, async_op=True)

            def finish() -> None:
                work.wait()
                store.put(target, result.to(dtype), owned=True)

            return finish

        return issue

    def _all_gather(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], Finish]:
        source, target, device = exchange.source, exchange.target, self._device
        assert source is not None and target is not None
        assembly, group = Assembly.of(exchange), self._group(exchange.group)
        arriving = by_peer(exchange.receive, sorted(exchange.group))
        itemsize = assembly.dtype.itemsize
        sizes = [sum(prod(extent(s)) for s in places) * itemsize for places in arriving.values()]
        longest = max(sizes)
        straight = slabs([places[0] for places in arriving.values()], exchange.shape)
        order = list(arriving)

        def issue() -> Finish:
            flat = cast_bytes(store.buffers[source], assembly.dtype)
            if straight:
                gathered = as_bytes(torch.empty(assembly.shape, dtype=assembly.dtype, device=device))
            else:
                if flat.numel() < longest:
                    flat = torch.cat([flat, flat.new_zeros(longest - flat.numel())])
                gathered = torch.empty(longest * len(order), dtype=torch.uint8, device=device)
            work = _all_gather_single(gathered, flat, group=group, async_op=True)

            def finish() -> None:
                work.wait()
                if straight:
                    store.put(target, gathered.view(assembly.dtype).view(assembly.shape), owned=True)
                    return
                parts = {
                    peer: unpack(gathered[i * longest : i * longest + sizes[i]], arriving[peer], assembly.dtype)
                    for i, peer in enumerate(order)
                }
                pieces = [piece for peer in exchange.group for piece in parts[peer]]
                store.put(target, assembly.build(pieces, device), owned=True)

            return finish

        return issue

    def _reduce_scatter(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], Finish]:
        source, target, device = exchange.source, exchange.target, self._device
        assert source is not None and target is not None and exchange.reduction is not None
        assembly, group = Assembly.of(exchange), self._group(exchange.group)
        operation = _OPERATION[exchange.reduction]
        wire = _REDUCED_AS.get(assembly.dtype, assembly.dtype)
        leaving = [places[0] for places in by_peer(exchange.send, sorted(exchange.group)).values()]
        sizes = [prod(extent(slices)) for slices in leaving]
        longest = max(sizes)

        def issue() -> Finish:
            held = store.buffers[source].detach().to(wire)
            if slabs(leaving, tuple(held.shape)):
                flat = held.contiguous().view(-1)
            else:
                flat = torch.zeros(longest * len(sizes), dtype=wire, device=device)
                for i, (slices, size) in enumerate(zip(leaving, sizes, strict=True)):
                    flat[i * longest : i * longest + size].view(extent(slices)).copy_(take(held, slices))
            result = torch.empty(longest, dtype=wire, device=device)
            work = _reduce_scatter_single(result, flat, operation, group=group, async_op=True)

            def finish() -> None:
                work.wait()
                mine = result[: prod(assembly.shape)].view(assembly.shape)
                store.put(target, mine.to(assembly.dtype), owned=True)

            return finish

        return issue

    def _all_to_all(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], Finish]:
        source, target, device = exchange.source, exchange.target, self._device
        assert source is not None and target is not None
        assembly, group = Assembly.of(exchange), self._group(exchange.group)
        order = sorted(exchange.group)
        leaving, arriving = by_peer(exchange.send, order), by_peer(exchange.receive, order)
        sizes = [wire_size(leaving[peer], assembly.dtype) for peer in order]
        arrive = [wire_size(arriving[peer], assembly.dtype) for peer in order]

        def issue() -> Finish:
            held = store.buffers[source]
            flat = torch.cat([pack(held, leaving[peer], assembly.dtype) for peer in order])
            got = torch.empty(sum(arrive), dtype=torch.uint8, device=device)
            work = dist.all_to_all_single(got, flat, arrive, sizes, group=group, async_op=True)

            def finish() -> None:
                work.wait()
                parts = {
                    peer: unpack(piece, arriving[peer], assembly.dtype)
                    for peer, piece in zip(order, got.split(arrive), strict=True)
                }
                pieces = [piece for peer in exchange.group for piece in parts[peer]]
                store.put(target, assembly.build(pieces, device), owned=True)

            return finish

        return issue

    def _send_receive(self, exchange: Exchange, store: Store, dies: bool) -> Callable[[], Finish | None]:
        source, target, device, me = exchange.source, exchange.target, self._device, self.rank
        assembly = Assembly.of(exchange)
        leaving, arriving = by_peer(exchange.send, exchange.group), by_peer(exchange.receive, exchange.group)
        out = [peer for peer in exchange.group if peer != me and wire_size(leaving[peer], assembly.dtype)]
        into = [peer for peer in exchange.group if peer != me and wire_size(arriving[peer], assembly.dtype)]
        sizes = {peer: wire_size(arriving[peer], assembly.dtype) for peer in into}

        def issue() -> Finish | None:
            held = None if source is None else store.buffers[source].detach()
            messages: dict[Rank, Tensor] = {}
            mine: list[Tensor] = []
            if held is not None:
                messages = {peer: pack(held, leaving[peer], assembly.dtype) for peer in out}
                mine = [take(held, slices).to(assembly.dtype) for slices in leaving[me]]
            whole = None
            if assembly.single and into:
                whole = torch.empty(assembly.shape, dtype=assembly.dtype, device=device)
                arrived = {into[0]: as_bytes(whole)}
            else:
                arrived = {peer: torch.empty(sizes[peer], dtype=torch.uint8, device=device) for peer in into}
            receives = self._transfer(messages, arrived)
            if target is None:
                return None

            def finish() -> None:
                for work in receives:
                    work.wait()
                if whole is not None:
                    store.put(target, whole, owned=True)
                    return
                parts = {peer: unpack(flat, arriving[peer], assembly.dtype) for peer, flat in arrived.items()}
                parts[me] = mine
                pieces = [piece for peer in exchange.group for piece in parts.get(peer, ())]
                store.put(target, assembly.build(pieces, device), owned=True)

            return finish

        return issue

    def _transfer(self, messages: Mapping[Rank, Tensor], arrived: Mapping[Rank, Tensor]) -> list[Any]:
        """Start all sends and receives; returns the works to wait for, sends are reaped later."""
        self._reap()
        if self._on_cuda:  # one NCCL group: sends and receives must not wait for one another
            operations = [dist.P2POp(dist.isend, message, peer) for peer, message in messages.items()]
            operations += [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in arrived.items()]
            works = dist.batch_isend_irecv(operations) if operations else []
            self._sends.extend((work, tuple(messages.values())) for work in works)
            return list(works)
        for peer, message in messages.items():
            self._sends.append((dist.isend(message, peer), (message,)))
        return [dist.irecv(buffer, peer) for peer, buffer in arrived.items()]

    def _reap(self, wait: bool = False) -> None:
        """Forget the sends that are through; with ``wait`` all of them."""
        while self._sends and (wait or self._sends[0][0].is_completed()):
            work, _ = self._sends.popleft()
            if wait:
                with communicating(self.rank, "waiting for sends"):
                    work.wait()

    # -- small collectives -----------------------------------------------------------------------

    def reduce(self, values: Sequence[Tensor], reduction: Literal["sum", "max"]) -> Tensor:
        total = values[0].clone()
        group = self._control if total.device.type == "cpu" else None
        with communicating(self.rank, f"a {reduction} over all ranks"):
            dist.all_reduce(total, _OPERATION[reduction], group=group)
        return total

    def fetch(self, owner: Rank, piece: Tensor | None, shape: Shape, dtype: torch.dtype) -> Tensor:
        if piece is None:
            piece = torch.empty(shape, dtype=dtype, device=self._device)
        piece = piece.detach().contiguous()
        with communicating(self.rank, f"a broadcast from rank {owner}"):
            dist.broadcast(as_bytes(piece), owner)
        return piece

    def concatenate(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        (part,) = parts
        front = part.detach().movedim(dim, 0).contiguous()
        counts = [
            int(count) for count in self.reduce([_one_of(self._world, self.rank, front.shape[0])], "sum").tolist()
        ]
        pieces = [
            self.fetch(owner, front if owner == self.rank else None, (count, *front.shape[1:]), front.dtype)
            for owner, count in enumerate(counts)
        ]
        return torch.cat(pieces).movedim(0, dim)


def _dies(key: Key, instructions: Sequence[Instruction], position: int) -> bool:
    """Whether ``key`` is freed before anything after ``position`` touches it."""
    for later in range(position + 1, len(instructions)):
        if any(key in keys for keys in uses(instructions[later])):
            return isinstance(instructions[later], Free)
    return False


def _one_of(count: int, index: int, value: int) -> Tensor:
    found = torch.zeros(count, dtype=torch.int64)
    found[index] = value
    return found
