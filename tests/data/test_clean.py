"""Each filter at its threshold, on both sides; what is put right; a user's own function."""

from __future__ import annotations

import pickle
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from rostra.api import Run
from rostra.config import config_to_yaml
from rostra.config.cleaning import CleanTable, GopherRepetitionTable
from rostra.data.clean import Cleaner, Rejection
from rostra.data.clean.gopher import gopher_repetition
from rostra.data.clean.mending import fix_unicode
from rostra.data.clean.page import Page
from rostra.errors import RequestError
from support import need, tiny_run


def cleaner(folder: Path | str = ".", **filters: Any) -> Cleaner:
    return Cleaner.of(CleanTable(**filters), Path(folder))


def words(number: int, *others: str, length: int = 4) -> str:
    """So many words of one length, all different, with two stop words among them, and others."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    made = (
        "".join(letters[(k // 26**place) % 26] for place in range(length))
        for k in range(number - 2 - len(others))
    )
    return " ".join(["the", "that", *others, *made])


def filled(text: str, size: int) -> str:
    """The text and other words after it, of so many characters together."""
    rest = words(200)
    return f"{text} {rest}"[: size - 1] + "z"


# For each reason: thresholds that leave only this one in question, a text at it that is kept, and
# one just beyond it that is not.
Cases = dict[str, tuple[dict[str, Any], str, str]]

LENGTH: Cases = {
    "few characters": ({"min_characters": 10}, "ten of it.", "nine here"),
    "many characters": ({"max_characters": 9}, "nine here", "ten of it."),
    "few words": ({"min_words": 3}, "one, two; three!", "one, two -- !"),
    "many words": ({"max_words": 2}, "one, two -- !", "one, two; three!"),
}
QUALITY: Cases = {
    "few words": ({}, words(50), words(49)),
    "many words": ({"max_words": 60}, words(60), words(61)),
    "short words": ({}, "the and " + "cat " * 98, "the and of " + "cat " * 97),
    "long words": ({}, words(50, "y" * 23, length=10), words(50, "y" * 24, length=10)),
    "hash signs": ({}, "# " * 10 + words(90), "# " * 10 + words(89)),
    "ellipses": ({}, "… " * 10 + words(90), "... " * 10 + words(89)),
    "bullet lines": (
        {},
        "\n".join([words(50), *["- one"] * 5, *["• two"] * 4]),
        "\n".join(["- " + words(50), *["- one"] * 5, *["  • two"] * 4]),
    ),
    "ellipsis lines": (
        {},
        "\n".join([words(50)] * 7 + ["it went on ..."] * 2 + ["and on… "]),
        "\n".join([words(50)] * 6 + ["it went on ..."] * 2 + ["and on… "] * 2),
    ),
    "alphabetic words": ({}, words(80) + " 1234" * 20, words(79) + " 1234" * 21),
    "stop words": ({}, words(50), words(50).replace("that", "thot")),
}
X, U, V = "x" * 100, "u" * 150, "v" * 147
LINES = [f"{words(20)} {k}" for k in range(6)]
FIVE_WORDS = "xyz yzx zxy yyy zzz "
OFF = {
    "duplicate_lines": 1.0,
    "duplicate_paragraphs": 1.0,
    "duplicate_line_characters": 1.0,
    "duplicate_paragraph_characters": 1.0,
    "top_ngrams": {},
    "duplicate_ngrams": {},
}
REPETITION: Cases = {
    "duplicate lines": (
        OFF | {"duplicate_lines": 0.3},
        "\n".join([*LINES, *"aaaa"]),
        "\n\n".join([*LINES[:5], *"aaaaa"]),
    ),
    "duplicate paragraphs": (
        OFF | {"duplicate_paragraphs": 0.3},
        "\n\n".join([*LINES, *"aaaa"]),
        "\n\n".join([*LINES[:5], *"aaaaa"]),
    ),
    "characters in duplicate lines": (
        OFF | {"duplicate_line_characters": 0.2},
        f"{X}\n{U}\n{X}\n{V}",  # 500 characters
        f"{X}\n{U}\n{X}\n{V[1:]}",
    ),
    "characters in duplicate paragraphs": (
        OFF | {"duplicate_paragraph_characters": 0.2},
        f"{X}\n\n{U}\n\n{X}\n\n{V[3:]}",
        f"{X}\n\n{U}\n\n{X}\n\n{V[4:]}",
    ),
    "most frequent 2-gram": (
        OFF | {"top_ngrams": {2: 0.2}},
        filled("xy zw 1 xy zw 2 xy zw 3 xy zw", 100),
        filled("xy zw 1 xy zw 2 xy zw 3 xy zw", 99),
    ),
    "most frequent 4-gram": (  # the first, where none comes twice
        OFF | {"top_ngrams": {4: 0.16}},
        filled("x y z wxyzuvwxyz", 100),
        filled("x y z wxyzuvwxyz", 99),
    ),
    "duplicate 5-grams": (
        OFF | {"duplicate_ngrams": {5: 0.15}},
        filled(FIVE_WORDS * 2, 100),
        filled(FIVE_WORDS * 2, 99),
    ),
}
FIVE = "\n".join(f"Number {k} is here." for k in range(5))
C4: Cases = {
    "few sentences": ({}, FIVE, FIVE.replace("4 is here.", "4 is here...")),
    "curly bracket": ({}, FIVE + "\n(x)", FIVE + "\n{x}"),
    "lorem ipsum": ({}, FIVE + "\nLorem", FIVE + "\nLorem Ipsum"),
}
FINEWEB: Cases = {
    "punctuated lines": (
        {"max_duplicate_characters": 1.0},
        "\n".join([f"{words(9)}。"] * 3 + [words(9)] * 22),
        "\n".join([f"{words(9)}. "] * 2 + [words(9)] * 23),
    ),
    "short lines": (
        {"max_short_lines": 0.5, "max_newlines": 1.0},
        "\n".join(mark * size + "." for mark, size in zip("abcd", (29, 29, 30, 30), strict=True)),
        "\n".join(mark * size + "." for mark, size in zip("abcd", (29, 29, 29, 30), strict=True)),
    ),
    "duplicate characters": (
        {},
        f"a b\na b\n{filled('', 293)}.",  # three of 300
        f"a b\na b\n{filled('', 292)}.",
    ),
    "newlines": (
        {},
        "one two three four five six seven eight nine ten.".replace(" e", "\ne") + "\n\n",
        "one two three four five six seven eight nine ten.".replace(" e", "\ne") + "\n\n\n",
    ),
}
ALL = {
    "length": LENGTH,
    "gopher_quality": QUALITY,
    "gopher_repetition": REPETITION,
    "c4": C4,
    "fineweb": FINEWEB,
}


@pytest.mark.parametrize(
    ("name", "reason"), [(name, reason) for name, cases in ALL.items() for reason in cases]
)
def test_a_filter_keeps_at_its_threshold_and_rejects_beyond(name: str, reason: str) -> None:
    thresholds, kept, rejected = ALL[name][reason]
    clean = cleaner(**{name: thresholds})
    assert clean(kept, {}) == kept if name != "c4" else isinstance(clean(kept, {}), str)
    found = clean(rejected, {})
    assert isinstance(found, Rejection)
    assert (found.filter, found.reason) == (name, reason)


@given(st.lists(st.sampled_from(["a", "bc", "def"]), max_size=40))
def test_repeated_ngrams_are_those_of_the_definition(tokens: list[str]) -> None:
    text = " ".join(tokens)
    for n in (1, 2, 5):
        ngrams = [tuple(tokens[k : k + n]) for k in range(len(tokens) - n + 1)]
        if not ngrams:
            continue
        top, times = Counter(ngrams).most_common(1)[0]
        seen, free, again = set(), 0, 0
        for k, ngram in enumerate(ngrams):
            if k >= free and ngram in seen:
                again, free = again + len("".join(ngram)), k + n
            elif k >= free:
                seen.add(ngram)
        for key, characters in (
            ("top_ngrams", len(" ".join(top)) * times),
            ("duplicate_ngrams", again),
        ):
            share = characters / len(text)
            for most, kept in ((share, True), (share - 1e-9, False)):
                if 0 <= most <= 1:
                    table = GopherRepetitionTable(**OFF | {key: {n: most}})
                    assert (gopher_repetition(Page(text, {}), table) is None) == kept


def test_c4_removes_lines(tmp_path: Path) -> None:
    lines = {
        "It cost 3 pounds.[1][citation needed]": "It cost 3 pounds.",
        '  “She left,” he said to "them."': '“She left,” he said to "them."',
        "Please enable JavaScript in here.": None,
        "You agree to our Privacy Policy.": None,
        "Home | Contact | About": None,
        "Too short.": None,
        f"A word of {'w' * 1001} is long.": None,
        f"A word of {'w' * 1000} is not.": f"A word of {'w' * 1000} is not.",
    }
    text = "\n".join([*lines, FIVE])
    left = "\n".join([line for line in lines.values() if line] + [FIVE])
    assert cleaner(c4={})(text, {}) == left
    off = {"min_sentences": 0, "citations": False, "javascript": False, "policy": False}
    off |= {"terminal_punctuation": False, "min_line_words": 0, "max_word_characters": None}
    whole = cleaner(c4=off)(text, {})
    assert whole == "\n".join(line.strip() for line in text.splitlines())
    nothing = cleaner(c4={"min_sentences": 0})("Menu\nHome", {})
    assert nothing == Rejection("c4", "nothing left")
    abbreviated = {"min_sentences": 3}
    assert isinstance(cleaner(c4=abbreviated)("Dr. J. Doe met Mrs. Roe. He left!", {}), Rejection)


def test_bad_words(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("Grumble\nred herring\n女の子\n\n", encoding="utf-8")
    clean = cleaner(tmp_path, c4={"bad_words": "bad.txt", "min_sentences": 0})
    for text in ("A GRUMBLE is heard.", "It is a red herring, you see.", "これは女の子です."):
        found = clean(f"{text} One two three.", {})
        assert isinstance(found, Rejection)
        assert found.reason == "bad word"
    for text in ("He grumbled at red herrings.", "A grumbler is here."):
        assert clean(text, {}) == text
    for content, message in ((b"\n", "holds no words"), (b"\xff", "cannot be read")):
        file.write_bytes(content)
        with pytest.raises(RequestError, match=rf"c4.bad_words: .*bad.txt: {message}"):
            cleaner(tmp_path, c4={"bad_words": "bad.txt"})


GERMAN = "Der Hund lief über die Straße und bellte den Briefträger an."
ENGLISH = "The dog ran across the street and barked at the man who brought the letters."


def test_language() -> None:
    need(find_spec("py3langid"), "py3langid")
    clean = cleaner(language={"keep": ["en", "ja"]})
    japanese = "猫が窓の外を見ている。今日はとても良い天気です。"
    assert clean(ENGLISH, {}) == ENGLISH
    assert clean(japanese, {}) == japanese
    for text, found in (
        (GERMAN, "de"),
        ("Le chat est assis sur la table et regarde par la fenêtre.", "fr"),
        ("El perro corre por la calle y ladra a los niños que juegan.", "es"),
    ):
        rejection = clean(text, {})
        assert isinstance(rejection, Rejection)
        assert rejection.reason == "another language"
        assert rejection.figures.startswith(found)
    unsure = cleaner(language={"keep": ["en"], "min_confidence": 1.0})("of the 12 and ab", {})
    assert isinstance(unsure, Rejection)
    with pytest.raises(RequestError, match=r"language\.keep: english: not known; .* en,"):
        cleaner(language={"keep": ["english"]})


def test_unicode_is_put_right() -> None:
    need(find_spec("ftfy"), "ftfy")
    clean = cleaner(unicode=True)
    assert clean("schÃ¶n, âœ” No problems\x00", {}) == "schön, ✔ No problems"
    for text in ("“quoted” ﬁne ＡＢＣ　e\u0301 &amp; <b>\r\n", "plain\ttext\n"):
        assert clean(text, {}) == text


@given(st.text(), st.text())
@example("Ã¢â‚¬â„¢ &amp;lt;", "\x1b[1m")
def test_unicode_fixing_is_idempotent(text: str, more: str) -> None:
    need(find_spec("ftfy"), "ftfy")
    fix = fix_unicode()
    spoilt = text + more.encode("utf-8", "ignore").decode("cp1252", "replace")
    once = fix(spoilt)
    assert fix(once) == once


NAME = st.text("abcXYZ019_.+-é", max_size=70).map(lambda name: f"n{name}")
LABEL = st.text("abcXYZ019-ü", min_size=1, max_size=20).filter(lambda name: name[0].isalnum())
EMAILS = st.builds(lambda n, d: f"{n}@{'.'.join(d)}.org", NAME, st.lists(LABEL, min_size=1))
PUBLIC = st.one_of(
    st.ip_addresses(v=4, network="8.0.0.0/8"),
    st.ip_addresses(v=6, network="2600::/12"),
)
AROUND = st.sampled_from(["", "\n", "mail: ", " (", '"', ", ", "<", "x "])


@given(EMAILS, PUBLIC.map(str), AROUND, st.sampled_from(["", " ", ".", ")", ">.", "\n", ", y"]))
def test_masking_leaves_no_address(email: str, ip: str, before: str, after: str) -> None:
    text = f"{before}{email}{after} and{before or ' '}{ip}{after}"
    masked = PERSONAL(text, {})
    assert isinstance(masked, str)
    assert email not in masked
    assert ip not in masked
    assert masked.endswith(f"MASKED{after}")
    assert PERSONAL(masked, {}) == masked


PERSONAL = cleaner(personal={"email": "<email>", "ip": "MASKED"})


def test_what_is_no_address_stays() -> None:
    text = (
        "192.168.1.1, 10.0.0.1, 127.0.0.1; 1.2.3.4.5, v8.8.8.8, 300.8.8.8, std::vector, 12:30:45, "
        "@home, me@here, fe80::1, 2001:db8::1"
    )
    assert cleaner(personal={})(text, {}) == text
    shown = "ask a.b@c.org at 8.8.8.8 or 2606:4700::1111"
    assert cleaner(personal={})(shown, {}) == (
        "ask email@example.com at 22.214.171.124 or 22.214.171.124"
    )
    assert cleaner(personal={"email": None, "ip": None})(shown, {}) == shown


FUNCTION = """
def keep(text, metadata):
    if text == "odd": return 3
    if text == "raise": raise ValueError("no such thing")
    if text in ("none", "false"): return None if text == "none" else False
    return metadata["title"] + text if "title" in metadata else True
"""


def test_a_users_function(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text(FUNCTION)
    clean = cleaner(tmp_path, function={"file": "my.py"})
    clean = pickle.loads(pickle.dumps(clean))  # as engines send it to their workers
    assert clean("text", {}) == "text"
    assert clean("text", {"title": "A "}) == "A text"
    assert clean("none", {}) == clean("false", {}) == Rejection("function", "keep")
    with pytest.raises(RequestError, match="keep returned a int"):
        clean("odd", {})
    with pytest.raises(RequestError, match=r"keep raised ValueError: no such thing, .* 'raise'"):
        clean("raise", {})
    for name, content, message in (
        ("drop", FUNCTION, "holds no function 'drop'; it holds keep"),
        ("keep", "1 +", "my.py: cannot be run: SyntaxError"),
        ("keep", None, "my.py: cannot be run: FileNotFoundError"),
    ):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(RequestError, match=message):
            cleaner(tmp_path, function={"file": "my.py", "name": name})


def test_a_config_alone_runs_no_code(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text("raise SystemExit('was run')")
    values = tiny_run(corpus, tmp_path / "run")
    values["data"]["clean"] = {"function": {"file": str(file)}}
    for allowed in ([], [tmp_path / "other.py"]):
        with pytest.raises(RequestError, match=f"would run 'keep' of {file}; .*--allow-code"):
            Run.open(values, allow_code=allowed)
    values["data"]["clean"]["gopher_repetition"] = {"top_ngrams": {2: 0.5}}
    run = Run.open(values, allow_code=[file])
    written = tmp_path / "written.yaml"
    written.write_text(config_to_yaml(run.config))
    assert Run.open(written, allow_code=[file]).config == run.config


def test_order_and_identity(tmp_path: Path) -> None:
    nothing = cleaner()
    assert not nothing
    assert nothing.identity == {}
    assert nothing(" \n", {}) == " \n"
    (tmp_path / "my.py").write_text("def keep(text, metadata): return text + ' me@x.org'")
    filters: dict[str, Any] = {"length": {}, "function": {"file": "my.py"}, "personal": {}}
    clean = cleaner(tmp_path, **filters)
    assert [name for name, _ in clean.steps] == ["length", "function", "personal"]
    assert clean("text", {}) == "text email@example.com"  # what the function brings is masked
    again = cleaner(tmp_path, **dict(reversed(filters.items())))
    assert again.identity == clean.identity
    (tmp_path / "my.py").write_text("def keep(text, metadata): return True")
    assert cleaner(tmp_path, **filters).identity != clean.identity
    assert cleaner(tmp_path, **filters | {"length": {"min_words": 1}}).identity != clean.identity
    for wrong in ({"min_words": 3, "max_words": 2}, {"min_characters": 3, "max_characters": 2}):
        with pytest.raises(ValidationError, match="is below `min_"):
            CleanTable(length=wrong)
