"""What the manifest of a folder that Rostra wrote tells of the files in it."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from rostra.errors import RequestError
from rostra.files import exists, join, read_bytes
from rostra.store import MANIFEST


@dataclass(frozen=True)
class Told:
    """What is known of files before they are read.

    Attributes:
        whole: the source is the folder, so all files of the training split are to be there.
        tokenizer: hash of the one that made the tokens.
        train: files of the training split.
        files: `sha256` and `bytes` of all, by name.
    """

    whole: bool
    tokenizer: str
    train: tuple[str, ...]
    files: dict[str, dict[str, Any]]

    @classmethod
    def find(cls, path: str, key: str) -> Told | None:
        """Of the folder that `path` (a folder, a file, or a glob) is or lies in; None when it
        has no manifest.

        Raises:
            RequestError: when the manifest is broken.
        """
        fixed = re.split(r"[*?\[]", path, maxsplit=1)[0]
        parent = fixed.rpartition("/")[0] or "."
        for folder in [path, parent] if path == fixed else [parent]:
            if _exists(url := join(folder, MANIFEST)):
                try:
                    found = json.loads(read_bytes(url))
                    told = found.get("exported") or found["prepared"]
                    train = tuple(str(shard["file"]) for shard in told["shards"]["train"])
                    return cls(folder == path, told["tokenizer"]["hash"], train, found["files"])
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise RequestError(
                        f"{url}: is no manifest of Rostra's, or a broken one ({error!r}). Write "
                        f"the folder anew, or move that file away ({key}.path)."
                    ) from error
        return None


def _exists(path: str) -> bool:
    with contextlib.suppress(NotADirectoryError):  # below a file
        return exists(path)
    return False
