"""A run from its config to its final model: set up, resume, loop, finish."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PretrainedConfig

from rostra.build import build_engine, build_model, check_model
from rostra.checkpoint import Checkpoint, keep_newest, save_checkpoint
from rostra.config import Config, config_to_yaml
from rostra.errors import RequestError, Stopped
from rostra.events import Events, JsonLines, Listener, plain, read_events
from rostra.hardware import best_device, can_compile
from rostra.layout import Layout
from rostra.memory import explain_out_of_memory, keep_freed_memory, measure, peak_resident_bytes
from rostra.plan.foretold import Foretold
from rostra.plan.planner import Plan
from rostra.plan.results import Memory
from rostra.report import write_report
from rostra.store import RunFolder, explain_full_disk, read_manifest, sweep, write_file, write_json
from rostra.track import TensorBoard
from rostra.train.choose import check_same_data
from rostra.train.feeding import (
    make_loader,
    prepare_data,
    sources_seen,
    total_steps,
    with_lanes,
)
from rostra.train.finish import Evaluator, save_adapter_of, save_model
from rostra.train.folder import claimed, finished, resumable
from rostra.train.loop import Loop, StopSignal, every
from rostra.train.origin import Origin, recorded, start_from
from rostra.train.planned import Start, plan_run
from rostra.workers import detect, joined, on_every_rank, on_first_rank, this_rank, world_size


def train(
    config: Config,
    listeners: Sequence[Listener] = (),
    origin: Origin | None = None,
    new_learning_rate: bool = False,
) -> dict[str, Any]:
    """Train the run that `config` describes, or go on with it where it stands.

    Under a launcher (torchrun, Slurm, Kubernetes, Rostra's own) every rank calls this; rank 0
    keeps the run's folder and tells `listeners`. Returns the run's summary, which is also in
    `summary.json`. Raises RequestError for what is wrong with the request, and then leaves
    nothing of a new run behind; TrainingFailed; and Stopped when a signal stopped the run, with
    a checkpoint saved.
    """
    world, device = detect(os.environ), best_device()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        if world.size > 1:
            device = stack.enter_context(joined(world, device))
        folder = RunFolder(config.run.path)
        lines = JsonLines()
        events = Events(listeners=[*listeners, lines] if world.rank == 0 else [])

        def claim() -> bool:
            new, lock = stack.enter_context(claimed(folder))
            if lock.notice:
                events.notice(lock.notice)
            sweep(folder.path)
            return new

        new = on_first_rank(claim)
        on_every_rank(lambda: _check_shared(folder))
        stack.enter_context(explain_full_disk(folder.path))
        stack.enter_context(explain_out_of_memory())
        checkpoint = None if new else resumable(folder, config, events, new_learning_rate)
        origin = on_first_rank(lambda: recorded(folder, origin, new))
        summary = on_first_rank(lambda: None if new else finished(folder, config))
        if summary is not None:
            events.notice(f"{folder.path}: this run is finished; see its report.html")
            return summary
        return _Training(config, folder, events, checkpoint, origin, device).train(lines, stop)


class _Training:
    """The parts of one run, put together in the order in which they need each other."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        events: Events,
        checkpoint: Checkpoint | None,
        origin: Origin | None,
        device: torch.device,
    ) -> None:
        self.config, self.folder, self.events = config, folder, events
        self.device = device
        if self.device.type == "cpu":
            keep_freed_memory(_keeps_freed(config))
        check_model(config)
        self.prepared = prepare_data(config, events)
        if checkpoint is not None:
            check_same_data(checkpoint.data, self.prepared.identity, str(folder.path))
        self.loader = make_loader(config, self.prepared, checkpoint, events)
        self.steps = total_steps(config, self.loader)
        self.loader.check(self.steps)
        if checkpoint is not None:
            _check_length(checkpoint.position.step, self.steps, folder)
        in_parts = world_size() > 1 or self.device.type != "cpu"
        built = build_model(
            config, self.prepared.tokenizer, self.prepared.vocabulary_size, events, in_parts
        )
        self.counts, self.adapter = built.counts, built.adapter
        self.plan: Plan | None = None  # of rank 0
        shape = built.model.config
        # one layout, whatever the hosts
        self.layout, self.planned = on_first_rank(lambda: self._layout(shape, checkpoint))
        self.engine = build_engine(
            config, self.layout, built.model, self.device, self.steps, events, built.weights
        )
        self.loop = Loop(self.engine, self.loader, events, self.steps, config.stability.bad_steps)
        if checkpoint is not None:
            checkpoint.restore(self.engine)
            self.loop.position = checkpoint.position
        else:
            torch.manual_seed(config.run.seed + self.engine.place[0])  # of dropout
            if origin is not None:
                start_from(origin, self.engine, self.prepared.tokenizer_hash, config.optimizer.name)
        self.evaluator = Evaluator(config, self.prepared, self.engine, events)

    def _layout(
        self, shape: PretrainedConfig, checkpoint: Checkpoint | None
    ) -> tuple[Layout, Memory | None]:
        """The layout, and the memory that the plan foretells for it."""
        config = self.config
        if checkpoint is not None:  # compiled or not is the run's own: it changes rounding
            compiled = checkpoint.layout.compile
            table = config.parallel
            apart = table != "auto" and (
                table.engine == "deepspeed" or table.schedule == "zero_bubble"
            )
            if compiled and (apart or not can_compile(self.device)):
                self.events.notice(
                    "this run was compiled, which this layout or machine cannot be: going on "
                    "uncompiled, and no longer bit by bit"
                )
                compiled = False
            config = config.model_copy(
                update={"train": config.train.model_copy(update={"compile": compiled})}
            )
        tokens = self.steps * config.train.global_batch_size * config.data.sequence_length
        before = _layout_before(config, checkpoint)
        start = Start(
            config, shape, self.counts["parameters"], tokens, self.device, *_ranks(), before
        )
        layout, self.plan = plan_run(start, self.events.notice)
        chosen = None if self.plan is None else self.plan.chosen
        return layout, None if chosen is None else chosen.memory

    def train(self, lines: JsonLines, stop: StopSignal) -> dict[str, Any]:
        folder = self.folder
        on_first_rank(self._write_down)
        with contextlib.ExitStack() as closing:
            closing.callback(self.engine.close)
            closing.callback(self.loader.close)
            if this_rank() == 0:
                lines.open(folder.events)
                closing.callback(lines.close)
                if self.config.monitor.tensorboard:
                    board = TensorBoard(folder.tensorboard, self.loop.position.step)
                    closing.callback(board.close)
                    self.events.subscribe(board)
            self._subscribe()
            self.events.emit(
                "started",
                name=self.config.run.name,
                layout=self.layout.to_dict(),
                steps=self.steps,
                step=self.loop.position.step,
                device=str(self.device),
                **self.counts,
            )
            with stop.after_the_step(), explain_out_of_memory(self._expected()):
                self._run_loop(stop)
            return self._finish()

    def _expected(self) -> dict[str, int]:
        return {} if self.planned is None else self.planned.kinds

    def _write_down(self) -> None:
        folder = self.folder
        folder.summary.unlink(missing_ok=True)  # of a shorter length, before this one
        write_file(folder.config, config_to_yaml(self.config))
        chosen = {"feasible": True, "chosen": {"layout": self.layout.to_dict()}, "considered": 1}
        write_json(folder.plan, chosen if self.plan is None else self.plan.to_dict())

    def _subscribe(self) -> None:
        """What happens beside the steps, each with its period."""
        checkpoint, evaluate = self.config.checkpoint, self.config.evaluate
        period = checkpoint.every or max(1, self.steps // 10)
        if self.plan is not None and self.plan.chosen is not None:
            calibrated = self.plan.cluster.calibrated
            self.events.subscribe(Foretold(self.plan.chosen, self.events, calibrated))
        self.events.subscribe(every(period, self._save, last=self.steps))
        if evaluate.every is not None:
            self.events.subscribe(every(evaluate.every, self.evaluator.while_training))

    def _run_loop(self, stop: StopSignal) -> None:
        self._measured_steps(stop)
        self.loop.run(stop)
        if stop.agreed and self.loop.position.step < self.steps:
            path = self._save(self.loop.position.step)
            self.events.emit("stopped", step=self.loop.position.step, reason=stop.reason)
            why = stop.reason or "another rank"
            raise Stopped(
                f"stopped by {why} at step {self.loop.position.step} of {self.steps}; "
                f"saved {path}; start the same command again to go on"
            )

    def _measured_steps(self, stop: StopSignal) -> None:
        """The first steps; memory is measured over the second, when all states exist and
        compiled code has run."""
        here = self.loop.position.step
        self.loop.run(stop, until=here + 1)
        if self.loop.position.step < self.steps and not stop.agreed:
            model, optimizers = self.engine.measured()
            measured = measure(model, *optimizers, device=self.device)
            self.loop.run(stop, until=here + 2, around=measured)

    def _save(self, step: int) -> Path:
        began = self.events.clock()
        path = save_checkpoint(
            self.folder,
            self.engine,
            with_lanes(self.loop.position, self.loader),
            self.layout,
            self.config.model_dump(mode="json"),
            self.prepared.identity,
        )
        keep_newest(self.folder, self.config.checkpoint.keep)
        seconds = round(self.events.clock() - began, 3)
        self.events.emit("checkpoint", step=step, path=str(path), seconds=seconds)
        return path

    def _finish(self) -> dict[str, Any]:
        path = self.folder.model if self.adapter is None else self.folder.adapter
        manifest = on_first_rank(lambda: read_manifest(path))
        if manifest is None or manifest["step"] != self.steps:
            if self.adapter is None:
                save_model(self.folder, self.engine, self.prepared.tokenizer, self.steps)
            else:
                base = self.config.model.pretrained
                tokenizer = self.prepared.tokenizer
                save_adapter_of(self.folder, self.adapter, base, tokenizer, self.steps)
        found = self.evaluator.final(path)
        return on_first_rank(lambda: self._summarize(found))

    def _summarize(self, found: dict[str, Any]) -> dict[str, Any]:
        summary = {
            **self._seen(),
            **found,
            "planned_peak_memory_bytes": None if self.planned is None else self.planned.live,
            "resident_bytes": peak_resident_bytes(),
            "layout": self.layout.to_dict(),
            **self.counts,
        }
        summary = plain(summary)
        self.events.emit("finished", step=self.steps, summary=summary)
        write_report(self.folder.events, self.folder.path)
        write_json(self.folder.summary, summary)
        return summary

    def _seen(self) -> dict[str, Any]:
        """What the events tell of the whole run, also of its earlier processes."""
        steps: dict[int, Any] = {}
        memory: dict[str, int] = {}
        for event in read_events(self.folder.events):
            if event.kind == "step":
                steps[event["step"]] = event
            elif event.kind == "memory":
                memory = event["bytes"]
        seconds = [event["seconds"] for event in steps.values()]
        size = self.config.train.global_batch_size * self.loader.sample_tokens
        sources = sources_seen(self.config, self.loop.position, self.loader)
        return {
            "steps": self.steps,
            "tokens": self.loop.position.tokens,
            "loss": steps[self.steps]["loss"] if self.steps in steps else None,
            "tokens_per_second": size / median(seconds or [math.inf]),
            "seconds": sum(seconds),
            "peak_memory_bytes": memory.get("total"),
            "memory_bytes": memory,
            **({"sources": sources} if sources else {}),
        }


def _keeps_freed(config: Config) -> bool:
    """`memory.keep_freed`, decided: who trains an adapter has asked for memory before speed."""
    asked = config.memory.keep_freed
    return config.adapter.kind == "none" if asked == "auto" else asked


def _ranks() -> tuple[int, int]:
    """Ranks in all, and on this machine; all are here when no launcher has said otherwise."""
    world, ranks = detect(os.environ), world_size()
    return ranks, world.local_size if world.size == ranks else ranks


def _layout_before(config: Config, checkpoint: Checkpoint | None) -> Layout | None:
    """That of the checkpoint, when nothing else has been asked for since."""
    if checkpoint is None:
        return None
    now = config.model_dump(mode="json")
    then = checkpoint.config
    same = all(then.get(key) == now[key] for key in ("parallel", "memory"))
    micro = [values.get("train", {}).get("micro_batch_size") for values in (then, now)]
    return checkpoint.layout if same and micro[0] == micro[1] else None


def _check_shared(folder: RunFolder) -> None:
    """All ranks write into the run's folder."""
    if not (folder.path / "lock.json").exists():
        raise RequestError(
            f"run.output: {folder.path} is not on storage that rank {this_rank()} shares with "
            "rank 0; choose a folder that all machines of the run have"
        )


def _check_length(done: int, asked: int, folder: RunFolder) -> None:
    if done > asked:
        raise RequestError(
            f"{folder.path}: this run has done {done} steps, and {asked} are asked for. Ask for "
            "more, or start a new run with another run.output "
            f"(`--from {folder.path}@STEP` takes the weights of one of its checkpoints)."
        )
