"""Which language a document is in, by py3langid, which brings its model with it.

Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool", ACL; the model
is py3langid's own, of 139 languages, with confidences that are calibrated for any length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from rostra.config.cleaning import LanguageTable
from rostra.data.clean.page import Page, Reason
from rostra.errors import RequestError

KEY = "data.clean.language"
LOOKED_AT = 16_384  # characters from the beginning: more would tell no more, and take long


@cache  # loading takes a tenth of a second, and it never changes
def identifier() -> Any:
    """py3langid's identifier, with confidences between 0 and 1.

    Raises:
        RequestError: when it is not installed.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise RequestError(
            f"{KEY}: needs py3langid; install it with: pip install 'rostra[clean]'"
        ) from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def check_languages(table: LanguageTable) -> None:
    """Raises RequestError for languages that are not known."""
    known = identifier().labels
    if unknown := set(table.keep) - set(known):
        raise RequestError(
            f"{KEY}.keep: {', '.join(sorted(unknown))}: not known; known are "
            f"{', '.join(sorted(known))}"
        )


def language(page: Page, table: LanguageTable) -> Reason | None:
    """Whether a document is in another language than those kept, or in none surely enough, by
    its first 16,384 characters."""
    found, confidence = identifier().classify(page.text[:LOOKED_AT])
    figures = f"{found} {confidence:.2f}"
    if found not in table.keep:
        return Reason("another language", figures)
    if confidence < table.min_confidence:
        return Reason("language uncertain", f"{figures} < {table.min_confidence}")
    return None
