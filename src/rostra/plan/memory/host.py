"""What lies beside the device: host memory and NVMe under offloading, and the peaks while a model
is loaded and while a checkpoint is saved."""

from __future__ import annotations

from dataclasses import dataclass

from rostra.layout import Layout
from rostra.pieces.writing import STRETCH
from rostra.plan.memory import deepspeed
from rostra.plan.memory.weights import FLOAT, Unit


@dataclass(frozen=True)
class Beside:
    """Bytes for one rank, without the activations that wait on the host."""

    host: float = 0.0
    nvme: float = 0.0
    loading: float = 0.0
    loading_host: float = 0.0
    saving: float = 0.0
    saving_host: float = 0.0


def beside(x: Layout, held: Unit, largest: float, numbers: int) -> Beside:
    """Of a rank on a GPU that holds `held`; `largest` are the numbers of the largest thing that
    is read or drawn at once, a layer or the embedding, `numbers` those of the model.

    A model is read part by part, and a checkpoint is written from where the state lies, through
    a few megabytes (`rostra.pieces.write_pieces`). Gradients and activations do not exist then.
    """
    nvme = gradients = 0.0
    if x.engine == "deepspeed":
        lasting, nvme = deepspeed.beside(x, held, numbers)
    else:
        lasting, gradients = _offloaded(x, held)
    if x.optimizer_states == "paged_int8":
        lasting += held.states_part
    here = x.offload_parameters == "none", x.offload_optimizer == "none"
    return Beside(
        host=lasting + gradients,
        nvme=nvme,
        loading=max(held.part, FLOAT * held.trained_part) if here[0] else 0.0,
        loading_host=lasting + FLOAT * largest,
        saving=held.part * here[0] + held.states_part * here[1],
        saving_host=lasting + STRETCH,
    )


def _offloaded(x: Layout, held: Unit) -> tuple[float, float]:
    """What the torch engine keeps on the host from step to step, and the gradients there (Ren et
    al. 2021, ZeRO-Offload, arXiv:2101.06840).

    Parameters, masters and gradients are pinned (`MasterWeights`, `CPUOffloadPolicy`). Masters
    are the parameters themselves where these are on the host, and among the states under
    bf16_pure. ZeRO-1 updates a rank's part of what it holds.
    """
    if x.offload_optimizer == "none":
        return 0.0, 0.0
    updated = held.trained_pinned / (x.shard * x.context if x.sharding == "zero1" else 1)
    if x.offload_parameters == "cpu":
        return held.pinned + held.states_part, updated
    return held.states_part + (0.0 if x.compute == "bf16_pure" else updated), updated
