"""Reading all sources of a config as one stream: documents, and examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rostra.config.sources import (
    GutenbergSource,
    JsonlSource,
    PythonDocsSource,
    Source,
    TextSource,
)
from rostra.data.conversations import Conversation
from rostra.data.examples import Example, ExampleReader, Segment, Text, Tokens
from rostra.data.gutenberg import GutenbergReader
from rostra.data.python_docs import PythonDocsReader
from rostra.data.shards import Split
from rostra.data.sources import BadRecords, JsonlReader, Part, Reader, TextReader

ENCODED_DOCUMENTS = 1024  # tokenized at once, at the most
ENCODED_BYTES = 4_194_304

Progress = Callable[[float], None]


def make_reader(source: Source, index: int) -> Reader | ExampleReader:
    """The reader of `data.sources[index]`."""
    match source:
        case TextSource():
            return TextReader(index, source)
        case JsonlSource():
            return JsonlReader(index, source)
        case GutenbergSource():
            return GutenbergReader(index, source)
        case PythonDocsSource():
            return PythonDocsReader(index, source)
        case _:
            return ExampleReader(index, source)


@dataclass(frozen=True)
class Item:
    """A document, or an example with its text."""

    id: str
    text: str
    size: int  # bytes in UTF-8
    sha256: bytes  # of the text
    example: Example | None = None

    @classmethod
    def of(cls, id: str, text: str, example: Example | None = None) -> Item:
        encoded = text.encode()
        return cls(id, text, len(encoded), hashlib.sha256(encoded).digest(), example)

    def split(self, held_out: float) -> Split:
        """Its side, `held_out` being the share of the one that is never trained on."""
        return "held_out" if self.is_below(held_out) else "train"

    def is_below(self, share: float) -> bool:
        """Whether the text's hash, as a fraction, is below `share`; equal texts agree."""
        return int.from_bytes(self.sha256) < int(share * 2**256)

    def is_chosen(self, share: float) -> bool:
        """The like from the hash's other end, so that the two choices are independent."""
        return int.from_bytes(self.sha256, "little") < int(share * 2**256)


def read_items(
    work: Sequence[tuple[Reader | ExampleReader, Part]],
    sizes: Sequence[int],
    bad: BadRecords,
    examples: bool,
    progress: Progress,
) -> Iterator[Item]:
    """All documents, streamed, or all examples: then documents are examples of which every
    token is a target. `sizes` are those of the parts' files, in bytes."""
    total, before = max(1, sum(sizes)), 0
    for (reader, part), size in zip(work, sizes, strict=True):
        read = 0
        for item in _items(reader, part, bad, examples):
            yield item
            read += item.size
            progress((before + min(read, size)) / total)
        before += size
        progress(before / total)
    progress(1.0)


def _items(
    reader: Reader | ExampleReader, part: Part, bad: BadRecords, examples: bool
) -> Iterator[Item]:
    if isinstance(reader, ExampleReader):
        for example in reader.examples(part, bad):
            yield Item.of(example.id, text_of(example.content), example)
        return
    for batch in reader.read(part, bad):
        for id, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True):
            if not examples:
                yield Item.of(id, text)
                continue
            content, name = Text((Segment(text, 1.0),)), f"{reader.name}:{id}"
            yield Item.of(name, text, Example(name, f"{part.path} ({id})", content))


def text_of(content: Text | Conversation | Tokens) -> str:
    """What an example says, under any template and tokenizer: what decides its side of the
    split, so that models are measured on the same examples."""
    match content:
        case Text():
            return "".join(segment.text for segment in content.segments)
        case Conversation():
            return "\n".join(f"{message.role}: {message.text}" for message in content.messages)
        case Tokens():
            return " ".join(map(str, content.ids))


def batches(items: Iterator[Item]) -> Iterator[list[Item]]:
    """Items grouped for the tokenizer, which works on several at once."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.size
        if len(batch) == ENCODED_DOCUMENTS or size >= ENCODED_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
