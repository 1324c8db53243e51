"""The engine on DeepSpeed: ZeRO over the data ranks, offloading to host memory and NVMe.

DeepSpeed holds the partitions, reduces the gradients and updates; Rostra keeps the loss, the
schedule, clipping and the loss scale, so that a step is the step of every other engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from rostra.batch import Batch
from rostra.errors import RequestError
from rostra.optim import LossScale
from rostra.parallel.deepspeed_changes import forget_group, known_norm
from rostra.parallel.deepspeed_start import check_nvme, import_deepspeed, off_standard_output
from rostra.parallel.deepspeed_state import Named, counts, exact, kept, load_partitions, pieces
from rostra.parallel.engine import MeshEngine
from rostra.parallel.mesh import DATA
from rostra.pieces import Piece, Reader, fill, local_piece, read_whole
from rostra.workers import on_every_rank


@dataclass(kw_only=True)
class DeepSpeedEngine(MeshEngine):
    """ZeRO as `config` says (a whole DeepSpeed config, see `rostra.config.deepspeed`).

    There is one stage, the whole model, the same on every rank. Beside the partitions,
    DeepSpeed keeps a buffer of `reduce_bucket_size` numbers. DeepSpeed divides gradients by the
    number of ranks; the loss is multiplied by it first, so that they are sums again.
    """

    config: dict[str, Any]
    own_group: bool = False  # the process group was started for it

    def __post_init__(self) -> None:
        deepspeed = import_deepspeed(self.device)
        self._named: Named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._zero_stage: int = self.config["zero_optimization"]["stage"]
        parameters = sum(p.numel() for _, p in self._named)
        on_every_rank(lambda: check_nvme(self.config, parameters))
        try:
            with off_standard_output():
                self._engine, self._zero, _, _ = deepspeed.initialize(
                    model=self.stages[0], optimizer=self.optimizers.parts[0], config=self.config
                )
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestError(
                f"DeepSpeed {deepspeed.__version__} refuses its config: "
                f"{'.'.join(map(str, first['loc']))}: {first['msg']}; leave that key out"
            ) from error

    def _execute(self, parts: list[Batch], backward: bool) -> None:
        if backward:
            self._loss_scale(1.0)  # it is in the factor, before anything is rounded to 16 bits
        for index, part in enumerate(parts):
            self._engine.set_gradient_accumulation_boundary(index == len(parts) - 1)
            loss = self._engine(**part.tensors())
            if backward:
                # A new tensor: the hooks on the one that comes out divide by the micro batches.
                self._engine.backward(loss * self.mesh.size(*DATA), scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        if self._zero_stage == 0:
            norm = float(get_total_norm([p.grad for _, p in self._named if p.grad is not None]))
        elif self._zero_stage < 3:
            self._zero._wait_for_offload_copies()
            norm = float(self._zero.scaled_global_norm())
        else:
            groups = torch.stack([n.cpu() for n in self._zero._get_norm_groups()])
            # a group whose norm is not finite is told as -1
            norm = float(groups.norm()) if (groups >= 0).all() else float("inf")
        self._norm = norm / self.scale.scale
        return self._norm

    def step(self, accept: bool) -> float:
        self.optimizers.set_fraction(self.schedule(self.steps))
        divisor = self.scale.scale
        if accept and self.clip is not None and self._norm > self.clip:
            divisor *= self._norm / self.clip
        if self._zero_stage == 0:
            self._step_whole(accept, divisor)
        else:
            self._loss_scale(divisor)  # what DeepSpeed divides gradients by
            with known_norm(self._zero, self._zero_stage, self._norm if accept else None):
                self._engine.step()
        self.scale.update(accept)
        self.steps += 1
        return self.optimizers.learning_rate

    def _step_whole(self, accept: bool, divisor: float) -> None:
        if not accept:
            self.optimizers.zero_grad()
            return
        if divisor != 1:
            grads = [p.grad for _, p in self._named if p.grad is not None]
            torch._foreach_mul_(grads, 1 / divisor)
        self._engine.step()

    def _loss_scale(self, scale: float) -> None:
        if self._zero_stage > 0:
            self._zero.override_loss_scale(scale)

    def measured(self) -> tuple[nn.Module, list[Optimizer]]:
        model, optimizers = super().measured()
        more = [kept(self._zero, self._zero_stage)] if self._zero_stage > 0 else []
        return model, [*optimizers, *more]

    def state(self) -> tuple[Iterable[dict[str, Piece]], dict[str, Any]]:
        """This rank's parts, see `pieces`; without ZeRO, and for buffers and counts, all by
        rank 0."""
        found: dict[str, Piece] = {}
        if dist.get_rank() == 0:
            whole = self._whole()
            if self._zero_stage == 0:
                states, _ = self.optimizers.state()
                whole |= {f"optimizer/{name}": value for name, value in states.items()}
            found = {name: local_piece(tensor) for name, tensor in whole.items()}
            if self._zero_stage > 0:
                found |= counts(self._zero, self._zero_stage, self._named)
        parts: Iterable[dict[str, Piece]] = ()
        if self._zero_stage > 0:
            parts = pieces(self._zero, self._zero_stage, self._named)
        values = {"optimizer": {}, "scale": self.scale.state(), "steps": self.steps}
        return chain([found], parts), values

    def _whole(self) -> dict[str, Tensor]:
        """What every rank holds entirely of what a checkpoint has of the model, by its name
        there: with ZeRO, buffers alone; and of a frozen base nothing."""
        found: dict[str, Tensor] = {}
        if len(self._named) == len(list(self.model.parameters())):
            saved = self.model.state_dict(keep_vars=True)
            found = {f"model/{n}": b for n, b in self.model.named_buffers() if n in saved}
        if self._zero_stage == 0:
            found |= {f"model/{name}": p.detach() for name, p in self._named}
        return found

    def adopt(self, weights: Reader) -> None:
        """Take the weights of another run, by the names of the parameters."""
        self._load(weights, states=False)

    def load_state(self, reader: Reader, values: dict[str, Any]) -> None:
        self._load(reader, states=True)
        if "scale" in values:  # not of another run's losses
            self.scale = LossScale(**values["scale"])
        self.steps = values["steps"]

    @torch.no_grad()
    def _load(self, reader: Reader, states: bool) -> None:
        known = set(reader.names())
        for name, tensor in self._whole().items():
            fill(tensor, reader, exact(name, known))
        if self._zero_stage > 0:
            load_partitions(self._zero, self._zero_stage, self._named, reader, states)
        elif states:
            names = [name for name in known if name.startswith("optimizer/")]
            saved = {name.removeprefix("optimizer/"): read_whole(reader, name) for name in names}
            self.optimizers.load_state(saved, {})

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and buffers, and of what it remembers of the process
        group, which another engine may find replaced."""
        deepspeed = import_deepspeed(self.device)
        self._engine.destroy()
        forget_group(deepspeed)
        if self.own_group:
            dist.destroy_process_group()
