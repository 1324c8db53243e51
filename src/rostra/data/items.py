"""Documents and examples on their way from parts of sources to the tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rostra.data.conversations import Conversation
from rostra.data.examples import Example, ExampleReader, Segment, Text, Tokens
from rostra.data.shards import Split
from rostra.data.sources import BadRecords, Part, Reader

ENCODED_DOCUMENTS = 1024  # tokenized at once, at the most
ENCODED_BYTES = 4_194_304


@dataclass(frozen=True)
class Item:
    """A document, or an example with its text.

    Attributes:
        size: bytes of the text in UTF-8.
        sha256: of the text.
        metadata: JSON, of a document.
        example: what is tuned on, where that is asked for.
        tokens: of a document that comes in tokens; its text is then empty.
    """

    id: str
    text: str
    size: int
    sha256: bytes
    metadata: str = "{}"
    example: Example | None = None
    tokens: NDArray[np.uint32] | None = None

    @classmethod
    def of(cls, id: str, text: str, metadata: str = "{}", example: Example | None = None) -> Item:
        encoded = text.encode()
        sha256 = hashlib.sha256(encoded).digest()
        return cls(id, text, len(encoded), sha256, metadata, example)

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
    reader: Reader | ExampleReader,
    part: Part,
    bad: BadRecords,
    examples: bool,
    clean: Callable[[Item], Item | None],
) -> Iterator[Item]:
    """What `clean` leaves of a part's documents, or of its examples: documents then are
    examples of which every token is a target."""
    if isinstance(reader, ExampleReader):
        for example in reader.examples(part, bad):
            item = Item.of(example.id, text_of(example.content), example=example)
            if kept := clean(item):
                yield kept
        return
    for batch in reader.read(part, bad):
        for item in token_items(batch) if "tokens" in batch.schema.names else text_items(batch):
            if kept := clean(item):
                yield as_example(kept, reader, part) if examples else kept


def text_items(batch: pa.RecordBatch) -> Iterator[Item]:
    """The documents of a batch of `SCHEMA`."""
    ids, texts, metadata = (batch.column(name) for name in ("id", "text", "metadata"))
    _, ends, content = texts.buffers()
    bounds = np.frombuffer(ends, np.int64)[texts.offset :].tolist()
    raw = memoryview(content or b"")  # the texts in UTF-8: hashed without encoding them anew
    rows = zip(ids.to_pylist(), texts.to_pylist(), metadata.to_pylist(), strict=True)
    for row, (id, text, also) in enumerate(rows):
        start, stop = bounds[row], bounds[row + 1]
        yield Item(id, text, stop - start, hashlib.sha256(raw[start:stop]).digest(), also)


def token_items(batch: pa.RecordBatch) -> Iterator[Item]:
    """The documents of a batch that has tokens in place of text."""
    rows = batch.column("tokens")
    tokens = rows.values.to_numpy(zero_copy_only=False).astype(np.uint32, copy=False)
    bounds = rows.offsets.to_numpy().tolist()
    for row, id in enumerate(batch.column("id").to_pylist()):
        own = tokens[bounds[row] : bounds[row + 1]]
        digest = hashlib.sha256(own.astype("<u4")).digest()
        yield Item(id, "", own.nbytes, digest, tokens=own)


def as_example(item: Item, reader: Reader | ExampleReader, part: Part) -> Item:
    """A document as an example of which every token is a target."""
    id = f"{reader.name}:{item.id}"
    content: Text | Tokens = Text((Segment(item.text, 1.0),))
    if item.tokens is not None:
        ids = tuple(item.tokens.tolist())
        content = Tokens(ids, (1.0,) * len(ids))
    return replace(item, id=id, example=Example(id, f"{part.where} ({item.id})", content))


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


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
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
