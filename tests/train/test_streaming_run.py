"""A run straight from raw sources: by one rank or two, stopped and gone on with, the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import assert_same_run, losses, of_kind, write

from ranks import Ranks
from rostra import Run
from rostra.checkpoint import open_checkpoint
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.store import RunFolder
from support import tiny_run

LANES, STEPS, STOP = 5, 8, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("raw")
    for name in "ab":
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(60):
                text = f"{name}{number} " + " ".join(str(number * k % 37) for k in range(40))
                file.write(json.dumps({"text": text}) + "\n")
    return {"type": "jsonl", "path": str(folder)}


def config_of(source: dict[str, Any], folder: Path, steps: int, **data: Any) -> Path:
    values = tiny_run(
        folder,
        folder,
        data={"sources": [source], "streaming": True, **data},
        train={"steps": steps, "global_batch_size": LANES},
        schedule={"name": "constant", "warmup": 0},
        checkpoint={"every": STOP, "keep": 9},
    )
    return write(folder.with_suffix(".yaml"), values)


def trained(config: str) -> dict[str, Any]:
    return Run.open(config).train()


def test_two_ranks_and_one_that_goes_on_train_what_one_rank_does(
    source: dict[str, Any], tmp_path: Path, ranks: Ranks
) -> None:
    alone, two, on = (tmp_path / name for name in ("alone", "two", "on"))
    summary = trained(str(config_of(source, alone, STEPS)))
    assert summary["steps"] == STEPS
    assert summary["bits_per_byte"] > 0  # documents were held out
    # Two ranks up to a step, one from there on; and the other way round.
    ranks.run(2, trained, str(config_of(source, two, STOP)))
    assert len(open_checkpoint(RunFolder(two).checkpoint(STOP)).position.lanes or []) == LANES
    trained(str(config_of(source, two, STEPS)))
    assert losses(two) == pytest.approx(losses(alone), abs=1e-5)
    trained(str(config_of(source, on, STOP)))
    trained(str(config_of(source, on, STOP + 2)))
    ranks.run(2, trained, str(config_of(source, on, STEPS)))
    assert losses(on) == pytest.approx(losses(alone), abs=1e-5)
    sizes = [Layout.from_dict(e["layout"]).world_size for e in of_kind(on, "started")]
    assert sizes == [1, 1, 2]


def test_one_rank_that_goes_on_trains_the_same_bit_by_bit(
    source: dict[str, Any], tmp_path: Path
) -> None:
    """From two sources by weight, which may change; but not what there is to read."""
    more = {**source, "name": "again", "weight": 1}
    both = {"sources": [{**source, "weight": 3}, more]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    seen = trained(str(config_of(source, whole, STEPS, **both)))["sources"]
    assert sum(found["samples"] for found in seen) == LANES * STEPS
    assert seen[0]["samples"] > seen[1]["samples"] > 0
    trained(str(config_of(source, parts, STOP, **both)))
    trained(str(config_of(source, parts, STEPS, **both)))
    assert_same_run(whole, parts)
    both["sources"][1] = {**more, "weight": 0}
    trained(str(config_of(source, parts, STEPS + 4, **both)))
    after = of_kind(parts, "step")[-1]["source_samples"]
    assert after == [seen[0]["samples"] + 4 * LANES, seen[1]["samples"]]
    with Path(source["path"], "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(RequestError, match="documents have changed"):
        trained(str(config_of(source, parts, STEPS + 5, **both)))
