"""The weights and states in DeepSpeed's partitions, by the names of the model's parameters.

ZeRO keeps the float32 weights and the optimizer's states of many parameters in a few flat
tensors, cut over the ranks wherever the sizes fall. Here they are read and written as stretches
of each parameter, so that a checkpoint knows nothing of the cuts: no rank gathers anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from rostra.optim import Part
from rostra.optim.low_bit import dequantized
from rostra.pieces import Piece, Reader, read_whole

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Stretch:
    """`size` numbers of a parameter of `shape`: from `start` on there, from `place` on in the
    flat tensor of this rank."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    place: int

    def of(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.place, self.size)


@dataclass(frozen=True)
class Partition:
    """A flat tensor of this rank and what lies in it. Its numbers are there within `resident`
    (swapped in from NVMe, and written back when asked)."""

    flat: Tensor
    stretches: list[Stretch]
    resident: Callable[[bool], AbstractContextManager[None]]


def partitions(zero: Any, stage: int, named: Named) -> Iterator[Partition]:
    """What this rank holds of the parameters that train, under ZeRO `stage` 1 to 3; `zero` is
    DeepSpeed's optimizer."""
    yield from (_whole_model if stage < 3 else _cut_model)(zero, {p: n for n, p in named})


def _whole_model(zero: Any, names: dict[nn.Parameter, str]) -> Iterator[Partition]:
    """ZeRO 1 and 2: parameters are whole, a fragment of some has its float32 twin here."""
    for flat, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        stretches = []
        for parameter in group:
            found = parameter._hp_mapping  # None where another rank has it
            if found is not None:
                there, here = found.lp_fragment_address, found.get_hp_fragment_address()
                shape = tuple(parameter.shape)
                stretches.append(
                    Stretch(names[parameter], shape, there.start, there.numel, here.start)
                )
        yield Partition(flat, stretches, lambda _: nullcontext())


def _cut_model(zero: Any, names: dict[nn.Parameter, str]) -> Iterator[Partition]:
    """ZeRO 3: each parameter is cut evenly over the ranks, the last part padded."""
    rank = dist.get_rank()
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        stretches = []
        for parameter in zero.fp16_groups[index]:
            _, place, part = zero.grad_position[zero.get_param_id(parameter)]
            start = rank * part
            size = min(part, parameter.ds_numel - start)
            if size > 0:
                shape = tuple(parameter.ds_shape)
                stretches.append(Stretch(names[parameter], shape, start, size, place))
        swapped = zero._swappable_optimizer_subgroup(index)
        yield Partition(flat, stretches, _swapping(zero, index, swapped))


def _swapping(
    zero: Any, index: int, swapped: bool
) -> Callable[[bool], AbstractContextManager[None]]:
    @contextmanager
    def resident(changes: bool) -> Iterator[None]:
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(index)
        yield
        if swapped and changes:
            zero._optimizer_states_and_gradient_swap_out(index)
        elif swapped:
            zero._release_swap_buffers(index)

    return resident


def kept(zero: Any, stage: int) -> Optimizer:
    """All that DeepSpeed has from step to step beside weights and states, held as an optimizer
    holds it: masters, which ZeRO-3 shows its own optimizer within a step alone, partitions of
    gradients, and buffers."""
    if stage == 3:
        masters = zero.fp32_partitioned_groups_flat
        buffers = [zero.grad_partitions_flat_buffer, *(b.buffer for b in zero.ipg_buckets.values())]
    else:
        masters = zero.single_partition_of_fp32_groups
        buffers = getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])
        names = ("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload")
        buffers = [*buffers, *(getattr(zero, name, None) for name in names)]
    found = Optimizer(masters, {})
    found.state[masters[0]] = {"buffers": [b for b in buffers if b is not None]}
    return found


def pieces(zero: Any, stage: int, named: Named) -> Iterator[dict[str, Piece]]:
    """Stretches of weights and states that this rank holds, under `model/NAME` and
    `optimizer/NAME/KEY`, partition by partition. They are views; of what lives on NVMe, until
    the next partition is asked for."""
    for partition in partitions(zero, stage, named):
        with partition.resident(False):
            flat, state = partition.flat, zero.optimizer.state.get(partition.flat, {})
            whole = {key: v.detach() for key, v in state.items() if _along(v, flat)}
            found: dict[str, Piece] = {}
            for stretch in partition.stretches:
                parts = {f"model/{stretch.name}": flat.detach()}
                parts |= {f"optimizer/{stretch.name}/{key}": v for key, v in whole.items()}
                for name, tensor in parts.items():
                    found[name] = Piece(stretch.of(tensor), stretch.shape, (stretch.start,))
            yield found


def _along(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == flat.numel()


def counts(zero: Any, stage: int, named: Named) -> dict[str, Piece]:
    """What the optimizer counts for a whole partition (its steps), for each parameter in it.

    One rank writes them: every rank has a part of every group of parameters, and so its count.
    """
    groups = zero.bit16_groups if stage < 3 else zero.fp16_groups
    flats = zero.single_partition_of_fp32_groups if stage < 3 else zero.fp32_partitioned_groups_flat
    names = {p: n for n, p in named}
    found = {}
    for group, flat in zip(groups, flats, strict=True):
        for key, value in zero.optimizer.state.get(flat, {}).items():
            if _is_count(value):
                for parameter in group:
                    count = torch.tensor(float(value))
                    found[f"optimizer/{names[parameter]}/{key}"] = Piece(count, (), ())
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0)


def exact(name: str, known: set[str]) -> str:
    """Where the weight `model/NAME` is in full: bf16_pure has float32 ones beside it."""
    master = name.replace("model/", "master/", 1)
    return master if master in known else name


@torch.no_grad()
def load_partitions(zero: Any, stage: int, named: Named, reader: Reader, states: bool) -> None:
    """Fill this rank's partitions from `reader`, by the names that `pieces` gives them: the
    weights, and the optimizer's states when asked."""
    known = set(reader.names())
    for partition in partitions(zero, stage, named):
        with partition.resident(True):
            flat = partition.flat
            for stretch in partition.stretches:
                _fill(stretch, flat, exact(f"model/{stretch.name}", known), reader)
                start = f"optimizer/{stretch.name}/"
                keys = [k.removeprefix(start) for k in known if states and k.startswith(start)]
                state = zero.optimizer.state[flat]
                for key in (key for key in keys if "." not in key):
                    if not reader.shape(start + key):
                        state[key] = _count(zero.optimizer, flat, reader, start + key)
                        continue
                    if key not in state:
                        state[key] = torch.zeros_like(flat)
                    _fill(stretch, state[key], start + key, reader)
                for key, values in _of_codes(stretch, start, keys, reader).items():
                    if key not in state:
                        state[key] = torch.zeros_like(flat)
                    stretch.of(state[key]).copy_(values)
    _publish(zero, stage)


def _fill(stretch: Stretch, flat: Tensor, name: str, reader: Reader) -> None:
    if tuple(reader.shape(name)) != stretch.shape:
        raise ValueError(f"{name}: expected {stretch.shape}, found {tuple(reader.shape(name))}")
    stretch.of(flat).copy_(reader.read(name, (stretch.start,), (stretch.size,)))


def _of_codes(stretch: Stretch, start: str, keys: list[str], reader: Reader) -> dict[str, Tensor]:
    """The float32 values of a stretch whose states were saved in low bits."""
    saved = {key: read_whole(reader, start + key) for key in keys if "." in key}
    part = Part(stretch.shape, (stretch.start,), parts=2)
    return dequantized(torch.empty(stretch.size), part, saved)


def _count(optimizer: Any, flat: Tensor, reader: Reader, name: str) -> Any:
    """As the optimizer counts: DeepSpeed's in a number, torch's in a tensor (a fused one's on
    the device)."""
    count = reader.read(name, (), ())
    if not isinstance(optimizer, torch.optim.AdamW):
        return int(count)
    return count.to(flat.device) if optimizer.defaults.get("fused") else count


def _publish(zero: Any, stage: int) -> None:
    """From the float32 partitions to the parameters that the model computes with."""
    if stage < 3:
        zero.update_lp_params()
        return
    zero._partition_all_parameters()
    for index in range(len(zero.fp16_groups)):
        swapped = zero._swappable_optimizer_subgroup(index)
        with _swapping(zero, index, swapped)(False):
            zero._reassign_or_swap_out_partitioned_parameters(index)
    if zero.persistent_parameters:  # small ones stay whole on every rank
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
