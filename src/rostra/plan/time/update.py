"""The optimizer's step, on the device, its host or NVMe, and activations that wait on the host."""

from __future__ import annotations

from rostra.hardware.cluster import Cluster
from rostra.layout import Layout
from rostra.plan.efficiency import Efficiency
from rostra.plan.job import Job
from rostra.plan.time.flops import trainable
from rostra.plan.time.kernels import Kernels

# Bytes that an optimizer's step moves for a number: AdamW reads weight, gradient and two states
# and writes all but the gradient; clipping reads gradients, and reads and writes them again.
UPDATE = {"adamw": 28, "sgd": 20, "lion": 20, "adafactor": 32, "muon": 40}
CLIP = 12
LOW_BIT = {"fp32": 0, "int8": 12, "paged_int8": 12, "fp8": 12, "int4": 14}  # bytes fewer
STATES = 24  # bytes of master weight and two states, read from NVMe and written back


def update_bytes(kind: str) -> int:
    """Moved for a number by an optimizer, or by AdamW with states of a low-bit kind."""
    return UPDATE[kind] if kind in UPDATE else UPDATE["adamw"] - LOW_BIT[kind]


class UpdateTimes:
    """Called with a Layout, gives the seconds of the optimizer's step, and of moving what it
    needs between device, host and NVMe."""

    def __init__(self, job: Job, cluster: Cluster, efficiency: Efficiency) -> None:
        self.job, self.cluster, self.efficiency = job, cluster, efficiency
        self.trained = trainable(job)
        self.kernels = Kernels(cluster.device, efficiency)

    def __call__(self, layout: Layout) -> tuple[float, float]:
        numbers = self.trained / layout.tensor / layout.pipeline
        if layout.sharding != "no_shard":
            numbers /= layout.shard * layout.context
        size, products = self._work(layout)
        node = self.cluster.node
        if layout.offload_optimizer == "none":
            return numbers * size / self.cluster.device.bandwidth + products, 0.0
        parameters_too = layout.offload_parameters != "none"
        moved = (4 if parameters_too else 8) * numbers / self._link  # gradients; and weights back
        if layout.offload_optimizer == "nvme" and node.nvme_bandwidth:
            moved += STATES * numbers / (node.nvme_bandwidth / node.devices)
        return numbers * size / (node.host_bandwidth / node.devices), moved

    def _work(self, layout: Layout) -> tuple[float, float]:
        """Bytes that a number's update costs as much as, and seconds of products.

        Muon makes every matrix orthogonal by five iterations of Newton and Schulz, X Xᵀ, its
        square, and that times X (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).
        """
        name, states = self.job.config.optimizer.name, layout.optimizer_states
        kind = name if states == "fp32" or layout.compile else states
        share = self.efficiency.optimizers.get(kind, self.efficiency.optimizer)
        size = (UPDATE[name] - LOW_BIT[states]) / share
        if self.job.config.stability.clip is not None:
            size += CLIP / self.efficiency.optimizer
        if name != "muon" or layout.adapter != "none":
            return size, 0.0
        seconds = 0.0
        for layer, count in self.job.sizes.layers:
            for x in layer.linears:
                short, long = sorted((x.inputs, x.outputs))
                outer = self.kernels.product(short, long, short, "bf16")
                seconds += (
                    count * 5 * (2 * outer + self.kernels.product(short, short, short, "bf16"))
                )
        return size, seconds / layout.pipeline

    @property
    def _link(self) -> float:
        return self.cluster.node.host_link.bandwidth * self.efficiency.host

    def activations(self, layout: Layout, saved: float, forward: float, backward: float) -> float:
        """What shows of bringing a layer's `saved` bytes to the host while the next computes,
        and back (Ren et al. 2021, arXiv:2101.06840, overlap copies so)."""
        if layout.activation_checkpointing != "offload":
            return 0.0
        one = saved / self._link
        return max(0.0, one - forward) + max(0.0, one - backward)
