"""Measuring this machine: what comes of it, how it is kept, and what plans take from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import log2
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rostra.cli import app
from rostra.hardware import this_cluster, usable_cores
from rostra.hardware.machine import calibration_path, load_calibration, save_calibration
from rostra.plan import calibrate as package
from rostra.plan.calibrate import Calibration, Share, calibrate, measured_efficiency
from rostra.plan.calibrate.compute import Bench
from rostra.plan.calibrate.figure import Figure
from rostra.plan.calibrate.run import link_counts, shares_of
from rostra.plan.time.kernels import Kernels
from rostra.plan.time.model import efficiency_of
from rostra.plan.time.update import update_bytes

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """One rank with one thread, small sizes only."""
    said: list[str] = []
    measured = calibrate(
        said.append, tmp_path_factory.mktemp("disk"), [(1, 1)], most=1 << 27, counts=[2]
    )
    assert said == [
        "computing: 1 rank, 1 thread each", "sending: 2 ranks", "the disk",
    ]  # fmt: skip
    return measured


@pytest.fixture
def saved(
    found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Calibration]:
    monkeypatch.setenv("ROSTRA_CACHE", str(tmp_path))
    save_calibration(found.to_dict())
    yield found


def test_every_kind_of_figure_is_there_and_plausible(found: Calibration) -> None:
    share = found.shares[0]
    for kind in ("fp32", "bf16"):
        assert 1e9 < share.flops[kind] < 1e13
        for what in ("product forward", "attention both masked", "between", "loss"):
            assert share.of(what, kind), what
    assert 1e9 < share.bandwidth < 1e12
    for figure in found.figures():
        assert figure.seconds > 0
        assert figure.spread >= 0
    larger = [f.seconds for f in share.of("between", "fp32")]
    assert larger == sorted(larger)
    assert {f.kind for f in found.links} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send",
    }  # fmt: skip
    assert "write" in {f.kind for f in found.disk}


def test_it_is_kept_and_read_again(saved: Calibration) -> None:
    values = load_calibration()
    assert values is not None
    assert Calibration.from_dict(values) == saved
    assert values == json.loads(json.dumps(saved.to_dict()))


def test_the_machine_is_described_by_it(saved: Calibration) -> None:
    cluster = this_cluster(2)
    assert cluster.calibrated
    assert cluster.device.flops["fp32"] == saved.shares[0].flops["fp32"] / 2
    assert cluster.node.link.bandwidth == saved.link(2)[0]


def test_a_plan_foretells_what_was_measured(saved: Calibration) -> None:
    cluster = this_cluster(1)
    efficiency = measured_efficiency(cluster, threads=1)
    assert efficiency is not None
    kernels, share = Kernels(cluster.device, efficiency), saved.shares[0]
    for kind in ("fp32", "bf16"):
        products = sorted(share.of("product forward", kind), key=lambda f: f.amount)
        told = kernels.product(*products[-1].sizes, kind)
        assert told == pytest.approx(products[-1].seconds, rel=0.6)
        (figure,) = [f for f in share.of("attention both causal", kind) if f.sizes[:2] == (128, 64)]
        assert kernels.attention(figure.amount, 128, 64, kind) == pytest.approx(
            figure.seconds, rel=0.6
        )
    assert {"adamw", "sgd", "int8"} <= {f.kind for f in share.of("optimizer")}
    for update in share.of("optimizer"):
        moved = update.amount * update_bytes(update.kind)
        told = moved / (cluster.device.bandwidth * efficiency.optimizers[update.kind])
        assert told == pytest.approx(update.seconds)


def test_ranks_that_share_cores_wait_for_each_other(saved: Calibration) -> None:
    def seconds(ranks: int) -> float:
        cluster = this_cluster(ranks)
        efficiency = measured_efficiency(cluster, threads=1)
        assert efficiency is not None
        return Kernels(cluster.device, efficiency).product(1024, 512, 512, "fp32")

    here = this_cluster(2)
    nodes = measured_efficiency(replace(here, nodes=8), threads=1)
    assert nodes == measured_efficiency(here, threads=1)  # cores are those of a node
    cores = usable_cores()
    assert seconds(4 * cores) == pytest.approx(4 * seconds(cores), rel=0.01)


def test_plans_of_other_machines_do_not_take_it(saved: Calibration) -> None:
    here = this_cluster(1)
    assert efficiency_of(here) == measured_efficiency(here)
    elsewhere = replace(here, calibrated=False)
    assert measured_efficiency(elsewhere) is None
    assert efficiency_of(elsewhere) != efficiency_of(here)


def share(ranks: int, threads: int) -> Share:
    return Share(ranks, threads, ())


def test_the_nearest_share_counts() -> None:
    shares = tuple(share(*x) for x in shares_of(8))
    assert [(x.ranks, x.threads) for x in shares] == [(1, 8), (1, 1), (8, 1)]
    calibration = Calibration("cpu", shares, (), (), 0.0)
    for asked, expected in {
        (1, 8): (1, 8), (1, 1): (1, 1), (8, 1): (8, 1), (16, 1): (8, 1), (2, 4): (1, 8),
    }.items():  # fmt: skip
        taken = calibration.share(*asked)
        assert (taken.ranks, taken.threads) == expected, asked
    assert shares_of(1) == [(1, 1)]
    assert link_counts(2, on_gpu=False) == [2, 4]
    assert link_counts(8, on_gpu=True) == [2, 8]
    assert link_counts(1, on_gpu=True) == []


def test_a_busy_machine_is_told_and_its_figures_are_not_taken() -> None:
    quiet = Figure("pointwise", "add", (1 << 20,), 3.0 * (1 << 20), 1e-3, 0.02)
    disturbed = Share(1, 8, (replace(quiet, spread=0.6),))
    both = Calibration("cpu", (disturbed, Share(1, 1, (quiet,))), (), (), 0.0)
    assert both.share(1, 8).threads == 1
    assert replace(both, shares=(disturbed,)).share(1, 8) == disturbed
    calibration = Calibration(
        "cpu", (Share(1, 1, (quiet, replace(quiet, spread=0.5))),), (), (), 0.0
    )
    assert [f.spread for f in calibration.noisy] == [0.5]
    assert calibration.spread == pytest.approx(0.26)


def test_processor_time_counts_what_is_done_and_not_what_is_waited_for() -> None:
    bench = Bench(CPU, threads=1, budget=0.0)
    matrix = torch.randn(256, 256)
    figure = bench.figure("product", "fp32", (256,), 2.0 * 256**3, lambda: matrix @ matrix)
    assert figure.rate == figure.amount / figure.seconds
    assert log2(figure.amount) == 25
    import time

    waiting, _ = bench.timed(lambda: time.sleep(0.05))
    assert waiting < 0.02


def test_the_verb(found: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints and keeps; measuring all takes a minute, so it has the figures of above."""
    monkeypatch.setenv("ROSTRA_CACHE", str(tmp_path))
    monkeypatch.setattr(package, "calibrate", lambda _: found, raising=False)
    ran = CliRunner().invoke(app, ["calibrate", "--json"])
    assert ran.exit_code == 0
    assert {"flops", "bandwidth", "links", "disk", "measured"} <= json.loads(ran.stdout).keys()
    assert calibration_path().is_file()
    shown = CliRunner().invoke(app, ["calibrate"])
    assert "What a rank does a second" in shown.stdout
    assert "all_reduce" in shown.stdout
