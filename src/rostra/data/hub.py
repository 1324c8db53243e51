"""The datasets library: folders that it saved, and what to say where it cannot load."""

from __future__ import annotations

import json
from typing import Any

from rostra.data.sources import Part
from rostra.errors import RequestError
from rostra.files import File, exists, file_at, is_url, join, local_path, read_bytes


def saved_dataset(folder: str, split: str, key: str) -> list[Part]:
    """The files of a dataset that `save_to_disk` wrote; none when it is no such folder.

    Raises:
        RequestError: when it has no such split, or is not whole.
    """
    if not is_url(folder) and not local_path(folder).is_dir():
        return []
    splits = join(folder, "dataset_dict.json")
    if exists(splits):
        names = _table(splits, "splits")
        if split not in names:
            raise RequestError(
                f"{folder}: has no split {split!r} ({key}.split); it has {', '.join(names)}"
            )
        folder = join(folder, split)
    state = join(folder, "state.json")
    if not exists(state):
        return []
    names = [file["filename"] for file in _table(state, "_data_files")]
    return [Part(name, found_file(join(folder, name))) for name in names]


def _table(path: str, key: str) -> list[Any]:
    """The list under `key` in a file of the datasets library."""
    try:
        return list(json.loads(read_bytes(path))[key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path}: is not what the datasets library writes ({error!r}). Save the dataset anew."
        ) from error


def found_file(path: str) -> File:
    """A file that a dataset names; reading one that is not there will tell."""
    try:
        return file_at(path)
    except OSError:
        return File(path, 0, "")


def the_library(path: str, key: str) -> Any:
    """The datasets library. Raises RequestError when it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise RequestError(
            f"{key}.path: {path!r} is read by the datasets library, which is not installed. "
            "Install rostra[hub], or give files."
        ) from error
    return datasets


def dataset_failed(path: str, key: str, error: Exception) -> RequestError:
    """What to say when the datasets library cannot load something."""
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return RequestError(
        f"{path}: no such dataset could be loaded ({reason}). Correct {key}.path, subset or "
        "split, or give a file or folder that exists."
    )
