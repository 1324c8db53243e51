"""What ranks send each other of activations: tensor, context and pipeline parallelism."""

from __future__ import annotations

from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.plan.conventions import Conventions
from rostra.plan.efficiency import Efficiency
from rostra.plan.job import Job
from rostra.plan.time.collectives import group
from rostra.plan.time.layers import Micro, stream_bytes


class ExchangeTimes:
    """Called with a Layout and its micro batch, gives the seconds of a layer's collectives,
    forward, backward and again, as far as they show: along `tensor`, and along `context`."""

    def __init__(
        self, job: Job, cluster: Cluster, efficiency: Efficiency, conventions: Conventions
    ) -> None:
        self.job, self.cluster = job, cluster
        self.efficiency, self.conventions = efficiency, conventions

    def __call__(self, layout: Layout, micro: Micro) -> tuple[float, float]:
        return self._tensor(layout, micro), self._context(layout, micro)

    def _tensor(self, layout: Layout, micro: Micro) -> float:
        """Two all-gathers and two reduce-scatters of hidden states in each direction (Korthikanti
        et al. 2022, arXiv:2205.05198, section 4.2.2). When they are asynchronous they go in as
        many parts as there are ranks, of which all but the first hide behind the products."""
        if layout.tensor == 1:
            return 0.0
        ranks = group(self.cluster, self.efficiency, layout.tensor, layout.expert)
        size = self._rows(layout) * self.job.sizes.hidden * stream_bytes(layout, self.conventions)
        again = 3 if layout.activation_checkpointing == "full" else 0
        total = (8 + again) * ranks.all_gather(size)
        if "tensor" not in self.conventions.asynchronous:
            return total
        products = micro.forward.products + micro.backward.products + micro.again.products
        return max(total - products, total / layout.tensor)

    def _context(self, layout: Layout, micro: Micro) -> float:
        """Ulysses: all-to-alls of q, k, v and of the output (Jacobs et al. 2023,
        arXiv:2309.14509); ring: keys and values, behind attention with those that are there (Liu
        et al. 2023, arXiv:2310.01889), and with their gradients on the way back."""
        if layout.context == 1:
            return 0.0
        sizes, again = self.job.sizes, layout.activation_checkpointing == "full"
        ranks = group(self.cluster, self.efficiency, layout.context, layout.tensor * layout.expert)
        width = 4 if layout.compute == "fp32" else 2
        numbers = self._rows(layout) * sizes.head_size * width / layout.tensor
        if layout.context_method == "ring":
            one = ranks.send(2 * numbers * sizes.kv_heads)
            behind = micro.scores / layout.context
            shown = (1 + again) * max(0.0, one - behind) + max(0.0, 2 * one - 2.5 * behind)
            return (layout.context - 1) * shown
        queries = ranks.all_to_all(numbers * (sizes.heads + 2 * sizes.kv_heads))
        return (2 + again) * (queries + ranks.all_to_all(numbers * sizes.heads))

    def sends(self, layout: Layout) -> float:
        """Hidden states to the next stage and their gradients back, for a micro batch."""
        if layout.pipeline == 1 or "pipeline" in self.conventions.asynchronous:
            return 0.0
        rows = self._rows(layout) / layout.tensor
        size = rows * self.job.sizes.hidden * stream_bytes(layout, self.conventions)
        stride = layout.world_size // layout.pipeline
        ranks = group(self.cluster, self.efficiency, layout.pipeline, stride)
        return 2 * layout.stages * ranks.send(size)

    def _rows(self, layout: Layout) -> float:
        return layout.micro_batch * self.job.length / layout.context
