"""Reading documents of token ids, from our own format and from those of other systems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pyarrow as pa

from rostra.config.sources import TokensSource
from rostra.data.formats.mds import INDEX
from rostra.data.formats.parts import SUFFIXES, TokensPart, read_rows, split
from rostra.data.formats.rows import Broken, Row
from rostra.data.formats.told import Told
from rostra.data.sources import BadRecords, Part, Reader, find_parts, unreadable
from rostra.errors import RequestError
from rostra.files import exists

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("tokens", pa.large_list(pa.uint32())),
        ("source", pa.string()),
        ("metadata", pa.string()),  # JSON
    ]
)
BATCH_DOCUMENTS = 1024
BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokensReader(Reader):
    """Documents of token ids; of a folder that Rostra wrote, those of the training split.

    Batches are of this module's `SCHEMA`, with tokens in place of text. A document's id is the
    one in its file, or file and number, from 1.
    """

    source: TokensSource
    kind: ClassVar[str] = "tokens"
    tokens: ClassVar[bool] = True

    def parts(self, bad: BadRecords) -> list[Part]:
        found = find_parts(self._path, SUFFIXES[self.source.format], self.key, bad)
        sums = {name: file["sha256"] for name, file in self.told.files.items()} if self.told else {}
        parts: list[Part] = []
        for part in self._checked(found, bad):
            try:
                parts += split(part, self.source.format, sums)
            except Broken as problem:
                _reject(part.where, problem, bad)
            except OSError as error:
                unreadable(part.where, error, bad)
        return parts

    def read(self, part: Part, bad: BadRecords) -> Iterator[pa.RecordBatch]:
        """The documents of `part` as Arrow batches of this module's `SCHEMA`."""
        rows: list[tuple[str, Row]] = []
        held = 0
        for id, row in self._rows(part, bad):
            rows.append((id, row))
            held += len(row.tokens)
            if len(rows) == BATCH_DOCUMENTS or held >= BATCH_TOKENS:
                yield self._tokens(rows)
                rows, held = [], 0
        if rows:
            yield self._tokens(rows)

    @cached_property
    def told(self) -> Told | None:
        """What the manifest tells, where Rostra wrote the files."""
        return Told.find(self._path, self.key)

    def check_tokenizer(self, hash: str | None) -> None:
        """Whether a tokenizer can be that of the tokens; None is one that is to be trained.

        Raises:
            RequestError: when it cannot.
        """
        if hash is None:
            raise RequestError(
                f"{self.key}: tokens are of a tokenizer that there is already. Set "
                "data.tokenizer.pretrained to it."
            )
        if self.told and self.told.tokenizer != hash:
            raise RequestError(
                f"{self.key}: the tokens in {self.source.path} are of another tokenizer than the "
                "config's. Set data.tokenizer.pretrained to the folder `tokenizer` beside them, "
                "or prepare their documents anew."
            )

    @property
    def _path(self) -> str:
        """The source's path; where it names Megatron's files by prefix or `.bin`, the `.idx`."""
        path = self.source.path
        if self.source.format == "megatron" and not path.endswith(".idx"):
            index = path.removesuffix(".bin") + ".idx"
            return index if exists(index) else path
        return path

    def _checked(self, found: list[Part], bad: BadRecords) -> Iterator[TokensPart]:
        """Those of the files that are to be read, as big as a manifest says."""
        told = self.told
        if told and told.whole:
            for name in sorted(set(told.train) - {part.name for part in found}):
                problem = f"has no {name}, which its manifest names"
                bad.reject("missing", self._path, problem, "Write the folder anew")
            found = [part for part in found if part.name in told.train]
        if self.source.format == "mds":
            found = _uppermost(found)
        for part in found:
            about = told.files.get(part.name) if told else None
            if about and about["bytes"] != part.file.size:
                problem = f"has {part.file.size:,} bytes, and its manifest says {about['bytes']:,}"
                _reject(part.where, Broken(problem), bad)
                continue
            sha256 = about["sha256"] if about else None
            yield TokensPart(part.name, part.file, label=part.name, sha256=sha256)

    def _rows(self, part: Part, bad: BadRecords) -> Iterator[tuple[str, Row]]:
        """Documents by id; what cannot be used goes to `bad`."""
        if not isinstance(part, TokensPart):
            raise TypeError(f"{part.name} is no part of a source of tokens")
        try:
            for number, row in enumerate(read_rows(part, self.source), part.first + 1):
                id = f"{part.label}:{number}" if row.id is None else row.id
                if row.weights is not None:
                    raise Broken(
                        "holds examples with weights, not documents (read it as `type: tokenized`)"
                    )
                if not len(row.tokens):
                    where = f"{part.where}, document {number}"
                    bad.reject("empty", where, "has no tokens", "Remove the document")
                    continue
                yield id, row
        except Broken as problem:
            _reject(part.where, problem, bad)
        except OSError as error:
            unreadable(part.where, error, bad)

    def _tokens(self, rows: list[tuple[str, Row]]) -> pa.RecordBatch:
        ids = [id for id, _ in rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row.tokens) for _, row in rows], out=offsets[1:])
        tokens = pa.array(np.concatenate([row.tokens for _, row in rows]), pa.uint32())
        columns = [
            pa.array(ids, pa.string()),
            pa.LargeListArray.from_arrays(offsets, tokens),
            pa.array([self.name] * len(rows), pa.string()),
            pa.array([json.dumps({})] * len(rows), pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _uppermost(indexes: list[Part]) -> list[Part]:
    """Without those below a folder that has one, which names their shards too."""
    folders = {part.name.rpartition("/")[0] for part in indexes if part.file.name == INDEX}
    return [
        part
        for part in indexes
        if part.file.name == INDEX and not folders & set(_above(part.name.rpartition("/")[0]))
    ]


def _above(folder: str) -> Iterator[str]:
    while folder:
        folder = folder.rpartition("/")[0]
        yield folder


def _reject(where: str, problem: Broken, bad: BadRecords) -> None:
    bad.reject("broken", where, str(problem), "Write it anew")
