"""What each way of fine-tuning learns: held-out loss of one base after the same samples.

    python benchmarks/methods.py BASE DATA [--type alpaca] [--epochs 2] [--methods 'full;lora']
        [--rates 4e-3] [--json]

BASE is a model's folder, such as `runs/demosthenes/model` of the quickstart; DATA a file of
records, of which a tenth is held out: Alpaca's, or with `--type chat` conversations, which are
written as Vicuna's. Every method sees the same examples in the same
order, at a learning rate that was the best of two or three tried for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LORA = {"kind": "lora", "rank": 8, "alpha": 16}
# For each method its sections of the config, and its learning rate.
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "full": ({}, 4e-3),
    "lora": ({"adapter": LORA}, 8e-3),
    "lora, head and embeddings": (
        {"adapter": {**LORA, "alpha": 32, "targets": ["all-linear", "embed_tokens", "lm_head"]}},
        8e-3,
    ),
    "lora, head and embeddings whole": (
        {"adapter": {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}},
        4e-3,
    ),
    "rslora": ({"adapter": {**LORA, "rslora": True}}, 4e-3),
    "dora": ({"adapter": {**LORA, "dora": True}}, 8e-3),
    "lora+": ({"adapter": {**LORA, "lora_plus_ratio": 4}}, 4e-3),
    "qlora nf4": ({"adapter": LORA, "quantization": "nf4"}, 8e-3),
    "qlora fp4": ({"adapter": LORA, "quantization": "fp4"}, 8e-3),
    "int8 + lora": ({"adapter": LORA, "quantization": "int8"}, 8e-3),
    "ia3": ({"adapter": {"kind": "ia3"}}, 3e-2),
    "prompt": ({"adapter": {"kind": "prompt", "virtual_tokens": 20}}, 3e-2),
    "prefix": ({"adapter": {"kind": "prefix", "virtual_tokens": 20}}, 3e-2),
}


def config_of(
    base: Path, source: Any, folder: Path, sections: dict[str, Any], rate: float, length: Any
) -> dict[str, Any]:
    template = {"chat_template": "vicuna"} if source["type"] == "chat" else {}
    return {
        "run": {"name": "method", "output": str(folder)},
        "model": {"pretrained": str(base)},
        "data": {
            "sources": [source],
            "sequence_length": 512,
            "held_out": 0.1,
            "long_examples": "drop",
            **template,
        },
        "train": {**length, "global_batch_size": 8, "compile": False},
        "optimizer": {"learning_rate": rate, "weight_decay": 0},
        "checkpoint": {"every": 10**6},
        "monitor": {"tensorboard": False},
        **sections,
    }


def held_out_loss(*arguments: Any) -> tuple[float, float, int]:
    """After training: the loss, the seconds, the trained parameters."""
    from rostra import Run

    base, source, sections, rate, length = arguments
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        config = config_of(base, source, Path(folder) / "run", sections, rate, length)
        summary = Run.open(config).train()
        seconds = time.perf_counter() - began
    return summary["eval_loss"], seconds, summary["trainable_parameters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--type", choices=("alpaca", "chat"), default="alpaca")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--methods", default=";".join(METHODS), help="with semicolons between")
    parser.add_argument("--rates", type=float, nargs="*", help="in place of each method's own")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    source = {"type": asked.type, "path": str(asked.data)}
    # a step of LoRA at no rate changes nothing: its second matrix begins at zero
    before, *_ = held_out_loss(asked.base, source, {"adapter": LORA}, 1e-30, {"steps": 1})
    found: dict[str, Any] = {"base": {"loss": before}}
    print(f"base {before:.4f}", file=sys.stderr)
    for name in asked.methods.split(";"):
        sections, own = METHODS[name]
        for rate in asked.rates or (own,):
            loss, seconds, trained = held_out_loss(
                asked.base, source, sections, rate, {"epochs": asked.epochs}
            )
            key = f"{name} at {rate:g}" if asked.rates else name
            found[key] = {"loss": loss, "seconds": seconds, "trained": trained}
            print(f"{key} {loss:.4f} {seconds:.0f} s {trained:,}", file=sys.stderr)
    full = found.get("full", {}).get("loss")
    for values in found.values():
        if full is not None:
            values["share_of_gap"] = (before - values["loss"]) / (before - full)
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for name, values in found.items():
        share = f"{values['share_of_gap']:7.1%}" if "share_of_gap" in values else ""
        print(f"{name:14} {values['loss']:.4f} {share} {values.get('trained', 0):>12,}")


if __name__ == "__main__":
    main()
