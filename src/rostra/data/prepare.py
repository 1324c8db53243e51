"""From sources to prepared data: tasks that read, tokenize and write, and the commit of all."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rostra import files
from rostra.config.data import DataSection
from rostra.config.sources import PreferenceSource
from rostra.data.cache import one_at_a_time
from rostra.data.documents import Read, drop_duplicates
from rostra.data.encode import ExampleEncoder
from rostra.data.engines import open_engine
from rostra.data.folders import LocalFolder, commit, read_json, write_json
from rostra.data.job import Job, Notice
from rostra.data.manifest import manifest_of
from rostra.data.prepared import TOKENIZER, Prepared, open_prepared, seal
from rostra.data.progress import Meter, Show
from rostra.data.sources import BadRecords
from rostra.data.store_lock import StoreLock
from rostra.data.tasks import Do, Engine, complete_tasks, read_record
from rostra.data.tokenizer import Encoder
from rostra.data.tokenizing import TOKENIZER_RECORD, Tokenize, fetched_tokenizer
from rostra.errors import RequestError
from rostra.store import explain_full_disk, sweep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DROPPED = "duplicates.json"

# After which work that was broken off is taken for given up: other content has another key.
_GIVEN_UP_SECONDS = 14 * 86_400


def prepare(
    data: DataSection,
    model_tokenizer: str | None,
    notice: Notice,
    progress: Show | None = None,
) -> Prepared:
    """The prepared data that `data` asks for: from the cache, or made now.

    Killed at any point, the next call goes on with the tasks that are not complete.

    Args:
        model_tokenizer: folder or hub id of the pretrained model, whose tokenizer is taken
            when `data.tokenizer` names none.
        notice: told what a person should know.
        progress: told how far it is.

    Raises:
        RequestError: for missing or bad input, too little of it, or a full disk; nothing is
            left behind but complete tasks.
    """
    _check_trainable(data)
    job = Job.of(data, model_tokenizer, notice)
    prepared = open_prepared(job.place, data.load)
    if prepared is None:
        prepared = _prepare_alone(job, notice, progress or (lambda _: None))
    elif prepared.skipped:
        said = ", ".join(f"{count} {reason}" for reason, count in prepared.skipped.items())
        notice(f"skipped when this data was prepared: {said} (named in {prepared.folder})")
    job.hashes.save()
    for said in prepared.audit.get("notices", ()):
        notice(said)
    _check_length(prepared.train.documents, prepared.train.tokens, data)
    if data.held_out and not prepared.held_out.documents:
        kind = "example" if data.examples else "document"
        notice(f"no {kind} was held out: data.held_out is {data.held_out:g} of too few {kind}s")
    return prepared


def _prepare_alone(job: Job, notice: Notice, show: Show) -> Prepared:
    """Prepare, unless another process does just that: then take what it made."""

    def waiting() -> None:
        notice("another process is preparing the same data; waiting for it")

    lock = files.join(job.cache, f".{job.key[:24]}.lock")
    if files.is_url(job.cache):
        with StoreLock(lock, notice):
            _prepare_missing(job, notice, show)
    else:
        cache = Path(job.cache)
        try:
            with one_at_a_time(Path(lock), waiting):
                sweep(cache)
                _remove_given_up(cache)
                _prepare_missing(job, notice, show)
        except BaseException:
            with contextlib.suppress(OSError):
                cache.rmdir()  # if it is ours and empty
            raise
    if (prepared := open_prepared(job.place, job.data.load)) is None:
        raise RequestError(f"{job.place}: was changed by something else; start again")
    return prepared


def _prepare_missing(job: Job, notice: Notice, show: Show) -> None:
    """Prepare, unless another process has done so by now."""
    if open_prepared(job.place) is not None:
        return
    if Path(job.place).exists():
        notice(f"{job.place} is broken or of another version; preparing it anew")
    with _explained(job), open_engine(job.data, job.bytes, notice) as engine:
        Preparation(job, engine, notice, show).run()


@contextlib.contextmanager
def _explained(job: Job) -> Iterator[None]:
    """A full disk or a lost file explained, and nothing left of work in which no task is
    complete."""
    disk = tempfile.gettempdir() if files.is_url(job.cache) else job.cache
    try:
        try:
            with explain_full_disk(Path(disk)):
                yield
        except (FileNotFoundError, PermissionError) as error:  # of sources, readers say it
            raise RequestError(
                f"{job.cache}: cannot be worked in, or was changed by something else ({error}). "
                "Start the same command again, or choose another place with data.cache."
            ) from error
    except BaseException:
        if not any(complete_tasks(job.work, do.stage, job.tasks) for do in (Read, Tokenize)):
            job.work.remove()
        raise


def _remove_given_up(cache: Path) -> None:
    """Work that nobody went on with for long."""
    for work in cache.glob(".work-*"):
        with contextlib.suppress(OSError):
            if time.time() - work.stat().st_mtime > _GIVEN_UP_SECONDS:
                LocalFolder(work).remove()


class Preparation:
    """One start of preparing: does what is not complete yet, then commits."""

    def __init__(self, job: Job, engine: Engine, notice: Notice, show: Show) -> None:
        self._job, self._engine, self._notice, self._show = job, engine, notice, show
        self._work, self._documents = job.work, job.documents
        self._heard = BadRecords("skip", notice)
        self._passes = 0

    def run(self) -> None:
        """Leave the prepared data in its place."""
        job = self._job
        dropped = self._read() if self._documents.stored else []
        tokenizer = self._tokenizer()
        tokenize = Tokenize(self._documents, job.result, tokenizer)
        self._do(tokenize, "tokenizing")
        self._commit(tokenize, dropped)
        self._work.remove()

    def _read(self) -> list[int]:
        """Have all documents stored, and the duplicates among them found: how many a task."""
        self._do(Read(self._documents), "reading")
        if (known := read_json(self._work, DROPPED)) is not None:
            return list(known)
        find = self._job.data.duplicates.find != "none"
        dropped = drop_duplicates(self._work, self._job.tasks) if find else []
        write_json(self._work, DROPPED, dropped)
        return dropped

    def _do(self, do: Do, said: str) -> None:
        """Have the engine do a stage's tasks that are not complete."""
        tasks = self._job.tasks
        done = complete_tasks(self._work, do.stage, tasks)
        if done:
            self._notice(f"going on: {len(done):,} of {len(tasks):,} tasks are complete ({said})")
        todo = [task for task in tasks if task.number not in done]
        meter = self._meter(said, done)
        with contextlib.closing(self._engine.run(todo, do, meter.tell)) as complete:
            for task in complete:
                self._announce(read_record(self._work, do.stage, task.number) or {})
                meter.complete(task.number)

    def _meter(self, said: str, done: set[int]) -> Meter:
        sizes = {task.number: task.size for task in self._job.tasks}
        span = self._passes, self._job.passes
        self._passes += 1
        return Meter(said, sizes, done, span, self._show)

    def _announce(self, record: dict[str, Any]) -> None:
        """Say what a task had to skip."""
        for example in record.get("skipped", {}).get("examples", ()):
            self._heard.reject(example["reason"], example["where"], example["problem"], "")

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer; and saved in the result's folder, where other processes find it."""
        job, result = self._job, self._job.result
        if read_json(self._work, TOKENIZER_RECORD) is not None:
            return job.pretrained[1] if job.pretrained else fetched_tokenizer(self._work, result)
        meter = None if job.pretrained else self._meter("training the tokenizer", set())
        tokenizer = job.tokenizer(meter.tell if meter else lambda *_: None)
        encoder = job.encoder(tokenizer)
        plain = encoder if isinstance(encoder, Encoder) else Encoder(tokenizer)
        if isinstance(encoder, ExampleEncoder) and encoder.template:
            tokenizer.chat_template = encoder.template.text  # what the model is tuned to
        with self._work.scratch() as folder:
            tokenizer.save_pretrained(folder)
            saved = {
                f"{TOKENIZER}/{path.name}": result.take(path, f"{TOKENIZER}/{path.name}")
                for path in sorted(folder.iterdir())
            }
        # The hash is of the tokenizer alone, however examples are encoded.
        said = {"files": saved, "hash": plain.hash, "vocabulary_size": plain.vocabulary_size}
        write_json(self._work, TOKENIZER_RECORD, said)
        return tokenizer

    def _commit(self, tokenize: Tokenize, dropped: list[int]) -> None:
        job = self._job
        tokenized = self._records(Tokenize.stage)
        read = self._records(Read.stage) if self._documents.stored else tokenized
        tokenizer = read_json(self._work, TOKENIZER_RECORD)
        try:
            job.hashes.check_unchanged()
            dtype = tokenize.encoder.dtype.__name__
            manifest = manifest_of(job, tokenizer, dtype, read, tokenized, dropped)
            train = manifest["shards"]["train"]
            documents, tokens = (sum(s[name] for s in train) for name in ("documents", "tokens"))
            _check_length(documents, tokens, job.data)
        except RequestError:
            self._work.remove()  # what is put right has another key
            raise
        secured = dict(tokenizer["files"])
        for record in tokenized:
            secured.update(record["files"])
        whole = {"prepared": seal(manifest), "files": secured}
        commit(job.result, job.place, json.dumps(whole, indent=2) + "\n")

    def _records(self, stage: str) -> list[dict[str, Any]]:
        """Of all tasks, in their order.

        Raises:
            RequestError: when one is gone.
        """
        with ThreadPoolExecutor(16) as threads:  # on a store each takes its time
            numbers = [task.number for task in self._job.tasks]
            found = list(threads.map(lambda n: read_record(self._work, stage, n), numbers))
        if None in found:
            raise RequestError(f"{self._work.place}: was changed by something else; start again")
        return [record for record in found if record is not None]


def _check_trainable(data: DataSection) -> None:
    for index, source in enumerate(data.sources):
        if isinstance(source, PreferenceSource):
            raise RequestError(
                f"data.sources.{index}: preference data is not trained on yet; `rostra inspect` "
                "checks and shows it. Take this source out to train on the others."
            )


def _check_length(documents: int, tokens: int, data: DataSection) -> None:
    if data.examples:
        if not documents:
            raise RequestError(
                "data.sources: there is no example to train on. Add records, or lower "
                f"data.held_out ({data.held_out:g})."
            )
        return
    needed, of, also = 2, "a token and the one after it", ""
    if data.packed == "concatenate":
        needed = data.sequence_length + 1
        of = f"data.sequence_length {data.sequence_length} and the token after it"
        also = "data.sequence_length or "
    if tokens < needed:
        raise RequestError(
            f"the corpus has {tokens:,} training tokens, and one sample needs {needed:,} ({of}). "
            f"Add text to data.sources, or lower {also}data.held_out."
        )
