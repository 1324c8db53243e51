"""Memory as planned beside memory as measured, over layouts of all kinds.

    python benchmarks/plan_memory.py [--json] [--only NAME ...]

Each layout trains two steps on 1, 2 or 4 gloo ranks of this machine. `rostra.memory.measure`
looks at the second, as in training; the rank that needs most counts. Beside it stand the trace
(`rostra.plan.trace`), the closed formulas (`rostra.plan.memory`), and what others foretell of
the same: DeepSpeed's `estimate_zero*_model_states_mem_needs` and accelerate's `estimate-memory`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field, fields
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero import stage3, stage_1_and_2
from transformers import AutoConfig, PretrainedConfig

from rostra.batch import Batch
from rostra.build import build_engine
from rostra.build.tuned import tune
from rostra.config import Config, config_from_dict
from rostra.events import Events
from rostra.hardware.machine import this_cluster
from rostra.layout import Layout
from rostra.memory import measure
from rostra.models.weights import SeededWeights, model_on_meta
from rostra.plan.job import Job, job_of
from rostra.plan.memory import MemoryModel
from rostra.plan.trace import traced
from rostra.workers.pool import Pool

CPU = torch.device("cpu")
VOCABULARY = 8192
# Each family in a shape of 10 to 60 million parameters.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024,
              "num_attention_heads": 6, "num_key_value_heads": 6},
    "qwen3": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1152,
              "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
              "tie_word_embeddings": True},
    "mistral": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1536,
                "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 128},
    "gemma3_text": {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96,
                    "sliding_window": 128},
    "gpt2": {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 1024,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A layout of a family, and what else its config says."""

    family: str
    layout: dict[str, Any]
    sections: dict[str, Any] = field(default_factory=dict)
    length: int = 256
    isolate: bool = False


def row(family: str, length: int = 256, isolate: bool = False, **values: Any) -> Row:
    """Values of a layout, and sections of a config (which are tables)."""
    kinds = {name: values[name]["kind"] for name in TUNED if name in values}
    plain = {k: v for k, v in values.items() if k in FIELDS and k not in TUNED}
    layout = {"micro_batch": 2, "accumulation": 1, **plain, **kinds}
    sections = {k: v for k, v in values.items() if k not in plain}
    return Row(family, layout, sections, length, isolate)


WAYS = ("trace", "formulas", "DeepSpeed", "accelerate")
TUNED = ("adapter", "quantization")  # sections of a config, and fields of a layout
FIELDS = {f.name for f in fields(Layout)}
F2 = {"shard": 2, "sharding": "full_shard"}
P2 = {"pipeline": 2, "pipeline_schedule": "1f1b", "accumulation": 4}
LORA = {"kind": "lora"}
NF4, INT8 = {"kind": "nf4"}, {"kind": "int8"}
DS = {"engine": "deepspeed"}
ROWS: dict[str, Row] = {
    "one process": row("llama"),
    "one process, bf16": row("llama", compute="bf16", length=512),
    "one process, bf16_pure": row("qwen3", compute="bf16_pure"),
    "one process, accumulation 4": row("mistral", accumulation=4),
    "one process, documents": row("llama", isolate=True, length=512),
    "gpt2": row("gpt2", accumulation=2),
    "gemma3": row("gemma3_text", compute="bf16"),
    "gemma3, documents": row("gemma3_text", isolate=True),
    "full": row("llama", activation_checkpointing="full", micro_batch=4),
    "every:2": row("qwen3", activation_checkpointing="every:2"),
    "selective:attention": row("mistral", activation_checkpointing="selective:attention"),
    "selective:mlp": row("llama", activation_checkpointing="selective:mlp", length=512),
    "selective:operations": row("llama", activation_checkpointing="selective:operations"),
    "activations on the host": row("llama", activation_checkpointing="offload"),
    "int8 states": row("llama", optimizer_states="int8"),
    "int4 states": row("qwen3", optimizer_states="int4"),
    "fp8 states": row("mistral", optimizer_states="fp8"),
    "in backward": row("llama", optimizer_in_backward=True, stability={"clip": None}),
    "adafactor": row("llama", optimizer={"name": "adafactor"}),
    "muon": row("llama", optimizer={"name": "muon"}),
    "lion": row("qwen3", optimizer={"name": "lion"}),
    "optimizer on the host": row("llama", offload_optimizer="cpu"),
    "no_shard 2": row("llama", replicate=2),
    "no_shard 4, bf16": row("qwen3", replicate=4, compute="bf16", accumulation=2),
    "zero1 2": row("llama", shard=2, sharding="zero1"),
    "zero1 4, bf16_pure": row("mistral", shard=4, sharding="zero1", compute="bf16_pure"),
    "shard_grad_op 2": row("llama", shard=2, sharding="shard_grad_op", accumulation=2),
    "full_shard 2": row("llama", **F2),
    "full_shard 4, bf16, full": row("qwen3", shard=4, sharding="full_shard", compute="bf16",
                                    activation_checkpointing="full", length=512),
    "full_shard 2, accumulation": row("gpt2", **F2, accumulation=3),
    "full_shard 2, int8 states": row("llama", **F2, optimizer_states="int8"),
    "full_shard 2, offload": row("mistral", **F2, offload_parameters="cpu",
                                 offload_optimizer="cpu"),
    "hybrid 2x2": row("gemma3_text", replicate=2, shard=2, sharding="hybrid_shard"),
    "tensor 2": row("llama", tensor=2),
    "tensor 4, bf16": row("mistral", tensor=2, replicate=2, compute="bf16"),
    "tensor 2 x full_shard 2": row("llama", tensor=2, **F2),
    "ulysses 2": row("llama", context=2, length=512),
    "ring 2": row("qwen3", context=2, context_method="ring", length=512),
    "ring 2 x full_shard 2": row("llama", context=2, context_method="ring", length=512, **F2),
    "gpipe 2": row("llama", **P2 | {"pipeline_schedule": "gpipe"}),
    "1f1b 2": row("qwen3", **P2),
    "1f1b 4": row("llama", **P2 | {"pipeline": 4, "accumulation": 8}),
    "interleaved 2": row("llama", **P2 | {"pipeline_schedule": "interleaved_1f1b", "stages": 2}),
    "zero bubble 2": row("llama", **P2 | {"pipeline_schedule": "zero_bubble", "stages": 2}),
    "1f1b 2 x full_shard 2": row("llama", **P2, **F2, compute="bf16"),
    "lora": row("llama", adapter=LORA, compute="bf16", length=512),
    "lora, full_shard 2": row("qwen3", adapter=LORA, **F2),
    "lora, ends": row("llama", adapter={**LORA, "targets": ["q_proj", "embed_tokens", "lm_head"]},
                      compute="bf16", length=512),
    "lora, head, full_shard 2": row(
        "qwen3", adapter={**LORA, "targets": ["q_proj", "lm_head"]}, **F2
    ),
    "qlora": row("llama", adapter=LORA, quantization=NF4, compute="bf16", length=512,
                 activation_checkpointing="full"),
    "qlora, full_shard 2": row("llama", adapter=LORA, quantization=NF4, compute="bf16", **F2),
    "int8 base": row("mistral", adapter=LORA, quantization=INT8, compute="bf16"),
    "ia3": row("llama", adapter={"kind": "ia3"}, compute="bf16"),
    "prompt": row("llama", adapter={"kind": "prompt"}, isolate=True),
    "prefix": row("llama", adapter={"kind": "prefix"}, isolate=True),
    "deepspeed zero1 2": row("llama", **DS, shard=2, sharding="zero1"),
    "deepspeed zero2 2": row("llama", **DS, shard=2, sharding="shard_grad_op", accumulation=2),
    "deepspeed zero2 2, bf16_pure": row("qwen3", **DS, shard=2, sharding="shard_grad_op",
                                        compute="bf16_pure"),
    "deepspeed zero3 2": row("llama", **DS, **F2),
    "deepspeed zero3 4, bf16": row("mistral", **DS, shard=4, sharding="full_shard",
                                   compute="bf16"),
    "deepspeed no_shard 2": row("llama", **DS, replicate=2),
    "compiled": row("llama", compile=True),
    "compiled, bf16, full": row("qwen3", compile=True, compute="bf16",
                                activation_checkpointing="full"),
}  # fmt: skip


def config_of(row: Row) -> Config:
    """The config that would train the row."""
    layout = Layout(**row.layout)
    examples = layout.adapter in ("prompt", "prefix")
    source = {"type": "alpaca", "path": "records"} if examples else {"type": "python_docs"}
    tuned = layout.adapter != "none"
    values: dict[str, Any] = {
        "model": {"pretrained": "base"} if tuned else {"architecture": "llama"},
        "data": {
            "sources": [source],
            "sequence_length": row.length,
            "isolate_documents": row.isolate,
            **({} if tuned else {"tokenizer": {"vocabulary": VOCABULARY}}),
        },
        "train": {
            "steps": 10,
            "global_batch_size": layout.micro_batch * layout.accumulation * layout.data,
            "micro_batch_size": layout.micro_batch,
        },
        **row.sections,
    }
    return config_from_dict(values)


def shape_of(row: Row) -> PretrainedConfig:
    return AutoConfig.for_model(row.family, vocab_size=VOCABULARY, **SHAPES[row.family])


def measured(name: str) -> dict[str, int]:
    """Bytes by kind on this rank in the second step; a task of the pool."""
    row = ROWS[name]
    config, layout, shape = config_of(row), Layout(**row.layout), shape_of(row)
    model, weights = model_on_meta(shape), SeededWeights(shape, 0)
    if layout.adapter != "none":
        built = tune(model, weights, config)
        model, weights = built.model, built.weights
    engine = build_engine(config, layout, model, CPU, 10, Events(), weights)
    batch = batch_of(row, layout)

    def step() -> None:
        engine.forward_backward(batch)
        engine.gradient_norm()
        engine.step(True)

    try:
        step()
        whole, optimizers = engine.measured()
        with measure(whole, *optimizers, device=CPU) as memory:
            step()
    finally:
        engine.close()
    return memory.bytes


def batch_of(row: Row, layout: Layout) -> Batch:
    rows = layout.micro_batch * layout.accumulation
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (rows, row.length), generator=generator)
    positions = torch.arange(row.length).expand(rows, -1).clone()
    if row.isolate:
        border = row.length // 3
        positions[:, border:] -= border
    return Batch(tokens, tokens, positions)


def told(name: str) -> dict[str, dict[str, int]]:
    """Bytes by kind as each way foretells them; `total` alone where it knows no kinds."""
    row = ROWS[name]
    layout, cluster = Layout(**row.layout), this_cluster()
    job = job_of(config_of(row), shape_of(row))
    ways = {"trace": lambda: traced(job, layout, cluster)}
    ways["formulas"] = lambda: MemoryModel(job, cluster)(layout)
    found = {}
    for way, foretell in ways.items():
        memory = foretell()
        found[way] = {**memory.kinds, "total": memory.live}
    return found | {way: {"total": size} for way, size in baselines(job, layout).items()}


def baselines(job: Job, layout: Layout) -> dict[str, int]:
    """What others say of a GPU's memory: DeepSpeed of weights, gradients and states, accelerate
    of its four parts of training with Adam, the largest of which it shows."""
    model = model_on_meta(job.shape)
    whole, (largest, _) = calculate_maximum_sizes(model)
    count, ranks = whole // 4, layout.world_size
    if layout.sharding == "full_shard":
        _, states, _ = stage3.estimate_zero3_model_states_mem_needs(
            count, largest // 4, ranks, 1, layout.offload_optimizer == "cpu",
            layout.offload_parameters == "cpu",
        )  # fmt: skip
    else:
        _, states = stage_1_and_2.estimate_zero2_model_states_mem_needs(
            count, ranks, 1, layout.offload_optimizer == "cpu"
        )
    precision = "float32" if layout.compute == "fp32" else "bfloat16"
    usage = estimate_training_usage(whole, precision)
    return {"DeepSpeed": states, "accelerate": max(usage.values())}


def compare(name: str, pool: Pool) -> dict[str, Any]:
    """A row of the table."""
    layout = Layout(**ROWS[name].layout)
    if layout.engine == "deepspeed":
        pool.close()  # it numbers modules by process, and wants the same numbers on all ranks
    alone = layout.world_size == 1  # then training has no group of ranks
    ranks = [measured(name)] if alone else pool.run(layout.world_size, measured, name)
    most = max(ranks, key=lambda kinds: kinds["total"])
    began = time.process_time()
    found = told(name)
    seconds = time.process_time() - began
    errors = {way: kinds["total"] / most["total"] - 1 for way, kinds in found.items()}
    return {"name": name, "ranks": layout.world_size, "measured": most, **found,
            "errors": errors, "seconds": seconds}  # fmt: skip


def show(results: list[dict[str, Any]]) -> None:
    print(f"| layout | ranks | measured, MB | {' | '.join(WAYS)} |")
    print("|---|---|---|" + "---|" * len(WAYS))
    for found in results:
        errors = " | ".join(f"{found['errors'][way]:+.1%}" for way in WAYS)
        size = found["measured"]["total"] / 1e6
        print(f"| {found['name']} | {found['ranks']} | {size:.1f} | {errors} |")
    for what, of in (("median", statistics.median), ("worst", max)):
        errors = " | ".join(f"{of(abs(f['errors'][way]) for f in results):.2%}" for way in WAYS)
        print(f"| **{what}** of {len(results)} | | | {errors} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", nargs="*", default=list(ROWS), help="names of layouts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results, failed = [], []
    with Pool(seconds=600, quiet=True) as pool:
        for name in arguments.only:
            try:
                results.append(compare(name, pool))
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            errors = ", ".join(f"{k} {v:+.2%}" for k, v in results[-1]["errors"].items())
            print(f"{name}: {errors}", file=sys.stderr)
    print(json.dumps(results, indent=2)) if arguments.json else show(results)
    if failed:
        sys.exit(f"not compared: {', '.join(failed)}")


if __name__ == "__main__":
    import importlib

    sys.path.insert(0, __file__.rpartition("/")[0])
    importlib.import_module("plan_memory").main()  # so that ranks find its functions
