"""Prepared data: a folder of shards, a tokenizer, and the manifest that vouches for both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rostra.config.loading import LoadTable
from rostra.data.cache import digest
from rostra.data.local_cache import LocalCache
from rostra.data.mapping import Content, MappedFiles
from rostra.data.shards import SPLITS, Shard, ShardCounts, Shards
from rostra.data.tokenizer import load_tokenizer
from rostra.errors import RequestError
from rostra.files import is_url, join, read_bytes
from rostra.store import MANIFEST

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


class PreparedFiles:
    """The files of prepared data: in a local folder, or on a store and then in the local cache.

    A file's content is hashed before it is first used.
    """

    def __init__(
        self, folder: Path | str, files: dict[str, Any], cache: LocalCache | None = None
    ) -> None:
        """
        Args:
            files: of each its `sha256` and `bytes`, as the manifest has them.
            cache: of files on a store; `folder` is a URL then.
        """
        self.folder = folder
        self._sums = {
            name: (str(file["sha256"]), int(file["bytes"])) for name, file in files.items()
        }
        self._cache = cache
        self._mapped = MappedFiles()

    def below(self, folder: str) -> list[str]:
        """Names of the files in a folder of this one."""
        return [name for name in self._sums if name.startswith(f"{folder}/")]

    def content(self, name: str) -> Content:
        """Raises RequestError when it is missing, or not what the manifest says."""
        sha256, size = self._sums[name]
        if self._cache is not None:
            return self._cache.map(join(str(self.folder), name), sha256, size)
        return self._mapped.checked(Path(self.folder, name), sha256)

    def shard(self, name: str) -> Shard:
        return Shard.of(self.content(name))


class Prepared:
    """What `prepare` made: the shards of both splits, and the tokenizer.

    `variants` are what epoch after epoch takes in turns: `train`, and other variants of its
    examples where the config asks for some. `folder` is a local one or a URL.

    `manifest` has `format, key, counts` (documents, tokens and bytes a split), `skipped`,
    `tokenizer` (hash, vocabulary size, its name when pretrained), `dtype, sources, shards`,
    and of examples `audit`.
    """

    def __init__(self, manifest: dict[str, Any], files: PreparedFiles) -> None:
        self.folder = files.folder
        self.manifest = manifest
        self._files = files
        self.train = self._shards("train")
        self.held_out = self._shards("held_out")
        more = [self._shards(split) for split in manifest["shards"] if split not in SPLITS]
        self.variants = [self.train, *more]

    def _shards(self, split: str) -> Shards:
        counts = [ShardCounts(**shard) for shard in self.manifest["shards"][split]]
        return Shards(counts, self._files.shard)

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
        with TemporaryDirectory() as folder:  # what is loaded is what was hashed
            for name in self._files.below(TOKENIZER):
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._files.content(name))
            return load_tokenizer(Path(folder, TOKENIZER))

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


def open_prepared(folder: Path | str, load: LoadTable | None = None) -> Prepared | None:
    """The prepared data in a folder or at a URL; None when it is missing, not whole, or of
    another format.

    The sizes of local files are checked here, the hashes of all when they are first used.

    Args:
        load: has the cache for files of a URL.

    Raises:
        RequestError: when a store does not answer, or refuses.
    """
    remote = is_url(str(folder))
    try:
        whole = json.loads(_manifest(folder))
        files, sealed = whole["files"], dict(whole["prepared"])
        if sealed.pop("digest") != digest(sealed) or sealed["format"] != FORMAT:
            return None
        if not _is_complete(sealed, files):
            return None
        if not remote:
            folder = Path(folder)
            if any((folder / n).stat().st_size != file["bytes"] for n, file in files.items()):
                return None
        cache = LocalCache.of(load or LoadTable()) if remote else None
        return Prepared(sealed, PreparedFiles(folder, files, cache))
    except (KeyError, TypeError, ValueError, OSError):
        return None


def _manifest(folder: Path | str) -> bytes:
    if not is_url(str(folder)):
        return Path(folder, MANIFEST).read_bytes()
    url = join(str(folder), MANIFEST)
    try:
        return read_bytes(url)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RequestError(f"{url}: cannot be read ({error.strerror})") from error


def _is_complete(sealed: dict[str, Any], files: dict[str, Any]) -> bool:
    """Whether `files`, which no digest covers, has the shards and else a tokenizer's only."""
    shards = {shard["file"] for split in sealed["shards"].values() for shard in split}
    rest = files.keys() - shards
    return shards <= files.keys() and all(name.startswith(f"{TOKENIZER}/") for name in rest)


def held_out(prepared: Prepared) -> Iterator[HeldOut]:
    """The held-out documents, in the order they were prepared in."""
    for index in range(len(prepared.held_out)):
        shard = prepared.held_out[index]
        ids, sizes, texts = (shard.batch.column(name) for name in ("id", "bytes", "text"))
        for row in range(len(shard.offsets) - 1):
            tokens = np.asarray(shard.tokens[shard.offsets[row] : shard.offsets[row + 1]])
            yield HeldOut(ids[row].as_py(), tokens, sizes[row].as_py(), texts[row].as_py())
