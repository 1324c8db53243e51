"""Tokens per second of one optimizer step: Rostra beside the Hugging Face Trainer.

    python benchmarks/throughput.py [--json] [--rounds 7] [--steps 3] [--profile 25]

The model is a Llama of 34 million parameters (hidden 512, 8 layers, 8 heads, vocabulary 8192),
the batch 8 samples of 512 tokens, bf16 autocast over float32 weights, fused AdamW, gradients
clipped to norm 1, two threads. Every contender lives in a process of its own and is compiled
once; then they take turns, some steps each, and the median over the rounds counts, because
other work on a machine slows all of them alike. A large bf16 matrix product takes its turn too.

The share of the matrix product's speed is that of the model's operations, forward and backward:
6 for each weight in a matrix product and token, and 6·layers·T·hidden for causal attention
(half of 12, as half of the scores are never seen). The embedding table takes part in no
product; the second share counts it all the same, as the rule of thumb 6·parameters does.

Seconds of compiling depend on torch's cache on disk; set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1
for those of a first run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import torch

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY = 512, 8, 8, 1376, 8192
LENGTH, SAMPLES = 512, 8
TOKENS = LENGTH * SAMPLES
PRODUCT = 2048  # side of the square matrices
WARM_UP = 3  # steps before anything counts: compiling, and the optimizer's states

Step = Callable[[], object]


def parameters() -> int:
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
    return 2 * VOCABULARY * HIDDEN + LAYERS * layer + HIDDEN


def operations_per_token(embedding: bool) -> int:
    """Floating-point operations of forward and backward, see the top of the file."""
    norms = (2 * LAYERS + 1) * HIDDEN
    weights = parameters() - norms - (0 if embedding else VOCABULARY * HIDDEN)
    return 6 * weights + 6 * LAYERS * LENGTH * HIDDEN


def samples(count: int) -> torch.Tensor:
    """Random tokens [count, LENGTH + 1]; what they are does not change the speed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)


def rostra_step() -> Step:
    """One optimizer step of Rostra's engine on a model made and compiled by Rostra."""
    from rostra.batch import Batch
    from rostra.build import build_engine
    from rostra.config import Config
    from rostra.events import Events
    from rostra.layout import Layout
    from rostra.memory import keep_freed_memory
    from rostra.models import create_model, scratch_config

    keep_freed_memory()
    size = {
        "hidden_size": HIDDEN,
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": HEADS,
        "intermediate_size": INNER,
        "tie_embeddings": False,
    }
    config = Config.model_validate(
        {
            "model": {"architecture": "llama", "size": size},
            "data": {
                "sources": [{"type": "python_docs"}],
                "tokenizer": {"vocabulary": VOCABULARY},
                "sequence_length": LENGTH,
            },
            "train": {"steps": 1_000_000, "global_batch_size": SAMPLES},
        }
    )
    device = torch.device("cpu")
    shape = scratch_config(config.model, VOCABULARY, LENGTH, {})
    model = create_model(shape, seed=0)
    if model.num_parameters() != parameters():
        raise ValueError(f"{model.num_parameters():,} parameters, not {parameters():,}")
    layout = Layout(micro_batch=SAMPLES, accumulation=1, compute="bf16", compile=True)
    engine = build_engine(config, layout, model, device, 1_000_000, Events())
    tokens = samples(SAMPLES)
    positions = torch.arange(LENGTH).expand(SAMPLES, -1)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions)

    def step() -> None:
        engine.forward_backward(batch)
        engine.gradient_norm()
        engine.step(True)

    return step


def product_step() -> Step:
    matrix = torch.randn(PRODUCT, PRODUCT).bfloat16()
    return lambda: [matrix @ matrix for _ in range(10)]


def serve(steps: Connection, build: Callable[[], Step], profile: int) -> None:
    """Run as many steps as asked for, answer with the seconds; 0 ends it."""
    step = build()
    while count := steps.recv():
        began = time.perf_counter()
        for _ in range(count):
            step()
        steps.send(time.perf_counter() - began)
    if profile:
        with torch.profiler.profile() as profiler:
            step()
        table = profiler.key_averages().table("self_cpu_time_total", row_limit=profile)
        print(table, file=sys.stderr)


def train(steps: Connection, compiled: bool, total: int) -> None:
    """The Hugging Face Trainer, which is made to wait between rounds by a callback."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Rounds(TrainerCallback):  # type: ignore[misc]
        left, began = 0, 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.left == 0:
                self.left, self.began = steps.recv(), time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.left -= 1
            if self.left == 0:
                steps.send(time.perf_counter() - self.began)

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=total,
            per_device_train_batch_size=SAMPLES,
            bf16=True,
            use_cpu=True,
            torch_compile=compiled,
            optim="adamw_torch_fused",
            max_grad_norm=1.0,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        rows = [{"input_ids": x[:-1], "labels": x[:-1]} for x in samples(16 * SAMPLES)]
        Trainer(model, arguments, train_dataset=rows, callbacks=[Rounds()]).train()


def contend(name: str, steps: Connection, threads: int, total: int, profile: int) -> None:
    """The life of one contender's process."""
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            if name == "matrix product":
                serve(steps, product_step, 0)
            elif name.startswith("Trainer"):
                train(steps, "compile" in name, total)
            else:
                serve(steps, rostra_step, profile)
    except Exception:
        traceback.print_exc()
        steps.send(None)


NAMES = ("matrix product", "Trainer", "Trainer, torch.compile", "Rostra")


def measure(rounds: int, count: int, threads: int, profile: int) -> dict[str, dict[str, Any]]:
    """For each contender the seconds of a step, by round, and those of compiling."""
    context = get_context("spawn")
    total = WARM_UP + rounds * count
    pipes: dict[str, Any] = {}
    processes = []
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in NAMES}

    def ask(name: str, steps: int) -> float:
        pipes[name].send(steps)
        seconds: float | None = pipes[name].recv()
        if seconds is None:
            raise SystemExit(f"{name} failed; its error is above")
        return seconds

    for name in NAMES:
        pipes[name], theirs = context.Pipe()
        rows = profile if name == NAMES[-1] else 0
        process = context.Process(target=contend, args=(name, theirs, threads, total, rows))
        process.start()
        processes.append(process)
        found[name]["warm_up"] = ask(name, WARM_UP)
        print(f"{name}: warm after {found[name]['warm_up']:.1f} s", file=sys.stderr)
    for number in range(rounds):
        order = NAMES if number % 2 == 0 else NAMES[::-1]
        for name in order:
            found[name]["seconds"].append(ask(name, count) / count)
    for name, process in zip(NAMES, processes, strict=True):
        if not name.startswith("Trainer"):  # which ends by its number of steps
            pipes[name].send(0)
        process.join()
    return found


def summarise(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    product = 10 * 2 * PRODUCT**3 / statistics.median(found["matrix product"]["seconds"])
    rows = []
    for name in NAMES[1:]:
        seconds = statistics.median(found[name]["seconds"])
        speed = TOKENS / seconds
        rows.append(
            {
                "name": name,
                "tokens_per_second": round(speed),
                "best_tokens_per_second": round(TOKENS / min(found[name]["seconds"])),
                "share": round(speed * operations_per_token(False) / product, 3),
                "share_with_embedding": round(speed * operations_per_token(True) / product, 3),
                "compile_seconds": round(found[name]["warm_up"] - WARM_UP * seconds, 1),
            }
        )
    best = max(r["tokens_per_second"] for r in rows if r["name"].startswith("Trainer"))
    for row in rows:
        row["times_trainer"] = round(row["tokens_per_second"] / best, 2)
    return {
        "parameters": parameters(),
        "operations_per_token": operations_per_token(False),
        "matrix_product_gflops": round(product / 1e9),
        "contenders": rows,
    }


def show(summary: dict[str, Any]) -> None:
    print(f"{summary['parameters']:,} parameters, {LENGTH} x {SAMPLES} tokens a step, bf16")
    print(f"matrix product {PRODUCT}³: {summary['matrix_product_gflops']:,} GFLOP/s")
    head = ("", "tokens/s", "best", "x Trainer", "share", "with emb.", "compile s")
    print("{:24}{:>10}{:>8}{:>11}{:>8}{:>11}{:>11}".format(*head))
    for row in summary["contenders"]:
        print(
            f"{row['name']:24}{row['tokens_per_second']:>10,}{row['best_tokens_per_second']:>8,}"
            f"{row['times_trainer']:>11.2f}{row['share']:>8.0%}{row['share_with_embedding']:>11.0%}"
            f"{row['compile_seconds']:>11.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a contender in a round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", type=int, default=0, help="rows of Rostra's profile to print")
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.steps, arguments.threads, arguments.profile)
    summary = summarise(found)
    if arguments.json:
        print(json.dumps(summary, indent=2))
    else:
        show(summary)


if __name__ == "__main__":
    main()
