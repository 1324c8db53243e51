"""Rostra from Python: the verbs of the command line as methods of a run.

from rostra import Run
run = Run.open("examples/quickstart.yaml", ["train.steps=100"])
summary = run.train()
print(summary["bits_per_byte"], run.generate("def main"))
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rostra.config import Config, Translation, config_from_dict, read_axolotl, read_config
from rostra.errors import RequestError
from rostra.store import RunFolder

if TYPE_CHECKING:  # imported inside the verbs: a mistake in a config is answered at once
    from rostra.data import Inspection, Prepared
    from rostra.data.progress import Progress
    from rostra.events import Listener
    from rostra.generate import Sampling
    from rostra.plan.explain import Explanation
    from rostra.verify import Verification


@dataclass(frozen=True)
class Run:
    """One run: its config, and the folder that holds or will hold it.

    `note` tells what became of the keys of an Axolotl file, when the config was one.
    """

    config: Config
    note: str = ""

    @classmethod
    def open(
        cls,
        source: str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        allow_code: Sequence[str | Path] = (),
        ranks: int | None = None,
    ) -> Run:
        """From a config file, a run's folder, or a table; `overrides` are "section.key=value",
        `allow_code` the user's own Python files that the config may run.
        An Axolotl file is for so many `ranks`, or as many as were started.

        Raises RequestError when it does not describe a run.
        """
        from rostra.workers import detect

        notes: list[str] = []
        if isinstance(source, Mapping):
            config = config_from_dict(source, overrides)
        elif (path := Path(source)).is_dir():
            if not RunFolder(path).config.exists():
                raise RequestError(f"{path}: is no run: it holds no config.yaml")
            output = f"run.output={json.dumps(str(path))}"
            config = read_config(RunFolder(path).config, [*overrides, output])
        else:
            started = ranks or detect(os.environ).size
            config = read_config(path, overrides, started, notes.append)
        config.data.clean.check_code(allow_code)
        return cls(config, "\n".join(notes))

    @property
    def path(self) -> Path:
        return self.config.run.path

    def ranks_to_start(self, asked: int | None = None) -> int:
        """Ranks to start on this machine: `asked`, or what the config's layout implies; 1 when
        this process is one of many already.

        Raises RequestError when the layout is for more than this machine has, and when other
        ranks were started than are asked for.
        """
        from rostra.train.choose import ranks_wanted, room_for_ranks
        from rostra.workers import detect

        world = detect(os.environ)
        if asked and world.size not in (1, asked):
            raise RequestError(
                f"--workers {asked}: {world.launcher} has started {world.size} ranks; leave it out"
            )
        if world.size > 1 or world.launcher == "rostra":
            return 1
        wanted = asked or ranks_wanted(self.config)
        if asked is None and wanted > (room := room_for_ranks()):
            raise RequestError(
                f"parallel: these axes make up {wanted} ranks, and this machine has room for "
                f"{room}; start it on all machines (torchrun, srun), or try it here with "
                f"--workers {wanted}"
            )
        return wanted

    def prepare(
        self,
        notice: Callable[[str], None] = print,
        progress: Callable[[Progress], None] | None = None,
    ) -> Prepared:
        """Documents into shards of tokens; at once when they are there already."""
        from rostra.data import prepare

        return prepare(self.config.data, self.config.model.pretrained, notice, progress)

    def inspect(
        self,
        examples: int = 3,
        notice: Callable[[str], None] = print,
        documents: int = 300,
        full: bool = False,
    ) -> Inspection:
        """What is trained on: what filters decide of so many documents, lengths, packing, and
        so many examples token by token. See `rostra.data.inspect_data`."""
        from rostra.data import inspect_data

        config = self.config
        return inspect_data(
            config.data,
            config.model.pretrained,
            config.run.seed,
            config.train.global_batch_size,
            examples,
            notice,
            documents,
            full,
        )

    def plan(self, hardware: str | None = None, **asked: Any) -> Explanation:
        """What fits, how fast, at what price, on `hardware` (`8xH100`, a YAML file) or here;
        see `rostra.api.plan` for the rest."""
        return plan(self.config, hardware=hardware, **asked)

    def train(
        self,
        listeners: Sequence[Listener] = (),
        origin: str | None = None,
        with_optimizer: bool = False,
        new_learning_rate: bool = False,
    ) -> dict[str, Any]:
        """Train, or go on where the run stands; the summary. See `rostra.train.train`."""
        from rostra.train import Origin, train

        start = None if origin is None else Origin.parse(origin, with_optimizer)
        return train(self.config, listeners, start, new_learning_rate)

    def verify(
        self,
        layouts: Sequence[str] = (),
        steps: int = 10,
        workers: int | None = None,
        precision: str = "fp32",
        notice: Callable[[str], None] = print,
    ) -> Verification:
        """Whether layouts compute what one process does; see `rostra.verify.verify`. `layouts`
        are as on the command line; without, the run's own and the common ones."""
        from rostra.verify import parse, verify

        asked = parse(layouts) if layouts else None
        return verify(
            self.config, asked, steps=steps, workers=workers, precision=precision, notice=notice
        )

    def evaluate(self, listeners: Sequence[Listener] = ()) -> dict[str, Any]:
        """The final model, or its base with the adapter, on all held-out documents."""
        from rostra.build import build_engine, build_model
        from rostra.build.tuned import Built
        from rostra.checkpoint import newest_checkpoint
        from rostra.config.schema import MemorySection
        from rostra.config.tuning import AdapterTable, QuantizationTable
        from rostra.events import Events
        from rostra.hardware import best_device
        from rostra.models import load_model
        from rostra.train.choose import check_same_data, choose_layout
        from rostra.train.finish import Evaluator

        folder = RunFolder(self.path)
        final = folder.model if folder.model.is_dir() else folder.adapter
        if not final.is_dir():
            raise RequestError(f"{self.path}: this run has no final model yet; let it finish")
        events, device = Events(listeners=list(listeners)), best_device()
        prepared = self.prepare(events.notice)
        if (trained_on := newest_checkpoint(folder)[0]) is not None:
            check_same_data(trained_on.data, prepared.identity, str(self.path))
        alone: dict[str, Any] = {"parallel": "auto", "memory": MemorySection()}
        if final == folder.adapter:
            saved = {"pretrained": str(folder.adapter)}
            alone["adapter"] = self.config.adapter.model_copy(update=saved)
        elif self.config.adapter.kind != "none":  # it was merged
            alone |= {"adapter": AdapterTable(), "quantization": QuantizationTable()}
        config = self.config.model_copy(update=alone)
        built = (
            build_model(config, prepared.tokenizer, prepared.vocabulary_size, events, False)
            if final == folder.adapter
            else Built(load_model(str(folder.model)))
        )
        layout = choose_layout(config, device, 0, 0)
        engine = build_engine(config, layout, built.model, device, 1, events, built.weights)
        return Evaluator(config, prepared, engine, events).final(final)

    def merge(
        self,
        output: str | Path | None = None,
        adapters: Sequence[str] = (),
        dequantize: bool | None = None,
        notice: Callable[[str], None] = print,
    ) -> dict[str, Any]:
        """The adapter of a finished run and its base as one model in `output`, by default the
        run's `model/`; `adapters` as on the command line. See `rostra.export.merge_run`."""
        from rostra.export import merge_run

        path = None if output is None else Path(output)
        measure = self._perplexity(notice) if self.config.data.held_out else None
        return merge_run(self.config, path, adapters, dequantize, measure, notice)

    def _perplexity(self, notice: Callable[[str], None]) -> Callable[[Any], float] | None:
        """Of a whole model on the held-out examples, where there are any."""
        from rostra.adapt import virtual_tokens
        from rostra.data import held_out_samples
        from rostra.evaluate import evaluate_examples, plain_forward

        data = self.config.data
        if not data.examples:
            return None
        prepared = self.prepare(notice)
        samples = held_out_samples(prepared, data, False, virtual_tokens(self.config.adapter))
        if not len(samples):
            return None

        def measure(model: Any) -> float:
            return evaluate_examples(
                plain_forward(model), samples, prepared.tokenizer, 4
            ).perplexity

        return measure

    def generate(
        self,
        prompt: str,
        sampling: Sampling | None = None,
        notice: Callable[[str], None] = print,
    ) -> str:
        """The text that the final model writes after `prompt`."""
        from rostra.generate import Sampling, generate_text, load_for_generation

        model, tokenizer = load_for_generation(str(self.path), notice)
        return generate_text(model, tokenizer, prompt, sampling or Sampling())


def plan(
    config: Config | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    method: Literal["full", "lora", "qlora"] | None = None,
    hardware: str | None = None,
    price: float | None = None,
    length: int | None = None,
    global_batch: int | None = None,
    tokens: int | None = None,
    allow: Sequence[str] = (),
    goal: Literal["fastest", "cheapest", "fewest"] = "fastest",
    trace: bool = True,
    notice: Callable[[str], None] = print,
) -> Explanation:
    """What fits, how fast, at what price: the plan of a config or its file, or of a model by
    its name; with `overrides`, of a file or a model.

    `method`, `length`, `global_batch` and `tokens` change what the config says, `price` what an
    hour of a device costs; `allow` names techniques that may be used beside, such as `qlora` or
    `int8-states`. `trace` checks the memory of the choice by running its engine without memory.
    Raises RequestError for models, hardware and techniques that nobody knows. Nothing fitting
    is an answer: `check()` of it raises NoLayoutFits.
    """
    from rostra.hardware import read_cluster, this_cluster
    from rostra.plan.explain import explain
    from rostra.plan.planner import make_plan
    from rostra.plan.request import Request
    from rostra.plan.space import Limits
    from rostra.train.choose import POSITIONS

    cluster = (
        read_cluster(hardware, price) if hardware else this_cluster(price=price, notice=notice)
    )
    if config is not None and not isinstance(config, Config):
        config = Run.open(config, overrides, ranks=cluster.devices).config
    asked = Request(model, method, length, global_batch, tokens, tuple(overrides))
    job, notes = asked.job(config, cluster.devices)
    limits = Limits(positions=POSITIONS) if cluster.device.kind == "cpu" else None
    return explain(make_plan(job, cluster, allow, goal, limits, "always" if trace else None, notes))


def migrate(source: str | Path, output: str | Path | None = None, ranks: int = 1) -> Translation:
    """An Axolotl file as a config for so many ranks, written to `output` where that is given and
    no key was refused; `check()` of the answer raises for those that were.

    Raises RequestError when it is no such file, when the config is none that Rostra can run, and
    when `output` is there already.
    """
    from rostra.config.axolotl import to_yaml

    found = read_axolotl(source, ranks)
    if output is not None and not found.refused:
        try:
            with Path(output).open("x", encoding="utf-8") as file:
                file.write(to_yaml(found))
        except OSError as error:
            raise RequestError(f"--output {output}: cannot be written: {error}") from error
    return found
