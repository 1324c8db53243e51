"""Seconds of collectives over any group of a cluster's ranks.

The cost model is Hockney's: a message takes a latency and its bytes over a bandwidth. Rings send
the least (Patarasuk & Yuan 2009, J. Parallel Distrib. Comput. 69(2)), trees wait the least
(Thakur, Rabenseifner & Gropp 2005, Int. J. High Perform. Comput. Appl. 19(1)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2

from rostra.hardware.cluster import Cluster
from rostra.plan.efficiency import Efficiency


@dataclass(frozen=True)
class Group:
    """`ranks` ranks that talk, `inside` of them in a node.

    `bandwidth` is what each sends in a ring, bytes a second; `around` is the time in which a
    first byte goes once around it.
    """

    ranks: int
    inside: int
    bandwidth: float
    around: float
    hop: float  # latency of the slowest single hop
    across: float  # bandwidth of one rank to ranks of other nodes
    shares: Mapping[str, float] = field(default_factory=dict, hash=False)  # of it, by collective

    def all_gather(self, size: float) -> float:
        """Seconds until each rank has all `size` bytes, of which it brought a part."""
        if self.ranks == 1:
            return 0.0
        return self._ring(size, "all_gather")

    def reduce_scatter(self, size: float) -> float:
        """The same, backwards."""
        return 0.0 if self.ranks == 1 else self._ring(size, "reduce_scatter")

    def _ring(self, size: float, kind: str) -> float:
        bandwidth = self.bandwidth * self.shares.get(kind, 1.0)
        return (self.ranks - 1) / self.ranks * size / bandwidth + self.around

    def all_reduce(self, size: float) -> float:
        """Seconds until each rank has the sum of `size` bytes: a ring twice, or a tree up and
        down for what is small."""
        if self.ranks == 1:
            return 0.0
        ring = 2 * self._ring(size, "all_reduce")
        tree = 2 * (size / self.bandwidth + ceil(log2(self.ranks)) * self.hop)
        return min(ring, tree)

    def all_to_all(self, size: float) -> float:
        """Seconds in which each rank sends its share of `size` bytes to every other."""
        if self.ranks == 1:
            return 0.0
        bandwidth = self.bandwidth * self.shares.get("all_to_all", 1.0)
        near = (self.inside - 1) / self.ranks * size / bandwidth
        far = (self.ranks - self.inside) / self.ranks * size / self.across
        return max(near, far) + self.hop

    def send(self, size: float) -> float:
        """Seconds of a message from one rank to the next."""
        inner = self.bandwidth * self.shares.get("send", 1.0)
        one = inner if self.inside > 1 else self.across
        return size / one + self.hop if self.ranks > 1 else 0.0


def group(cluster: Cluster, efficiency: Efficiency, ranks: int, stride: int) -> Group:
    """The group of `ranks` ranks that stand `stride` apart; its nodes are filled in order.

    Where it spans nodes, every device of a node uses its own adapter, and the group has those
    of its ranks there: a ring that enters and leaves a node once is as wide as all of them
    together, up to the width of the links inside.
    """
    node = cluster.node
    inside = max(1, min(ranks, node.devices // stride))
    nodes = ceil(ranks / inside)
    link, network = node.link, cluster.network
    bandwidth, hop = link.bandwidth * efficiency.link, link.latency
    across = network.bandwidth * efficiency.network
    if nodes > 1:
        wide = across * inside
        bandwidth = min(bandwidth, wide) if inside > 1 else across
        hop = network.latency
    around = (ranks - nodes) * link.latency + (nodes - 1) * network.latency
    far = across if nodes > 1 else bandwidth
    return Group(ranks, inside, bandwidth, around, hop, far, efficiency.collectives)
