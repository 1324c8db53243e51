"""A small tokenizer with chat marks, and the way from records to tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from rostra.config.data import DataSection
from rostra.data.encode import Encoded, ExampleEncoder
from rostra.data.examples import Example, ExampleReader
from rostra.data.sources import BadRecords
from rostra.data.tokenizer import train_tokenizer

MARKS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<|im_sep|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<｜User｜>"),
    *("<｜Assistant｜>", "[|user|]", "[|assistant|]", "[|system|]", "[|endofturn|]", "[INST]"),
    *("[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<|START_OF_TURN_TOKEN|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Five 😊"},
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, of which bos is eos, as those trained by Rostra; not to be changed."""
    made = train_tokenizer(iter([json.dumps(TALK) + "the rain in Spain, \n\n the end\n"]), 400)
    made.add_special_tokens({"extra_special_tokens": MARKS})
    return made


def section(source: dict[str, Any], **keys: Any) -> DataSection:
    return DataSection.model_validate({"sources": [source], **keys})


def read(data: DataSection, bad: BadRecords | None = None) -> list[Example]:
    """The examples of the first source."""
    bad = bad or BadRecords("fail", print)
    reader = ExampleReader(0, data.sources[0])  # type: ignore[arg-type]
    return [e for part in reader.parts(bad) for e in reader.examples(part, bad)]


def encode(data: DataSection, bad: BadRecords | None = None) -> list[Encoded]:
    bad = bad or BadRecords("fail", print)
    return ExampleEncoder(tokenizer(), data, bad).encode(read(data, bad))


def written(folder: Path, records: list[Any], name: str = "records.jsonl") -> str:
    """A file of records in JSON lines or, by its ending, JSON."""
    lines = [json.dumps(record) for record in records]
    path = folder / name
    path.write_text("\n".join(lines) if name.endswith("l") else f"[{','.join(lines)}]")
    return str(path)


def targets(encoded: Encoded, weight: Callable[[float], bool] = bool) -> str:
    """The targets' text, of those weights that are asked for."""
    ids = [
        t
        for t, w in zip(encoded.tokens.tolist(), encoded.weights.tolist(), strict=True)
        if weight(w)
    ]
    return tokenizer().decode(ids)
