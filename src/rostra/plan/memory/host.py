"""What lies beside the device: host memory and NVMe under offloading, and the peaks while a model
is loaded and while a checkpoint is saved."""

from __future__ import annotations

from dataclasses import dataclass

from rostra.layout import Layout
from rostra.plan.memory.weights import FLOAT, Unit


@dataclass(frozen=True)
class Beside:
    """Bytes for one rank."""

    host: float = 0.0
    nvme: float = 0.0
    loading: float = 0.0
    loading_host: float = 0.0
    saving: float = 0.0
    saving_host: float = 0.0


def beside(x: Layout, held: Unit, largest: float, offloaded: float, adapter: bool) -> Beside:
    """Of a rank on a GPU that holds `held`; `largest` are the numbers of the largest thing that
    is read or drawn at once, a layer or the embedding.

    Offloaded, the optimizer has masters, states and gradients on the host (Ren et al. 2021,
    ZeRO-Offload, arXiv:2101.06840), or on NVMe (Rajbhandari et al. 2021, ZeRO-Infinity,
    arXiv:2104.07857).
    """
    host = nvme = 0.0
    states = held.states_part + 2 * FLOAT * held.trained_part
    if x.offload_optimizer == "cpu":
        host += states
    elif x.offload_optimizer == "nvme":
        nvme += states
    if x.offload_parameters == "cpu":
        host += held.part
    elif x.offload_parameters == "nvme":
        nvme += held.part
    if x.optimizer_states == "paged_int8":
        host += held.states_part
    whole = x.world_size == 1 and not adapter  # made on the host, and moved
    written = held.trained_part * FLOAT + held.states_part
    return Beside(
        host=host + offloaded,
        nvme=nvme,
        loading=0.0
        if x.offload_parameters != "none"
        else max(held.part, FLOAT * held.trained_part),
        loading_host=host + (FLOAT * held.trained if whole else FLOAT * largest),
        saving=held.part + (0.0 if x.offload_optimizer != "none" else held.states_part),
        saving_host=host + offloaded + written,
    )
