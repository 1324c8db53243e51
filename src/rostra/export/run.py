"""What `rostra merge` is asked for: a run, or a base and adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rostra.config import Config
from rostra.errors import RequestError
from rostra.export.agreement import Measure
from rostra.export.bases import Notice
from rostra.export.merge import merge
from rostra.export.updates import Weighted
from rostra.store import Lock, RunFolder


def merge_run(
    config: Config,
    output: Path | None = None,
    adapters: Sequence[str] = (),
    dequantize: bool | None = None,
    measure: Measure | None = None,
    notice: Notice = print,
) -> dict[str, Any]:
    """The adapter of a finished run, those it kept frozen, and `adapters` ("PATH" or
    "PATH:WEIGHT") merged into its base: see `merge`.

    One of the run's own that is named in `adapters` counts as much as it says there. `output`
    is the run's `model/` by default. `dequantize` is whether to merge into the quantised base
    that the run saw, where it saw one; it is the default.
    """
    folder = RunFolder(config.run.path)
    own = folder.path / "adapter"
    if not own.is_dir() or config.model.pretrained is None:
        raise RequestError(
            f"{folder.path}: has no adapter/ to merge: a finished run has one if its config has "
            "`adapter`, and its whole model in model/ otherwise"
        )
    asked = [Weighted.parse(text) for text in adapters]
    named = {Path(one.folder).resolve() for one in asked}
    run = [*map(Weighted, config.adapter.frozen), Weighted(str(own))]
    kept = [one for one in run if Path(one.folder).resolve() not in named]
    beside = (own / "tokenizer.json").exists()
    with Lock(folder.path):
        return merge(
            config.model.pretrained,
            [*kept, *asked],
            output or folder.model,
            quantization=config.quantization,
            dequantize=dequantize is not False,
            tokenizer=str(own) if beside else config.data.tokenizer.pretrained,
            measure=measure,
            notice=notice,
        )


def merge_folders(
    base: str | None, adapters: Sequence[str], output: Path | None, notice: Notice = print
) -> dict[str, Any]:
    """Adapters merged into a base, without a run: see `merge`."""
    if base is None or not adapters or output is None:
        raise RequestError(
            "merge: give a run's folder, or --base, --adapter and --output without a run"
        )
    return merge(base, [Weighted.parse(text) for text in adapters], output, notice=notice)
