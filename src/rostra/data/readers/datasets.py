"""The datasets library: folders that it saved, and what it streams from its hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rostra.config.sources import DatasetSource
from rostra.data.hub import dataset_failed, saved_dataset, the_library
from rostra.data.readers.tables import documents_of
from rostra.data.records import Numbered, read_arrow
from rostra.data.sources import BadRecords, Document, Part, Reader, reading, refuse_empty
from rostra.files import File

UNKNOWN_BYTES = 32 << 20  # of a shard whose size nobody tells


@dataclass(frozen=True)
class DatasetReader(Reader):
    """A folder of `save_to_disk`, or a hub id (or a folder like one), streamed shard by shard.

    The id is shard and row, the metadata the other columns.
    """

    source: DatasetSource
    kind: ClassVar[str] = "dataset"

    def parts(self, bad: BadRecords) -> list[Part]:
        saved = saved_dataset(self.source.path, self.source.split, self.key)
        return saved or list(self._shards())

    def _shards(self) -> Iterator[Part]:
        builder, stream = self._streamed()
        files = getattr(builder.config, "data_files", None) or {}
        origin = [[str(s), list(f), f.origin_metadata] for s, f in files.items()]
        seen = json.dumps([builder.hash, str(builder.info.version), origin], default=str)
        version = hashlib.sha256(seen.encode()).hexdigest()
        known = builder.info.download_size or builder.info.dataset_size
        size = known // stream.num_shards if known else UNKNOWN_BYTES
        file = File(f"hf://datasets/{self.source.path}", size, version)
        for index in range(stream.num_shards):
            name = f"{self.source.subset or 'default'}-{self.source.split}-{index:05d}"
            yield Part(name, file, index, index + 1)

    def _streamed(self) -> tuple[Any, Any]:
        """The library's builder, and its stream of the split."""
        source = self.source
        datasets = the_library(source.path, self.key)
        try:
            builder = datasets.load_dataset_builder(source.path, source.subset)
            return builder, builder.as_streaming_dataset(split=source.split)
        except Exception as error:  # its own kinds, those of the hub, of the network, of formats
            raise dataset_failed(source.path, self.key, error) from error

    def documents(self, part: Part, bad: BadRecords) -> Iterator[Document]:
        with reading(part, bad):
            where = f"{part.where}, {part.name}"
            if not (yield from documents_of(self, self._rows(part), part.name, where, bad)):
                refuse_empty(part.where, bad)

    def _rows(self, part: Part) -> Numbered:
        if part.stop is None:
            yield from read_arrow(part.file)
            return
        _, stream = self._streamed()
        rows = stream.shard(num_shards=stream.num_shards, index=part.start)
        try:
            yield from enumerate(rows, 1)
        except Exception as error:
            raise dataset_failed(self.source.path, self.key, error) from error
