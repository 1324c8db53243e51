"""The command line: one verb, one thin function. Heavy imports happen inside verbs."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rostra.errors import RequestError, RostraError

app = typer.Typer(
    help="Train language models on whatever hardware there is, from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(help="the run's YAML file", metavar="CONFIG")]
RunOrModel = Annotated[str, typer.Argument(help="a run's folder", metavar="RUN")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="section.key=value", help="change a value")
]
AllowCode = Annotated[
    list[str],
    typer.Option("--allow-code", metavar="FILE", help="your Python file that CONFIG may run"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]


Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="ranks on this machine; on a CPU they share its cores"),
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = [],  # noqa: B006  typer reads the default, nothing changes it
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN[@STEP]", help="start from another run's weights"),
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="with --from: its optimizer's state too")
    ] = False,
    new_learning_rate: Annotated[
        bool,
        typer.Option("--new-learning-rate", help="resume with another learning rate or schedule"),
    ] = False,
    workers: Workers = None,
    allow_code: AllowCode = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Train a model, or go on with a run where it stands."""
    from rostra.api import Run
    from rostra.track import Progress, show_summary

    run = Run.open(config, overrides, allow_code)
    if (count := run.ranks_to_start(workers)) > 1:
        from rostra.workers import start

        sys.exit(start(sys.argv[1:], count))
    if run.note:
        _say(run.note)
    progress = Progress(sys.stderr, run.config.monitor.log_every)
    try:
        summary = run.train([progress], origin, with_optimizer, new_learning_rate)
    finally:
        progress.close()
    _answer(summary, as_json, lambda: show_summary(summary, run.path))


@app.command()
def prepare(
    config: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    format: Annotated[
        str | None,
        typer.Option("--as", metavar="FORMAT", help="write too: webdataset, parquet or megatron"),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="PATH", help="with --as: a new folder, or a URL")
    ] = None,
    allow_code: AllowCode = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Read the documents and write shards of tokens; at once when they are there already."""
    if (format is None) != (output is None):
        raise RequestError("prepare: --as and --output go together")
    from rostra.api import Run
    from rostra.data.display import Display, show_prepared

    run = Run.open(config, overrides, allow_code)
    with Display(sys.stderr) as display:
        prepared = run.prepare(display.say, display)
    found = {
        "path": str(prepared.folder),
        **prepared.manifest["counts"],
        "sources": prepared.manifest["per_source"],
        "rejected": prepared.manifest["rejected"],
        "skipped": prepared.skipped,
    }
    if format and output:
        from rostra.data.formats import write_as

        found["written"] = write_as(prepared, format, output)
    _answer(found, as_json, lambda: show_prepared(prepared))


@app.command()
def inspect(
    config: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    examples: Annotated[int, typer.Option(min=0, help="how many are shown token by token")] = 3,
    documents: Annotated[
        int, typer.Option(min=1, help="how many are read to show what the filters decide")
    ] = 300,
    full: Annotated[
        bool, typer.Option("--full", help="prepare also large data, for its counts and packing")
    ] = False,
    allow_code: AllowCode = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show what a config trains on: what filters decide, lengths, tokens, and packing."""
    from rostra.api import Run

    found = Run.open(config, overrides, allow_code).inspect(examples, _say, documents, full)
    _answer(found.to_dict(), as_json, found.show)


@app.command()
def generate(
    run: Annotated[str, typer.Argument(help="a run's folder, a model's, or a hub id")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="the text to go on from")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="tokens to write")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="only the k likeliest; 0 for all")] = 50,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="only the likeliest share")] = 1.0,
    seed: Annotated[int, typer.Option(help="the same seed writes the same text")] = 0,
    as_json: Json = False,
) -> None:
    """Write text with a trained model."""
    from rostra.generate import Sampling, generate_text, load_for_generation

    model, tokenizer = load_for_generation(run, _say)
    sampling = Sampling(tokens, temperature, top_k, top_p, seed)
    text = generate_text(model, tokenizer, prompt, sampling)
    _answer({"prompt": prompt, "text": text}, as_json, lambda: print(prompt + text))


@app.command()
def evaluate(
    run: RunOrModel,
    overrides: Overrides = [],  # noqa: B006
    allow_code: AllowCode = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Measure a run's final model on the held-out documents."""
    from rostra.api import Run
    from rostra.track import Progress

    opened = Run.open(Path(run), overrides, allow_code)
    progress = Progress(sys.stderr, opened.config.monitor.log_every)
    try:
        found = opened.evaluate([progress])
    finally:
        progress.close()
    _answer(found, as_json, lambda: _table(found))


@app.command()
def merge(
    run: Annotated[str | None, typer.Argument(help="a run's folder", metavar="[RUN]")] = None,
    adapters: Annotated[
        list[str],
        typer.Option(
            "--adapter",
            metavar="PATH[:WEIGHT]",
            help="an adapter's folder, a run's or a hub id, beside the run's own; the weight is 1",
        ),
    ] = [],  # noqa: B006
    base: Annotated[
        str | None, typer.Option(help="without a run: the model's folder or hub id")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="the model's new folder; RUN/model when not given")
    ] = None,
    dequantize: Annotated[
        bool | None,
        typer.Option(
            help="a run on a quantised base: merge into the weights that it saw (the default), "
            "or into those on disk"
        ),
    ] = None,
    allow_code: AllowCode = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Write base and adapters as one model, after comparing its logits with theirs."""
    if run is not None and base is None:
        from rostra.api import Run

        found = Run.open(run, allow_code=allow_code).merge(output, adapters, dequantize, _say)
    elif run is None and dequantize is None:
        from rostra.export import merge_folders

        found = merge_folders(base, adapters, output, _say)
    else:
        raise RequestError("merge: --base is for a merge without a run, --dequantize for a run's")
    shown = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in found.items()}
    _answer(found, as_json, lambda: _table(shown))


@app.command()
def plan(
    config: Annotated[
        Path | None, typer.Argument(help="the run's YAML file", metavar="[CONFIG]")
    ] = None,
    overrides: Overrides = [],  # noqa: B006
    model: Annotated[
        str | None, typer.Option(help="a well-known model, a folder or a config.json, as it is")
    ] = None,
    method: Annotated[str | None, typer.Option(help="full, lora or qlora")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="8xH100, 2xL4, 4x8xA100-80GB, a YAML file; this machine if not given"),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0.0, help="of a device for an hour, for the catalogue's")
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens of a sample")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="samples of a step")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="of the whole run")] = None,
    allow: Annotated[
        list[str],
        typer.Option(
            metavar="LIST",
            help="what may be used beside: lora, qlora, int8-states, int4-states, fp8-states, "
            "paged-int8-states, bf16-pure, fp16, fp8, bf16-reduction, in-backward, compile",
        ),
    ] = [],  # noqa: B006
    goal: Annotated[str, typer.Option(help="fastest, cheapest or fewest (devices)")] = "fastest",
    html: Annotated[Path | None, typer.Option(help="write the plan as a page, too")] = None,
    trace: Annotated[
        bool,
        typer.Option(help="check the memory of the choice by a run of its engine without memory"),
    ] = True,
    as_json: Json = False,
) -> None:
    """Tell what fits, how fast and at what price, on any hardware, before anything is bought."""
    from rostra.api import plan as make
    from rostra.plan.show import show

    if goal not in ("fastest", "cheapest", "fewest"):
        raise RequestError(f"--goal {goal}: give fastest, cheapest or fewest")
    found = make(
        config,
        overrides,
        model=model,
        method=method,  # type: ignore[arg-type]  # looked at where it is used
        hardware=hardware,
        price=price,
        length=length,
        global_batch=global_batch,
        tokens=tokens,
        allow=allow,
        goal=goal,  # type: ignore[arg-type]
        trace=trace,
        notice=_say,
    )
    if html is not None:
        from rostra.plan.page import write_page

        write_page(found, html)
    _answer(found.to_dict(), as_json, lambda: show(found))
    found.check()


@app.command()
def verify(
    config: ConfigFile,
    overrides: Overrides = [],  # noqa: B006
    layouts: Annotated[
        list[str],
        typer.Option(
            "--layouts",
            metavar="NAMES",
            help="names (ddp,full_shard), one layout (shard=2,tensor=2), or a YAML or JSON file; "
            "the config's own and the common ones when not given",
        ),
    ] = [],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps under each layout")] = 10,
    precision: Annotated[
        str, typer.Option(help="fp32, bf16, bf16_pure, fp16, fp8, or config for its own")
    ] = "fp32",
    workers: Annotated[int | None, typer.Option(min=1, help="ranks at the most; 4")] = None,
    allow_code: AllowCode = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Show that layouts compute what one process does, on a small model like the config's."""
    from rostra.api import Run
    from rostra.verify import show

    run = Run.open(config, overrides, allow_code)
    found = run.verify(layouts, steps, workers, precision, _say)
    _answer(found.to_dict(), as_json, lambda: show(found))
    found.check()


@app.command()
def migrate(
    file: Annotated[Path, typer.Argument(help="an Axolotl file", metavar="FILE")],
    output: Annotated[
        Path | None, typer.Option(help="the new config; standard output when not given")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="ranks that Axolotl's batch is for")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Turn an Axolotl file into a config, and tell what becomes of each key."""
    from rostra.api import migrate
    from rostra.config.axolotl import show

    found = migrate(file, output, workers)
    _answer(found.to_dict(), as_json, lambda: show(found, output is None))
    found.check()


@app.command()
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="the same: it is JSON")] = False,
) -> None:
    """Print the JSON schema of the config file, for editors that check and complete it."""
    from rostra.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what this machine has, what is missing for which feature, and how to get it."""
    from rostra.hardware import doctor_report, show_doctor

    report = doctor_report()
    _answer(report, as_json, lambda: show_doctor(report))


@app.command()
def calibrate(as_json: Json = False) -> None:
    """Measure this machine in about a minute, so that plans for it go by what it really does."""
    from rostra.hardware.machine import save_calibration
    from rostra.plan.calibrate import calibrate, show_calibration

    found = calibrate(_say)
    save_calibration(found.to_dict())
    _answer(found.to_dict(), as_json, lambda: show_calibration(found))


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _answer(value: Any, as_json: bool, show: Callable[[], None]) -> None:
    from rostra.workers import detect

    if detect(os.environ).rank > 0:  # rank 0 answers for all
        return
    if as_json:
        print(json.dumps(value, indent=2))
    else:
        show()


def _table(values: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for key, value in values.items():
        table.add_row(key, f"{value:,.4f}" if isinstance(value, float) else str(value))
    Console().print(table)


def _quiet_libraries() -> None:
    """What libraries warn of while they are imported is nothing that a user of ours can change:
    extensions for other devices, renamed parts of each other."""
    for name in ("torchao", "torch.utils._pytree", "bitsandbytes", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """The `rostra` command: errors that were foreseen are one message and an exit code."""
    _quiet_libraries()
    try:
        app()
    except RostraError as error:
        _say(f"rostra: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
