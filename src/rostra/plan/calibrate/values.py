"""What was measured of a machine, as values for JSON and for the planner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import log2
from statistics import median
from typing import Any, Self

from rostra.plan.calibrate.figure import Figure

# The layer of a Llama whose pointwise work is measured.
BETWEEN = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
}
NOISY = 0.15  # spread of a figure from which it is called uncertain


@dataclass(frozen=True)
class Share:
    """What one of `ranks` ranks with `threads` threads each does while all of them work."""

    ranks: int
    threads: int
    figures: tuple[Figure, ...]

    def of(self, what: str, kind: str | None = None) -> list[Figure]:
        return [f for f in self.figures if f.what == what and kind in (None, f.kind)]

    def products(self, kind: str) -> list[Figure]:
        return [f for f in self.figures if f.what.startswith("product ") and f.kind == kind]

    @property
    def flops(self) -> dict[str, float]:
        """The best that a product reached, operations a second, by precision."""
        kinds = {f.kind for f in self.figures if f.what.startswith("product ")}
        return {kind: max(f.rate for f in self.products(kind)) for kind in sorted(kinds)}

    @property
    def spread(self) -> float:
        """Of half of its figures, at the most; those of another program on the same cores differ
        by far more, when several threads wait for each other."""
        return median(f.spread for f in self.figures) if self.figures else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second of additions that no cache holds."""
        return max(self.of("pointwise", "add"), key=lambda f: f.sizes).rate


@dataclass(frozen=True)
class Calibration:
    """Figures of one machine. `shares` begin with one rank alone that has all threads."""

    device: str  # "cpu", or "cuda"
    shares: tuple[Share, ...]
    links: tuple[Figure, ...]  # of `link`, between 2 ranks and more
    disk: tuple[Figure, ...]
    seconds: float  # that measuring took

    def share(self, ranks: int, threads: int) -> Share:
        """The one that kept as many threads busy, as far as there are cores, in ranks as large;
        of those that were measured in quiet, if there are such."""
        most = max(s.ranks * s.threads for s in self.shares)
        busy = min(ranks * threads, most)
        quiet = [s for s in self.shares if s.spread <= NOISY]
        return min(
            quiet or self.shares,
            key=lambda s: (
                abs(log2(s.ranks * s.threads / busy)),
                abs(log2(s.threads / threads)),
            ),
        )

    def link(self, ranks: int) -> tuple[float, float]:
        """Bytes a second that a rank sends, and seconds before the first byte, from all-reduces
        of the largest and the smallest size; of the number of ranks that is nearest."""
        found = [f for f in self.links if f.kind == "all_reduce"]
        nearest = min({f.sizes[0] for f in found}, key=lambda n: abs(n - ranks))
        small, *_, large = sorted((f for f in found if f.sizes[0] == nearest), key=_size)
        return large.rate, small.seconds / (2 * (nearest - 1))

    def figures(self) -> Iterator[Figure]:
        for share in self.shares:
            yield from share.figures
        yield from self.links
        yield from self.disk

    @property
    def noisy(self) -> list[Figure]:
        """Those whose repetitions differ so much that others may have used the machine."""
        return [f for f in self.figures() if f.spread > NOISY]

    @property
    def spread(self) -> float:
        return median(f.spread for f in self.figures())

    def to_dict(self) -> dict[str, Any]:
        """`flops`, `bandwidth`, `links` by number of ranks and `disk` describe the machine, all
        its cores together; the figures themselves are in `measured`."""
        best = max(self.shares, key=lambda s: s.ranks * s.bandwidth)
        counts = sorted({f.sizes[0] for f in self.links})
        links = {n: dict(zip(("bandwidth", "latency"), self.link(n), strict=True)) for n in counts}
        return {
            "flops": {
                kind: max(s.ranks * s.flops[kind] for s in self.shares)
                for kind in self.shares[0].flops
            },
            "bandwidth": best.ranks * best.bandwidth,
            "links": {str(count): link for count, link in links.items()},
            "disk": {f.kind: f.rate for f in self.disk},
            "device": self.device,
            "spread": self.spread,
            "uncertain": len(self.noisy),
            "seconds": self.seconds,
            "measured": {
                "shares": [asdict(share) for share in self.shares],
                "links": [asdict(f) for f in self.links],
                "disk": [asdict(f) for f in self.disk],
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From what `to_dict` gave. Raises KeyError or TypeError for what it did not."""
        measured = values["measured"]
        return cls(
            values["device"],
            tuple(
                Share(s["ranks"], s["threads"], _figures(s["figures"])) for s in measured["shares"]
            ),
            _figures(measured["links"]),
            _figures(measured["disk"]),
            values["seconds"],
        )


def _figures(values: Iterable[dict[str, Any]]) -> tuple[Figure, ...]:
    return tuple(Figure(**{**value, "sizes": tuple(value["sizes"])}) for value in values)


def _size(figure: Figure) -> int:
    return figure.sizes[1]
