"""Saved adapters as changes of their base's weights.

LoRA: Hu et al. 2021 (arXiv:2106.09685); rsLoRA: Kalajdzievski 2023 (arXiv:2312.03732);
DoRA: Liu et al. 2024 (arXiv:2402.09353); (IA)³: Liu et al. 2022 (arXiv:2205.05638).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rostra.adapt import SavedAdapter, read_adapter
from rostra.errors import RequestError
from rostra.store import RunFolder

# What an adapter's file calls `MODULE.PART` or `MODULE.PART.weight`, after peft's prefix.
_PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector|ia3_l)(\.weight)?"
)
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Weighted:
    """An adapter's folder, a run's, or a hub id, and how much its update counts."""

    path: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Weighted:
        """From `PATH` or `PATH:WEIGHT`."""
        path, colon, weight = text.rpartition(":")
        try:
            number = float(weight)
        except ValueError:
            return cls(text)
        if not (colon and path and math.isfinite(number)):
            raise RequestError(f"--adapter {text}: give PATH or PATH:WEIGHT, such as a/adapter:0.5")
        return cls(path, number)

    @property
    def folder(self) -> str:
        """The adapter itself: that of a run, where the path is one."""
        run = RunFolder(Path(self.path))
        return str(run.path / "adapter") if run.config.exists() else self.path


class Update:
    """What one adapter changes of its base; it is read part by part, never whole.

    `modules` has, for each module that it adds to, the key in its file of each part (lora_A,
    ia3_l, …); `replaced` that of each parameter which it holds whole (modules_to_save, grown
    embeddings).

    Raises: RequestError when there is no such adapter, or it cannot be merged.
    """

    def __init__(self, asked: Weighted) -> None:
        self.path, self.weight = asked.folder, asked.weight
        self._saved: SavedAdapter = read_adapter(self.path, "--adapter")
        if self._saved.kind in ("prompt", "prefix"):
            raise RequestError(
                f"{self.path}: a {self._saved.kind} adapter is learned positions before the text, "
                "not a change of weights, so there is nothing to merge; serve the base with this "
                "adapter beside it, as peft loads it"
            )
        self.modules: dict[str, dict[str, str]] = {}
        self.replaced: dict[str, str] = {}
        for key in self._saved.tensors.names():
            name = key.removeprefix(_PREFIX)
            if found := _PARTS.fullmatch(name):
                self.modules.setdefault(found["module"], {})[found["part"]] = key
            elif ".original_module." not in name:  # peft's untrained copy
                name = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
                self.replaced[name] = key

    @property
    def keeps_ties(self) -> bool:
        """Whether what changes the input embedding changes a tied output as well."""
        return bool(getattr(self._saved.config, "ensure_weight_tying", False))

    @property
    def adds_up(self) -> bool:
        """Whether it is an update that others can be added to: LoRA or rsLoRA alone."""
        dora = any("lora_magnitude_vector" in parts for parts in self.modules.values())
        return self._saved.kind == "lora" and not self.replaced and not dora

    def shape(self, key: str) -> tuple[int, ...]:
        return self._saved.tensors.shape(key)

    def touches(self, name: str) -> bool:
        """Whether the parameter `name` is not the base's own under this adapter."""
        module, _, leaf = name.rpartition(".")
        changed = leaf == "weight" and module in self.modules
        return changed or name in self.replaced or (leaf == "bias" and self._scales_output(module))

    def _scales_output(self, module: str) -> bool:
        """(IA)³ that multiplies what a layer gives, [out, 1], and not what enters it, [1, in]."""
        key = self.modules.get(module, {}).get("ia3_l")
        return key is not None and self.shape(key)[0] != 1

    def change(self, name: str, value: Tensor, transposed: bool) -> Tensor:
        """`value` (float32, may be changed in place) of the parameter `name` under this adapter.

        A linear layer's weight is [out, in]; `transposed` ones are [in, out]: those of GPT-2's
        Conv1D, and an embedding's, [vocabulary, hidden].
        """
        if name in self.replaced:
            value = self._read(self.replaced[name])
        module, _, leaf = name.rpartition(".")
        parts = {part: self._read(key) for part, key in self.modules.get(module, {}).items()}
        if leaf == "bias":
            return value.mul_(parts["ia3_l"].flatten()) if self._scales_output(module) else value
        weight = value.T if transposed else value  # a view: [out, in]
        if "ia3_l" in parts:
            weight.mul_(parts["ia3_l"])
        elif parts:
            self._add_lora(module, weight, parts)
        return value

    def _add_lora(self, module: str, weight: Tensor, parts: dict[str, Tensor]) -> None:
        """W + s B A, in place; for DoRA with its rows at their learned lengths m."""
        kind = "lora_embedding_" if "lora_embedding_A" in parts else "lora_"
        a, b = parts[f"{kind}A"], parts[f"{kind}B"]
        if weight.shape != (b.shape[0], a.shape[1]):
            raise RequestError(
                f"{self.path}: its update of {module} is {(b.shape[0], a.shape[1])}, and the "
                f"base's weight {tuple(weight.shape)}; give the base it was trained on"
            )
        weight.addmm_(b, a, alpha=self._scale(module, a.shape[0]))
        if (magnitude := parts.get("lora_magnitude_vector")) is not None:
            weight.mul_((magnitude / weight.norm(dim=1))[:, None])

    def _scale(self, module: str, rank: int) -> float:
        """s: alpha / r, for rsLoRA alpha / sqrt(r), times the adapter's weight."""
        config = self._saved.config
        patterns: dict[str, float] = config.alpha_pattern or {}
        own = (alpha for p, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({p})", module))
        alpha: float = next(own, config.lora_alpha)
        return self.weight * alpha / (math.sqrt(rank) if config.use_rslora else rank)

    def _read(self, key: str) -> Tensor:
        return self._saved.whole(key).float()


def open_updates(asked: Sequence[Weighted]) -> list[Update]:
    """Raises: RequestError when one cannot be read or merged, or they do not add up."""
    updates = [Update(one) for one in asked]
    if len(updates) == 1 and updates[0].weight == 1:
        return updates
    for update in updates:
        if not update.adds_up:
            raise RequestError(
                f"{update.path}: only LoRA and rsLoRA adapters can be combined or weighted, as "
                "their updates add up. DoRA, IA3 and modules_to_save do not; merge this one "
                "alone, and train the next on the merged model"
            )
    return updates
