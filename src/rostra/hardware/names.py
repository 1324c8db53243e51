"""Names of devices, links and nodes, however people and drivers write them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

# Words that tell nothing apart.
_FILLERS = frozenset(
    "nvidia amd geforce tesla quadro instinct gpu tensor core accelerator generation".split()
)
_SIZE = re.compile(r"(?<![a-z0-9])(\d+)\s*gi?b?(?![a-z0-9])")  # 80GB, 80 G, 80GiB


class Names:
    """A table's names and their aliases. Case, punctuation, makers and the order of words do not
    matter: `NVIDIA GeForce RTX 4090` is `rtx-4090`, and `80G A100` is `A100-80GB`."""

    def __init__(self, aliases: Mapping[str, Iterable[str]]) -> None:
        self._found = {_joined(_words(name)): name for name in aliases}
        for name, others in aliases.items():
            for written in (name, *others):
                self._found.setdefault(_joined(_words(written)), name)
                self._found.setdefault(_sorted(_words(written)), name)

    def find(self, written: str) -> str | None:
        words = _words(written)
        return self._found.get(_joined(words)) or self._found.get(_sorted(words))

    def without_size(self, written: str) -> tuple[str, float] | None:
        """The name when one size of memory is left out, and that size in bytes."""
        words = _words(written)
        sizes = [word for word in words if _SIZE.fullmatch(word)]
        name = self._found.get(_joined(word for word in words if word not in sizes))
        return (name, float(sizes[0][:-2]) * 1e9) if name and len(sizes) == 1 else None

    def near(self, written: str) -> list[str]:
        """The names most like it, the nearest first."""
        plain = _joined(_words(written))
        close = difflib.get_close_matches(plain, self._found, n=6, cutoff=0.5)
        close += [key for key in self._found if plain and (plain in key or key in plain)]
        return list(dict.fromkeys(self._found[key] for key in close))[:4]


def _words(written: str) -> list[str]:
    one_way = _SIZE.sub(r"\1gb", written.lower())
    return [word for word in re.findall(r"[a-z0-9]+", one_way) if word not in _FILLERS]


def _joined(words: Iterable[str]) -> str:
    return "".join(words)


def _sorted(words: Iterable[str]) -> str:
    return " ".join(sorted(words))
