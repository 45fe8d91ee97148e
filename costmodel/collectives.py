"""What communication costs on a cluster: latency and bandwidth per level, for groups that run at once.

Notation, as in Thakur, Rabenseifner and Gropp (IJHPCA 19(1), 2005): a group has ``p`` members, a
buffer ``n`` bytes, a hop costs ``alpha`` and a byte ``beta``.  The group lies in ``m`` fast-link
domains (nodes, as a rule) with at most ``k`` members in one of them.

    ring all-gather, reduce-scatter   (p-1) alpha + (p-1)/p n beta             section 4.1
    ring all-reduce                 2 (p-1) alpha + 2 (p-1)/p n beta           section 4.5
    tree all-reduce                 2 (k-1 + log2 m) alpha + 2 n beta          as NCCL: chains in a
                                                       node, double binary trees between (pipelined)
    all-to-all                        (p-1) alpha + (p-1)/p n beta             section 4.4, pairwise

A ring visits the members of a domain one after another, so ``m`` of its ``p`` hops cross domains,
and ``beta`` is that of the slowest hop.  A domain's network interfaces are shared evenly by the
groups that cross it at the same time, and all groups of a mesh axis run at the same time; but a
group cannot drive more interfaces than its members in the domain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2

from costmodel.cluster import Cluster
from costmodel.device import DeviceSpec
from costmodel.units import Bytes, BytesPerSecond, Seconds
from searchspace.conversion import Copy
from searchspace.mesh import Device, Mesh
from searchspace.program import ExchangeKind

Line = tuple[Seconds, float]
"""``alpha + beta n``: seconds at zero bytes, and seconds per byte."""


class CommunicationPrices:
    """The ``Prices`` of a cluster (see :class:`searchspace.conversion.Prices`).

    A collective's price is a minimum of lines over the buffer's size, one line per algorithm; the
    lines of a mesh's axes are kept.  Every exchange costs at least one launch of the slowest device.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._lines: dict[tuple[ExchangeKind, Mesh, tuple[int, ...]], tuple[Line, ...]] = {}
        self._copy_rate = min(node.device.memory_rate for node in cluster.nodes)
        self._launch = max(node.device.launch for node in cluster.nodes)

    def collective(self, kind: ExchangeKind, mesh: Mesh, axes: tuple[int, ...], bytes: Bytes) -> Seconds:
        """All groups along ``axes`` at once; 0 for groups of one member."""
        key = (kind, mesh, axes)
        lines = self._lines.get(key)
        if lines is None:
            lines = self._lines[key] = group_lines(self.cluster, kind, mesh.groups(axes))
        return min((alpha + beta * bytes for alpha, beta in lines), default=0.0)

    def transfer(self, copies: Sequence[Copy]) -> Seconds:
        """The busiest port: a device's link in or out, a node's interfaces in or out."""
        cluster = self.cluster
        inside: defaultdict[tuple[str, Device], int] = defaultdict(int)
        outside: defaultdict[tuple[str, Device], int] = defaultdict(int)
        nodes: defaultdict[tuple[str, int], int] = defaultdict(int)
        alpha = 0.0
        for source, target, size in copies:
            crossing = cluster.domain_of(source) != cluster.domain_of(target)
            ports = outside if crossing else inside
            ports["out", source] += size
            ports["in", target] += size
            for end in (source, target):
                device = cluster.device(end)
                alpha = max(alpha, device.nic.latency if crossing else device.link.latency)
            if crossing:
                nodes["out", cluster.node_of(source)] += size
                nodes["in", cluster.node_of(target)] += size
        slowest = max(
            max((size / cluster.device(d).link.rate for (_, d), size in inside.items()), default=0.0),
            max((size / _reachable_nics(cluster.device(d), 1) for (_, d), size in outside.items()), default=0.0),
            max((size / _all_nics(cluster.nodes[n].device) for (_, n), size in nodes.items()), default=0.0),
        )
        return self._launch + alpha + slowest

    def local(self, bytes: Bytes) -> Seconds:
        """Read and write ``bytes`` on the device with the slowest memory."""
        return self._launch + 2 * bytes / self._copy_rate


def group_lines(cluster: Cluster, kind: ExchangeKind, groups: Sequence[Sequence[Device]]) -> tuple[Line, ...]:
    """The lines whose minimum is the time of ``kind`` in all ``groups`` at once; empty for single members.

    The slowest group decides, so each algorithm's line is the upper envelope over the groups: the
    largest alpha with the largest beta.
    """
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return ()
    crossing = Counter(
        node
        for group in groups
        if len({cluster.domain_of(d) for d in group}) > 1
        for node in sorted({cluster.node_of(d) for d in group})
    )
    shapes = {_group_shape(cluster, group, crossing): None for group in groups}
    found: list[Line] = []
    for algorithm in _ALGORITHMS[kind]:
        lines = [algorithm(*shape) for shape in shapes]
        found.append((max(alpha for alpha, _ in lines), max(beta for _, beta in lines)))
    launch = max(cluster.device(d).launch for group in groups for d in group)
    return tuple((launch + alpha, beta) for alpha, beta in found)


Algorithm = Callable[..., Line]
Shape = tuple[int, int, int, Seconds, Seconds, BytesPerSecond, BytesPerSecond]
"""p, m, k, hop inside, hop across, one member's rate inside, the group's rate out of one domain."""


def _group_shape(cluster: Cluster, group: Sequence[Device], crossing: Counter[int]) -> Shape:
    domains: dict[int, int] = {}
    nodes: dict[int, int] = {}
    specs: dict[DeviceSpec, None] = {}
    for member in group:
        node = cluster.node_of(member)
        nodes[node] = nodes.get(node, 0) + 1
        domain = cluster.domain_of(member)
        domains[domain] = domains.get(domain, 0) + 1
        specs.setdefault(cluster.nodes[node].device)
    inside = min(spec.link.rate for spec in specs)
    outside = float("inf")
    if len(domains) > 1:
        leaving: dict[int, BytesPerSecond] = {}
        for node, members in nodes.items():
            spec = cluster.nodes[node].device
            share = min(_all_nics(spec) / crossing[node], _reachable_nics(spec, members))
            domain = cluster.domain_of_node(node)
            leaving[domain] = leaving.get(domain, 0.0) + share
        outside = min(leaving.values())
    return (
        len(group),
        len(domains),
        max(domains.values()),
        max(spec.link.latency for spec in specs),
        max(spec.nic.latency for spec in specs),
        inside,
        outside,
    )


def _all_nics(spec: DeviceSpec) -> BytesPerSecond:
    return spec.nics * spec.nic.rate


def _reachable_nics(spec: DeviceSpec, members: int) -> BytesPerSecond:
    """What ``members`` devices of a node can drive: each one interface, or its share where there are more."""
    return min(spec.nics, members * max(1.0, spec.nics / spec.devices_per_node)) * spec.nic.rate


def _ring(rounds: int) -> Algorithm:
    """Each byte passes every hop but one, ``rounds`` times."""

    def line(p: int, m: int, k: int, near: Seconds, far: Seconds, inside: float, outside: float) -> Line:
        hops = (p - 1) * near if m == 1 else (p - m) * near + (m - 1) * far
        return rounds * hops, rounds * (p - 1) / p / min(inside if k > 1 else outside, outside)

    return line


def _tree(p: int, m: int, k: int, near: Seconds, far: Seconds, inside: float, outside: float) -> Line:
    """Up and down: a chain within each domain, binary trees between domains."""
    depth = ceil(log2(m)) if m > 1 else 0
    return 2 * ((k - 1) * near + depth * far), 2 / min(inside if k > 1 else outside, outside)


def _pairwise(p: int, m: int, k: int, near: Seconds, far: Seconds, inside: float, outside: float) -> Line:
    """A member keeps 1/p, sends (k-1)/p inside its domain, and its domain's k members share the way out."""
    within, across = (k - 1) / p / inside, k * (p - k) / p / outside if m > 1 else 0.0
    return (k - 1) * near + (p - k) * far, max(within, across)


_ALGORITHMS: Mapping[ExchangeKind, tuple[Algorithm, ...]] = {
    "all_reduce": (_ring(2), _tree),
    "all_gather": (_ring(1),),
    "reduce_scatter": (_ring(1),),
    "all_to_all": (_pairwise,),
}
