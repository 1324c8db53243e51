"""All filters of a config as one function from a document to its clean text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rostra.config.cleaning import CleanTable, LengthTable
from rostra.data.clean.c4 import BadWords, c4
from rostra.data.clean.fineweb import fineweb
from rostra.data.clean.function import apply, load
from rostra.data.clean.gopher import gopher_quality, gopher_repetition
from rostra.data.clean.language import check_languages, language
from rostra.data.clean.mending import fix_unicode, mask_personal
from rostra.data.clean.page import Page, Reason, Rejection, above, below

RECIPE = 1  # of the filters: another one gives other texts for the same config

Step = Callable[[Page], Reason | None]


@dataclass(frozen=True)
class Cleaner:
    """What `data.clean` asks for: `cleaner(text, metadata)` is the clean text or a Rejection.

    Attributes:
        table: the config.
        folder: where relative paths in it start.
        steps: name and function of each filter that is on, in the order of CleanTable.
        identity: JSON value that changes when any text may come out in another way.
    """

    table: CleanTable
    folder: Path
    steps: tuple[tuple[str, Step], ...]
    identity: dict[str, Any]

    @classmethod
    def of(cls, table: CleanTable, folder: Path) -> Cleaner:
        """Read what the filters need; a user's code is run here.

        Raises:
            RequestError: for files that cannot be used, unknown languages, and libraries that
                are not installed.
        """
        return cls(table, folder, tuple(_steps(table, folder)), _identity(table, folder))

    def __reduce__(self) -> Any:
        """A pickle holds the config alone: filters are made again where it is opened."""
        return Cleaner.of, (self.table, self.folder)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.steps)

    def __call__(self, text: str, metadata: Mapping[str, Any]) -> str | Rejection:
        """The document's text, put right; or why it is rejected.

        Raises:
            RequestError: for a user's function that fails.
        """
        page = Page(text, metadata)
        for name, step in self.steps:
            reason = step(page)
            if reason is None and page.text is not text and not page.text.strip():
                reason = Reason("nothing left")
            if reason is not None:
                return Rejection(name, reason.name, reason.figures)
        return page.text


def _steps(table: CleanTable, folder: Path) -> Iterator[tuple[str, Step]]:
    """Cheap filters first, but `unicode` before all, since they see what it puts right, and
    `personal` after all, so that nothing brings an address back."""
    if table.unicode:
        yield "unicode", partial(_change, change=fix_unicode())
    if table.length:
        yield "length", partial(length, table=table.length)
    if table.gopher_quality:
        yield "gopher_quality", partial(gopher_quality, table=table.gopher_quality)
    if table.gopher_repetition:
        yield "gopher_repetition", partial(gopher_repetition, table=table.gopher_repetition)
    if table.c4:
        words = BadWords(folder / table.c4.bad_words) if table.c4.bad_words else None
        yield "c4", partial(c4, table=table.c4, bad_words=words)
    if table.fineweb:
        yield "fineweb", partial(fineweb, table=table.fineweb)
    if table.language:
        check_languages(table.language)
        yield "language", partial(language, table=table.language)
    if table.function:
        called, name = load(table.function, folder), table.function.name
        yield "function", partial(apply, function=called, name=name)
    if table.personal:
        yield "personal", partial(_change, change=partial(mask_personal, table=table.personal))


def _change(page: Page, change: Callable[[str], str]) -> None:
    page.replace(change(page.text))


def length(page: Page, table: LengthTable) -> Reason | None:
    """Whether a document is too short or too long."""
    if found := below("few characters", len(page.text), table.min_characters):
        return found
    if table.max_characters and len(page.text) > table.max_characters:
        return above("many characters", len(page.text), table.max_characters)
    if table.min_words and (found := below("few words", len(page.words), table.min_words)):
        return found
    return above("many words", len(page.words), table.max_words) if table.max_words else None


def _identity(table: CleanTable, folder: Path) -> dict[str, Any]:
    """The filters that are on, with the content of files in place of their names."""
    found: dict[str, Any] = {
        name: value
        for name, value in table.model_dump(mode="json").items()
        if value is not None and value is not False
    }
    if not found:
        return {}
    for name, key in (("c4", "bad_words"), ("function", "file")):
        if found.get(name, {}).get(key):
            found[name][key] = sha256((folder / found[name][key]).read_bytes()).hexdigest()
    libraries = {"unicode": "ftfy", "language": "py3langid"}
    used = {library: version(library) for name, library in libraries.items() if name in found}
    return {"recipe": RECIPE, "libraries": used, **found}
