"""What communication costs, as conversions ask for it: the plug point of the cost model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from searchspace.mesh import Device, Mesh
from searchspace.program import ExchangeKind

Seconds = float
Bytes = int
Copy = tuple[Device, Device, Bytes]
"""(sending device, receiving device, bytes); the two devices differ."""


class Prices(Protocol):
    """Seconds of one exchange.

    An implementation must be deterministic, never negative, monotone in ``bytes`` and in the
    multiset of ``copies``, and cheap: conversions memoise by arguments, but ask some hundred
    questions for one new shape.  It is used as a memo key by identity, so it must not change
    and must allow weak references (any ordinary class does).
    """

    def collective(self, kind: ExchangeKind, mesh: Mesh, axes: tuple[int, ...], bytes: Bytes) -> Seconds:
        """All groups ``mesh.groups(axes)`` run one collective at the same time.

        ``axes`` are ascending indices of mesh axes; axes of size 1 may be among them.  ``bytes`` is
        the largest buffer of any rank: for ``all_reduce`` the buffer, for ``all_gather`` the gathered
        result, for ``reduce_scatter`` the input, for ``all_to_all`` the input (a rank keeps its own
        share of each of them).
        """
        ...

    def transfer(self, copies: Sequence[Copy]) -> Seconds:
        """One ``send_receive``: all copies at the same time; ``copies`` is never empty."""
        ...

    def local(self, bytes: Bytes) -> Seconds:
        """A copy within each device; ``bytes`` is the largest buffer written."""
        ...


@dataclass(frozen=True, eq=False)
class ElementCount:
    """nnScaler's toy cost: elements that one rank moves, plus 1 per step (nnScaler v0.8, ``rvd``).

    Copies between devices that go without a collective count ``transfer_factor`` times.
    """

    element_bytes: int = 4
    transfer_factor: float = 24.0

    def collective(self, kind: ExchangeKind, mesh: Mesh, axes: tuple[int, ...], bytes: Bytes) -> Seconds:
        members = prod(mesh.shape[a] for a in axes)
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (members - 1) / members * bytes / self.element_bytes + 1

    def transfer(self, copies: Sequence[Copy]) -> Seconds:
        busiest: defaultdict[tuple[str, Device], int] = defaultdict(int)
        for source, target, size in copies:
            busiest["out", source] += size
            busiest["in", target] += size
        return self.transfer_factor * (max(busiest.values()) / self.element_bytes + 1)

    def local(self, bytes: Bytes) -> Seconds:
        return 1.0
