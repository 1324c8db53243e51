"""Fine-tuning beside the peers: memory of each method, and trained tokens per second.

    python benchmarks/tuning.py memory DATA [--json]    beside peft and the Hugging Face Trainer
    python benchmarks/tuning.py speed DATA [--rounds 3] [--json]    beside TRL's SFTTrainer

DATA is a JSON file of Alpaca records. Models have random weights, kept in bfloat16 on disk as a
hub's are, and the tokenizer is trained on DATA. Every contender is a process of its own, with
two threads, bf16 autocast, the same samples a step, and AdamW.

Memory: the peak resident size of the process over three steps (what the kernel says, VmHWM),
and, of ours, the peak of live tensor bytes by kind. Speed: tokens of prompts and answers,
padding not counted, over the median second of a step after the first three; contenders take
turns, and the median over the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH = 512
SHAPES: dict[str, dict[str, Any]] = {
    "memory": {"hidden_size": 1024, "num_hidden_layers": 22, "intermediate_size": 2816},
    "speed": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1376},
}
VOCABULARY = 16384
PROMPT = (
    "Below is an instruction that describes a task{}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
LORA = {"kind": "lora", "rank": 8, "alpha": 16}


def prompt_of(record: dict[str, str]) -> str:
    extra = record.get("input", "")
    more = ", paired with an input that provides further context" if extra else ""
    return PROMPT.format(more, record["instruction"], f"### Input:\n{extra}\n\n" if extra else "")


def make_base(folder: Path, data: Path, task: str) -> None:
    """A model with random weights and a tokenizer, as a hub has them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rostra.data import train_tokenizer

    records = json.loads(data.read_text())
    texts = (prompt_of(r) + r["output"] for r in records)
    tokenizer = train_tokenizer(texts, VOCABULARY)
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=SHAPES[task]["hidden_size"] // 64,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPES[task],
    )
    model = LlamaForCausalLM(shape).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- contenders, each in a process of its own ---------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"adapter": LORA},
    "int8 + lora": {"adapter": LORA, "quantization": "int8"},
    "qlora": {"adapter": LORA, "quantization": "nf4"},
    "qlora, checkpointing, 8-bit states": {
        "adapter": LORA,
        "quantization": "nf4",
        "memory": {"activation_checkpointing": "full", "optimizer_states": "int8"},
    },
}


def rostra_memory(method: str, base: Path, data: Path, samples: int, steps: int) -> dict[str, Any]:
    from rostra import Run

    with tempfile.TemporaryDirectory() as folder:
        summary = Run.open(config_of(method, base, data, Path(folder), samples, steps)).train()
    return {
        "tensors": summary["memory_bytes"],
        "resident": peak_resident(),
        "loss": summary["loss"],
    }


def config_of(
    method: str, base: Path, data: Path, folder: Path, samples: int, steps: int
) -> dict[str, Any]:
    return {
        "run": {"name": "bench", "output": str(folder / "run")},
        "model": {"pretrained": str(base)},
        "data": {
            "sources": [{"type": "alpaca", "path": str(data)}],
            "sequence_length": LENGTH,
            "held_out": 0,
            "long_examples": "truncate",
            "cache": str(base.parent / "cache"),
        },
        "train": {"steps": steps, "global_batch_size": samples, "micro_batch_size": samples},
        "precision": {"compute": "bf16"},
        "optimizer": {"learning_rate": 2e-4, "weight_decay": 0},
        "checkpoint": {"every": 10**6},
        "monitor": {"tensorboard": False},
        **METHODS[method],
    }


def peft_memory(method: str, base: Path, data: Path, samples: int, steps: int) -> dict[str, Any]:
    """peft and the Hugging Face Trainer, as their documentation has it."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        BitsAndBytesConfig,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(base)
    quantized = {
        "int8 + lora": BitsAndBytesConfig(load_in_8bit=True),
        "qlora": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
    }.get(method.split(",", maxsplit=1)[0])
    dtype = torch.float32 if method == "full" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantized, dtype=dtype, use_safetensors=True
    )
    checkpointing = "checkpointing" in method
    if quantized is not None:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    if method != "full":
        lora = LoraConfig(
            r=LORA["rank"],
            lora_alpha=LORA["alpha"],
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
    rows = []
    for record in json.loads(data.read_text())[: samples * steps * 4]:
        text = prompt_of(record) + record["output"] + tokenizer.eos_token
        ids = tokenizer(text, truncation=True, max_length=LENGTH, padding="max_length")
        labels = [i if m else -100 for i, m in zip(ids.input_ids, ids.attention_mask, strict=True)]
        rows.append({**ids, "labels": labels})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=samples,
            max_steps=steps,
            learning_rate=2e-4,
            bf16=True,
            use_cpu=True,
            optim="adamw_bnb_8bit" if "8-bit" in method else "adamw_torch",
            gradient_checkpointing=checkpointing,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        found = Trainer(model=model, args=arguments, train_dataset=rows).train()
    return {"resident": peak_resident(), "loss": found.training_loss}


def rostra_speed(kind: str, base: Path, data: Path, samples: int, steps: int) -> dict[str, Any]:
    from rostra import Run

    method = "full" if kind == "rostra" else "lora"
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(method, base, data, Path(folder), samples, steps)
        summary = Run.open(config).train()
    return {"tokens_per_second": summary["tokens_per_second"]}


def trl_speed(kind: str, base: Path, data: Path, samples: int, steps: int) -> dict[str, Any]:
    """SFTTrainer in its defaults, or with packing; the weights in float32 as it loads them."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    records = json.loads(data.read_text())
    rows = [{"prompt": prompt_of(r), "completion": r["output"]} for r in records]
    seen: list[tuple[int, float]] = []

    class Counting(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            mask = inputs.get("attention_mask")
            tokens = int(inputs["input_ids"].numel() if mask is None else mask.sum())
            loss = super().training_step(model, inputs, *rest, **more)
            seen.append((tokens, time.perf_counter()))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=samples,
            max_steps=steps,
            max_length=LENGTH,
            packing="packing" in kind,
            learning_rate=2e-4,
            use_cpu=True,
            bf16=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=10**6,
        )
        trainer = Counting(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            if "lora" in kind
            else None,
        )
        trainer.train()
    steady = seen[3:]
    tokens = sum(count for count, _ in steady[1:])
    return {"tokens_per_second": tokens / (steady[-1][1] - steady[0][1])}


def peak_resident() -> int:
    """Bytes, of this process since it began."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


RUNS: dict[str, Callable[..., dict[str, Any]]] = {
    "rostra_memory": rostra_memory,
    "peft_memory": peft_memory,
    "rostra_speed": rostra_speed,
    "trl_speed": trl_speed,
}


def contend(run: str, name: str, base: Path, data: Path, samples: int, steps: int) -> Any:
    """The answer of one contender; None, with its last words, when it fails."""
    arguments = [__file__, "run", str(data), run, name, str(base), str(samples), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        print(f"{run} {name}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def memory(base: Path, data: Path) -> dict[str, Any]:
    """Of each method, ours and peft's."""
    found = {}
    for name in METHODS:
        for run in ("rostra_memory", "peft_memory"):
            who = f"{run.removesuffix('_memory')}: {name}"
            found[who] = contend(run, name, base, data, 2, 3)
            print(who, found[who], file=sys.stderr)
    return found


SPEEDS = (
    ("rostra_speed", "rostra"),
    ("trl_speed", "trl"),
    ("trl_speed", "trl, packing"),
    ("rostra_speed", "rostra, lora"),
    ("trl_speed", "trl, lora"),
    ("trl_speed", "trl, lora, packing"),
)


def speed(base: Path, data: Path, rounds: int) -> dict[str, Any]:
    seen: dict[str, list[float]] = {}
    for number in range(rounds):
        for run, name in SPEEDS:
            answer = contend(run, name, base, data, 8, 14)
            if answer is not None:
                seen.setdefault(name, []).append(answer["tokens_per_second"])
                rate = answer["tokens_per_second"]
                print(f"round {number}: {name} {rate:,.0f} tokens/s", file=sys.stderr)
    return {name: statistics.median(rates) for name, rates in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("memory", "speed", "run"))
    parser.add_argument("data", type=Path)
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.task == "run":
        run, name, base, samples, steps = asked.rest
        found = RUNS[run](name, Path(base), asked.data, int(samples), int(steps))
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        make_base(base, asked.data, asked.task)
        data = asked.data.resolve()
        found = memory(base, data) if asked.task == "memory" else speed(base, data, asked.rounds)
    if asked.json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        print(f"{name:45} {json.dumps(value)}")


if __name__ == "__main__":
    main()
