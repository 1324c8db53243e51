"""Shards of other systems: prepared data written as WebDataset, Parquet and Megatron's files, and
documents of token ids read from these, from MosaicML's MDS, and from Arrow."""

from __future__ import annotations

from rostra.data.formats.reader import TokensReader
from rostra.data.formats.write import write_as

__all__ = ["TokensReader", "write_as"]
