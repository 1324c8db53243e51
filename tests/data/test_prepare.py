from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from rostra.config import read_config
from rostra.config.data import DataSection
from rostra.config.sources import PythonDocsSource
from rostra.data import Encoder, Prepared, held_out, open_prepared, prepare
from rostra.data.progress import Progress
from rostra.data.python_docs import PythonDocsReader
from rostra.data.sources import BadRecords
from rostra.errors import RequestError
from rostra.files import hash_file
from support import REPOSITORY

Section = Callable[..., DataSection]


def quiet(_: str) -> None:
    pass


def text(path: Path) -> dict[str, Any]:
    return {"type": "text", "path": str(path)}


def train_texts(prepared: Prepared) -> list[str]:
    return [
        prepared.tokenizer.decode(shard.tokens[start + 1 : stop - 1])
        for shard in map(prepared.train.__getitem__, range(len(prepared.train)))
        for start, stop in zip(shard.offsets[:-1], shard.offsets[1:], strict=True)
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_every_document_is_on_its_side_once(corpus: Path, section: Section) -> None:
    (corpus / "again.txt").write_text((corpus / "07.txt").read_text())  # an exact duplicate
    shares: list[float] = []
    prepared = prepare(section(text(corpus)), None, pytest.fail, lambda p: shares.append(p.share))
    documents = {path.name: path.read_text() for path in sorted(corpus.iterdir())}
    kept = {
        name: body
        for name, body in documents.items()
        if Fraction(int(sha256(body.encode()).hexdigest(), 16), 1 << 256) < Fraction(0.2)
    }
    assert 0 < len(kept) < 30
    found = list(held_out(prepared))
    assert {document.id: document.text for document in found} == kept
    encoder = Encoder(prepared.tokenizer)
    for document in found:
        assert document.bytes == len(document.text.encode())
        assert document.tokens.tolist() == encoder.encode([document.text])[0].tolist()
    assert train_texts(prepared) == [b for name, b in documents.items() if name not in kept]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert prepared.vocabulary_size == 320
    assert prepared.tokenizer_hash == encoder.hash


def test_the_tokenizer_knows_training_documents_only(tmp_path: Path, section: Section) -> None:
    """With held-out documents replaced by others, the tokenizer is the same."""
    folder = tmp_path / "in"
    folder.mkdir()
    sides: dict[bool, list[str]] = {True: [], False: []}
    for number in range(200):
        body = f"document {number} {'zyx' * 30 if number % 2 else 'abc' * 30}"
        share = int(sha256(body.encode()).hexdigest(), 16) / 2**256
        sides[share < 0.3].append(body)
    hashes = set()
    for count in (3, 9):
        for old in folder.iterdir():
            old.unlink()
        for number, body in enumerate(sides[False] + sides[True][:count]):
            (folder / f"{number:03d}.txt").write_text(body)
        hashes.add(prepare(section(text(folder), held_out=0.3), None, quiet).tokenizer_hash)
    assert len(hashes) == 1


def test_the_second_time_nothing_is_read(
    corpus: Path, section: Section, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files just made are not trusted to be unchanged; these are.
    monkeypatch.setattr("rostra.data.cache._FRESH_NS", 0)
    first = prepare(section(text(corpus)), None, quiet)

    def fail(*_: object) -> None:
        raise AssertionError("something was read again")

    monkeypatch.setattr("rostra.data.cache.hash_file", fail)
    monkeypatch.setattr(sys.modules["rostra.data.prepare"], "Preparation", fail)
    assert prepare(section(text(corpus)), None, quiet).key == first.key
    moved = corpus.rename(corpus.with_name("moved"))  # the key is of content, not of place
    monkeypatch.setattr("rostra.data.cache.hash_file", hash_file)
    assert prepare(section(text(moved)), None, quiet).key == first.key


def test_the_key_follows_content_and_settings(corpus: Path, section: Section) -> None:
    def key(**keys: Any) -> str:
        return prepare(section(text(corpus), **keys), None, quiet).key

    keys = [key(), key(held_out=0.3), key(tokenizer={"vocabulary": 310}), key(on_bad_record="skip")]
    keys.append(key(prepare={"shard_tokens": 700}))
    (corpus / "07.txt").write_text("other words " * 20)
    keys.append(key())
    (corpus / "07.txt").rename(corpus / "77.txt")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key(sequence_length=16, isolate_documents=False) == keys[-1]  # not of preparing


def test_a_change_in_place_is_seen_even_with_size_and_time_kept(
    corpus: Path, section: Section
) -> None:
    first = prepare(section(text(corpus)), None, quiet)
    path = corpus / "03.txt"
    stat = path.stat()
    path.write_text(path.read_text().replace("quick", "brisk"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert prepare(section(text(corpus)), None, quiet).key != first.key


def test_a_broken_memo_or_manifest_is_made_anew(corpus: Path, section: Section) -> None:
    first = prepare(section(text(corpus)), None, quiet)
    good = contents(first.folder)
    for broken in (b"", b"{", b"3", b'{"files": {}, "prepared": {}}', b"\xff"):
        for memo in first.folder.parent.glob("memo-*"):
            memo.write_bytes(broken)
        (first.folder / "manifest.json").write_bytes(broken)
        heard: list[str] = []
        again = prepare(section(text(corpus)), None, heard.append)
        assert "preparing it anew" in heard[0]
        assert contents(again.folder) == good


def test_the_tokenizer_is_the_models_where_none_is_named(
    corpus: Path, section: Section, tmp_path: Path
) -> None:
    trained = prepare(section(text(corpus)), None, quiet)
    trained.tokenizer.save_pretrained(tmp_path / "model")
    as_model = prepare(section(text(corpus), tokenizer={}), str(tmp_path / "model"), quiet)
    named = {"pretrained": str(tmp_path / "model")}
    as_named = prepare(section(text(corpus), tokenizer=named), None, quiet)
    assert as_model.key == as_named.key != trained.key
    assert as_model.tokenizer_hash == trained.tokenizer_hash
    shards = [
        {k: v for k, v in contents(p.folder).items() if "arrow" in k} for p in (trained, as_named)
    ]
    assert shards[0] == shards[1]
    with pytest.raises(RequestError, match=r"data\.tokenizer\.vocabulary"):
        prepare(section(text(corpus), tokenizer={}), None, quiet)


@pytest.mark.parametrize("bad", ["missing", "empty", "binary", "encoding", "none at all"])
def test_bad_input_leaves_nothing_or_is_skipped(
    corpus: Path, section: Section, tmp_path: Path, bad: str
) -> None:
    path = corpus / "zz.txt"
    match bad:
        case "empty":
            path.write_text("")
        case "binary":
            path.write_bytes(b"\x7fELF\0\0")
        case "encoding":
            path.write_bytes(b"\xff\xfe\xfd")
    sources = [text(corpus), *([text(tmp_path / "gone.txt")] if bad == "missing" else [])]
    if bad == "none at all":
        sources = [text(tmp_path / "*.none")]
    with pytest.raises(RequestError, match=r"zz\.txt|gone\.txt|\*\.none"):
        prepare(section(*sources), None, quiet)
    assert not (tmp_path / "cache").exists()
    if bad == "none at all":
        return
    heard: list[str] = []
    skipping = section(*sources, on_bad_record="skip")
    prepared = prepare(skipping, None, heard.append)
    assert len(heard) == 1
    assert prepared.skipped == {bad: 1}
    assert prepared.train.documents + prepared.held_out.documents == 60
    assert prepared.manifest["skipped"]["examples"][0]["reason"] == bad
    heard.clear()
    assert prepare(skipping, None, heard.append).key == prepared.key
    assert any("1 " + bad in line for line in heard)  # said again, though from the cache


def test_a_corpus_shorter_than_a_sample(tmp_path: Path, section: Section) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    with pytest.raises(RequestError, match=r"has \d+ training tokens, and one sample needs 33"):
        prepare(section(text(path), held_out=0.0), None, quiet)
    assert not (tmp_path / "cache").exists()
    prepare(section(text(path), held_out=0.0, sequence_length=4), None, quiet)
    with pytest.raises(RequestError, match="one sample needs 33"):  # from the cache, too
        prepare(section(text(path), held_out=0.0), None, quiet)
    with pytest.raises(RequestError, match="has 0 training tokens"):
        prepare(section(text(path), held_out=1.0), None, quiet)


def test_whole_documents_need_no_full_sample(tmp_path: Path, section: Section) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    prepare(section(text(path), held_out=0.0, packing="best_fit"), None, quiet)
    with pytest.raises(RequestError, match=r"0 training tokens, and one sample needs 2 .* lower "):
        prepare(section(text(path), held_out=1.0, packing="best_fit"), None, quiet)


def test_tokens_need_their_own_tokenizer(corpus: Path, section: Section) -> None:
    """Refused before anything is read."""
    made = prepare(section(text(corpus)), None, quiet)
    tokens = {"type": "tokens", "format": "arrow", "path": str(made.folder)}
    with pytest.raises(RequestError, match=r"data\.sources\.0: tokens are of a tokenizer"):
        prepare(section(tokens), None, pytest.fail)
    other = prepare(section(text(corpus), tokenizer={"vocabulary": 300}), None, quiet)
    named = {"pretrained": str(other.folder / "tokenizer")}
    with pytest.raises(RequestError, match="another tokenizer than the config's"):
        prepare(section(tokens, tokenizer=named), None, pytest.fail)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"duplicates": {"find": "exact"}}, "`duplicates.find` is for documents"),
        ({"clean": {"length": {"min_words": 3}}}, "`clean` is for documents"),
    ],
)
def test_what_examples_cannot_have_is_refused(
    keys: dict[str, Any], said: str, section: Section, tmp_path: Path
) -> None:
    examples = {"type": "alpaca", "path": str(tmp_path / "a.jsonl")}
    with pytest.raises(ValueError, match=said):
        section(examples, **keys)
    if "clean" in keys:
        section(text(tmp_path), examples, **keys)  # its documents are cleaned


def test_nothing_held_out_is_said(tmp_path: Path, section: Section) -> None:
    path = tmp_path / "one.txt"
    path.write_text("some words and more of them " * 30)
    heard: list[str] = []
    prepare(section(text(path), held_out=1e-9), None, heard.append)
    assert "no document was held out" in heard[-1]


def test_input_that_changes_meanwhile_is_refused(
    corpus: Path, section: Section, tmp_path: Path
) -> None:
    def meddle(progress: Progress) -> None:
        if progress.share > 0.5:
            (corpus / "07.txt").write_text(f"{progress.share}")

    with pytest.raises(RequestError, match=r"07\.txt: changed while it was read"):
        prepare(section(text(corpus)), None, quiet, meddle)
    assert not (tmp_path / "cache").exists()


def test_many_sources_together(corpus: Path, section: Section, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "from json lines " * 9}) + "\n")
    sources = [text(corpus), {"type": "jsonl", "path": str(tmp_path / "a.jsonl")}]
    prepared = prepare(section(*sources, held_out=0.0), None, quiet)
    assert prepared.train.documents == 61
    assert [s.source for s in prepared.train.counts] == [0, 1]
    assert prepared.train[1].id(0) == "a.jsonl:1"
    assert prepared.manifest["sources"][1]["field"] == "text"


SCRIPT = """
import errno, json, resource, sys
from rostra.config.data import DataSection
from rostra.data import prepare
from rostra.errors import RequestError
from rostra.files import hash_file
data = DataSection.model_validate_json(sys.argv[1])
limits = [int(limit) for limit in sys.argv[2:]] or [None]
for limit in limits:
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        print("ready", flush=True)
        print(prepare(data, None, lambda line: print(line, flush=True)).key)
    except RequestError as error:
        print("refused:", error)
"""


def start(data: DataSection, *limits: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, data.model_dump_json(), *map(str, limits)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_is_explained_and_leaves_nothing(
    corpus: Path, section: Section, tmp_path: Path
) -> None:
    """Files may not grow beyond a limit, so that a shard, the tokenizer or the manifest fails."""
    data = section(text(corpus), prepare={"shard_tokens": 100})
    folder = prepare(data, None, quiet).folder
    shards = max(path.stat().st_size for path in folder.glob("*.arrow"))
    tokenizer = (folder / "tokenizer" / "tokenizer.json").stat().st_size
    manifest = (folder / "manifest.json").stat().st_size
    assert shards < tokenizer < manifest
    data = data.model_copy(update={"cache": str(tmp_path / "full")})
    limits = (0, 900, shards - 1, tokenizer - 1, manifest - 1)
    out, error = start(data, *limits, manifest).communicate()
    refused = [line for line in out.splitlines() if line.startswith("refused:")]
    assert len(refused) == len(limits), out + error
    assert all("the disk is full" in line and "data.cache" in line for line in refused)
    assert out.count("ready\nrefused:") == len(limits)
    assert contents(tmp_path / "full" / folder.name) == contents(folder)


def test_nothing_is_left_on_a_full_disk(corpus: Path, section: Section, tmp_path: Path) -> None:
    out, error = start(section(text(corpus)), 0, 900).communicate()
    assert out.count("the disk is full") == 2, out + error
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written(corpus: Path, section: Section) -> None:
    with pytest.raises(RequestError, match=r"00\.txt: nothing can be written .* data\.cache"):
        prepare(section(text(corpus), cache=str(corpus / "00.txt")), None, quiet)


def test_killed_at_any_moment_and_started_again(
    corpus: Path, section: Section, tmp_path: Path
) -> None:
    for number in range(400):
        (corpus / f"more-{number}.txt").write_text(
            f"{number} many different words {number * 7} " * 99
        )
    data = section(text(corpus), prepare={"shard_tokens": 4000})
    cache = tmp_path / "cache"
    random.seed(3)
    killed = 0
    for _ in range(4):
        process = start(data)
        assert process.stdout is not None
        process.stdout.readline()
        while process.poll() is None and not list(cache.glob(".work-*")):
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.9))
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        for folder in (p for p in cache.glob("[!.]*") if p.is_dir()):
            assert open_prepared(folder)  # complete, or not there
            shutil.rmtree(folder)
    assert killed
    prepared = prepare(data, None, quiet)
    undisturbed = prepare(data.model_copy(update={"cache": str(tmp_path / "other")}), None, quiet)
    assert contents(prepared.folder) == contents(undisturbed.folder)
    assert [p.name for p in cache.glob(".*")] == []


def test_two_at_once_both_end_well(corpus: Path, section: Section, tmp_path: Path) -> None:
    for number in range(200):
        (corpus / f"more-{number}.txt").write_text(
            f"{number} many different words {number * 7} " * 99
        )
    data = section(text(corpus))
    processes = [start(data) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    keys = {out.splitlines()[-1] for out, _ in outputs}
    assert len(keys) == 1, outputs
    prepared = prepare(data, None, pytest.fail)
    assert keys == {prepared.key}
    assert [p.name for p in (tmp_path / "cache").glob(".*")] == []


def test_the_quickstart_holds_out_half_a_megabyte() -> None:
    config = read_config(REPOSITORY / "examples" / "quickstart.yaml")
    reader = PythonDocsReader(0, PythonDocsSource(type="python_docs"))
    bad = BadRecords("fail", pytest.fail)
    texts = {
        text.encode()
        for part in reader.parts(bad)
        for batch in reader.read(part, bad)
        for text in batch["text"].to_pylist()
    }
    below = int(config.data.held_out * 2**256)
    held = [text for text in texts if int.from_bytes(sha256(text).digest()) < below]
    assert sum(map(len, held)) >= 500_000
