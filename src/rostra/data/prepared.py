"""Prepared data: a folder of shards, a tokenizer, and the manifest that vouches for both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from rostra.data.cache import digest
from rostra.data.shards import SPLITS, Shard, ShardCounts, Shards, Split, open_shard
from rostra.data.tokenizer import load_tokenizer
from rostra.errors import RequestError
from rostra.store import read_manifest, sha256_file

# Raise it when the same sources would give other shards.
FORMAT = 1
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class HeldOut:
    """A document that is never trained on."""

    id: str
    tokens: NDArray[Any]  # [tokens], with the tokenizer's begin and end marks
    bytes: int  # of the text in UTF-8
    text: str


class Prepared:
    """What `prepare` made: the shards of both splits, and the tokenizer.

    `manifest` has `format, key, counts` (documents, tokens and bytes a split), `skipped`,
    `tokenizer` (hash, vocabulary size, its name when pretrained), `dtype, sources, shards`, and
    of examples `audit`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], files: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files = files
        self.train = self._shards("train")
        self.held_out = self._shards("held_out")

    def _shards(self, split: Split) -> Shards:
        counts = [ShardCounts(**shard) for shard in self.manifest["shards"][split]]
        return Shards(counts, self._open_shard)

    def _open_shard(self, name: str) -> Shard:
        return open_shard(self.folder / name, self._files[name]["sha256"])

    @property
    def key(self) -> str:
        """Names the content: equal keys, equal shards."""
        return str(self.manifest["key"])

    @property
    def tokenizer_hash(self) -> str:
        return str(self.manifest["tokenizer"]["hash"])

    @property
    def identity(self) -> dict[str, str]:
        """What a run must find again when it goes on."""
        return {"key": self.key, "tokenizer": self.tokenizer_hash}

    @property
    def vocabulary_size(self) -> int:
        """All token ids are below it."""
        return int(self.manifest["tokenizer"]["vocabulary_size"])

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Loaded at first use.

        Raises:
            RequestError: when its files are not what the manifest says.
        """
        folder = self.folder / TOKENIZER
        for name in (n for n in self._files if n.startswith(f"{TOKENIZER}/")):
            path = self.folder / name
            if not path.is_file() or sha256_file(path) != self._files[name]["sha256"]:
                raise RequestError(
                    f"{path}: this tokenizer file is missing or corrupt. Delete {self.folder} "
                    "and start the same command again: the data is then prepared anew."
                )
        return load_tokenizer(folder)

    @property
    def audit(self) -> dict[str, Any]:
        """Of examples: counts of both splits by the label audit, and its `notices`."""
        return dict(self.manifest.get("audit", {}))

    @property
    def skipped(self) -> dict[str, int]:
        """Counts of what was passed over, by reason."""
        return dict(self.manifest["skipped"]["counts"])


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a hash over itself, so that a changed number is found."""
    return {**manifest, "digest": digest(manifest)}


def open_prepared(folder: Path) -> Prepared | None:
    """The prepared data in `folder`; None when it is missing, not whole, or of another format.

    Sizes of files are checked here, their hashes when they are first used.
    """
    try:
        whole = read_manifest(folder)
        files, sealed = whole["files"], dict(whole["prepared"])  # type: ignore[index]
        if sealed.pop("digest") != digest(sealed) or sealed["format"] != FORMAT:
            return None
        sizes = {name: (folder / name).stat().st_size for name in files}
        named = {s["file"] for split in SPLITS for s in sealed["shards"][split]}
        if not named <= set(files) or any(sizes[n] != files[n]["bytes"] for n in files):
            return None
        return Prepared(folder, sealed, files)
    except (KeyError, TypeError, ValueError, OSError):
        return None


def held_out(prepared: Prepared) -> Iterator[HeldOut]:
    """The held-out documents, in the order they were prepared in."""
    for index in range(len(prepared.held_out)):
        shard = prepared.held_out[index]
        ids, sizes, texts = (shard.batch.column(name) for name in ("id", "bytes", "text"))
        for row in range(len(shard.offsets) - 1):
            tokens = np.asarray(shard.tokens[shard.offsets[row] : shard.offsets[row + 1]])
            yield HeldOut(ids[row].as_py(), tokens, sizes[row].as_py(), texts[row].as_py())
