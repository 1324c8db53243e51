"""The manifest of prepared data, from the records of its tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rostra.data.audit import Audit
from rostra.data.clean import Rejections
from rostra.data.job import Job
from rostra.data.prepared import FORMAT
from rostra.data.shards import SPLITS, variant_split
from rostra.data.sources import BadRecords

Record = dict[str, Any]
COUNTED = ("documents", "tokens", "bytes")


def manifest_of(
    job: Job,
    tokenizer: Record,
    dtype: str,
    read: list[Record],
    tokenized: list[Record],
    dropped: list[int],
) -> Record:
    """What is said of all tasks together, in their order, so that it is the same whatever
    engine did them.

    Args:
        tokenizer: what is on record of it.
        read: records of the stage that read the documents, a task each.
        tokenized: records of the stage that wrote the shards; the same where one did both.
        dropped: duplicates of each task.

    Raises:
        RequestError: when the label audit finds that no end is ever trained.
    """
    shards: dict[str, list[Record]] = {
        split: [s for r in tokenized for s in r["shards"][split]] for split in SPLITS
    }
    counts = {
        split: {name: sum(shard[name] for shard in found) for name in COUNTED}
        for split, found in shards.items()
    }
    for name in map(variant_split, range(1, job.data.augment.variants)):
        # What has no prompts to vary is the same in all variants.
        shards[name] = [s for r in tokenized for s in r["shards"].get(name, r["shards"]["train"])]
    if job.data.examples:
        counts = {
            split: {"examples": found.pop("documents"), **found} for split, found in counts.items()
        }
    return {
        "format": FORMAT,
        "key": job.key,
        "counts": counts,
        "per_source": _per_source(job, read, tokenized, dropped),
        "skipped": _skipped(job, [record["skipped"] for record in read]),
        "rejected": _rejections(read).to_json()["reasons"],
        "tokenizer": {
            "hash": tokenizer["hash"],
            "vocabulary_size": tokenizer["vocabulary_size"],
            "pretrained": job.pretrained[0] if job.pretrained else None,
        },
        "dtype": dtype,
        "sources": [source.model_dump() for source in job.data.sources],
        "shards": shards,
        **_audit(tokenized),
    }


def _per_source(
    job: Job, read: list[Record], tokenized: list[Record], dropped: list[int]
) -> list[Record]:
    """A row for each source: what was kept of it, and what was not and why."""
    names = {task.reader.index: task.reader.name for task in job.tasks}
    rows = []
    for index, source in enumerate(job.data.sources):
        mine = [task.number for task in job.tasks if task.reader.index == index]
        shards = [s for n in mine for split in SPLITS for s in tokenized[n]["shards"][split]]
        rows.append(
            {
                "source": names.get(index, f"{source.type}:{index}"),
                **{name: sum(shard[name] for shard in shards) for name in COUNTED},
                "rejected": _rejections(read[n] for n in mine).total,
                "duplicates": sum(dropped[n] for n in mine) if dropped else 0,
                "shards": len(shards),
            }
        )
    return rows


def _rejections(records: Iterable[Record]) -> Rejections:
    return sum((Rejections.from_json(r["rejections"]) for r in records), Rejections())


def _skipped(job: Job, records: list[Record]) -> Record:
    """Bad data of the listing and then of each task, as many examples as one list keeps."""
    whole = BadRecords(job.data.on_bad_record, lambda _: None)
    whole.counts.update(job.bad.counts)
    whole.examples.extend(job.bad.examples)
    for record in records:
        whole.counts.update(record["counts"])
        whole.examples.extend(record["examples"][: whole.kept - len(whole.examples)])
    return {"counts": dict(whole.counts), "examples": whole.examples}


def _audit(tokenized: list[Record]) -> Record:
    if not any("audits" in record for record in tokenized):
        return {}
    found = {split: _merged(r["audits"][split] for r in tokenized) for split in SPLITS}
    if found["train"].examples:  # else there is more to say than that
        found["train"].check()
    counts = {split: audit.counts() for split, audit in found.items()}
    return {"audit": {**counts, "notices": found["train"].notices()}}


def _merged(audits: Iterable[Record]) -> Audit:
    whole = Audit()
    for audit in audits:
        whole.lengths.update({int(size): count for size, count in audit["lengths"].items()})
        whole.suspects = (whole.suspects + audit["suspects"])[:3]
        for name in ("examples", "tokens", "targets", "ends", "endless", "lookalikes"):
            setattr(whole, name, getattr(whole, name) + audit[name])
    return whole
