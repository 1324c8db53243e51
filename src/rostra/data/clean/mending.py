"""What is put right in a text and rejects none: wrong decoding, personal data."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

from rostra.config.cleaning import PersonalTable
from rostra.errors import RequestError

# RFC 5322's addresses without quotes, in any script. The bounds are those of RFC 5321; they
# also keep a long run of letters from being tried from each of its places to its end.
EMAIL = re.compile(r"\w[\w.!#$%&'*+/=?^`{|}~-]{0,63}@(?:\w[\w-]{0,62}\.){1,16}[^\W\d_][\w-]{0,62}")
IPV4 = re.compile(r"(?<![\w.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?!\w|\.\w)")
# Only what is routed on the internet, 2000::/3: other texts with colons look like addresses.
IPV6 = re.compile(
    r"(?<![\w:.])[23][0-9a-f]{3}:[0-9a-f:]{0,33}(?:[0-9a-f]|:)(?!\w|:\w)", re.IGNORECASE
)
STRANGE = re.compile(r"[^\t\n\x0c\r -~]")


def fix_unicode() -> Callable[[str], str]:
    """What takes from a text what wrong decoding did to it (Ã© for é), terminal escapes, control
    characters and lone surrogates: Speer 2019, "ftfy", doi:10.5281/zenodo.2591652.

    Typography stays as it was written: quotes, ligatures, full-width marks, line ends.

    Raises:
        RequestError: when ftfy is not installed.
    """
    try:
        import ftfy
    except ImportError as error:
        raise RequestError(
            "data.clean.unicode: needs ftfy; install it with: pip install 'rostra[clean]'"
        ) from error
    config = ftfy.TextFixerConfig(
        unescape_html=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        normalization=None,
        explain=False,
    )
    # Printable ASCII holds nothing of this, and is told apart much faster.
    return lambda text: ftfy.fix_text(text, config) if STRANGE.search(text) else text


def mask_personal(text: str, table: PersonalTable) -> str:
    """A text with e-mail addresses and public IP addresses masked, as Penedo et al. 2024
    (FineWeb, arXiv:2406.17557) do; of version 6 too."""
    if table.email is not None and "@" in text:
        email = table.email
        text = EMAIL.sub(lambda _: email, text)
    if table.ip is not None:
        ip = table.ip
        for pattern in (IPV4, IPV6):
            text = pattern.sub(lambda found: ip if _is_public(found[0]) else found[0], text)
    return text


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False
