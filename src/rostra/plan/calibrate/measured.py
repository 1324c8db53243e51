"""What was measured of this machine, as the shares of peaks that the time model takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import log2
from statistics import geometric_mean, median

import torch
from transformers import LlamaConfig

from rostra.config import config_from_dict
from rostra.hardware import usable_cores
from rostra.hardware.cluster import Cluster, Curve
from rostra.hardware.machine import load_calibration
from rostra.plan.calibrate.figure import Figure
from rostra.plan.calibrate.values import BETWEEN, Calibration, Share
from rostra.plan.conventions import ROSTRA
from rostra.plan.efficiency import ALWAYS, Efficiency, typical
from rostra.plan.job import Layer, job_of
from rostra.plan.time.layers import LOGIT
from rostra.plan.time.update import update_bytes
from rostra.plan.time.work import Work


def measured_efficiency(cluster: Cluster, threads: int | None = None) -> Efficiency | None:
    """What kernels reach on this machine, measured by `rostra calibrate`: of one device of
    `cluster`, as shares of the peaks that it has there. None for another machine, or when
    nothing was measured. On a CPU a device is a rank with `threads` threads: when not given,
    those of this process for one rank, an equal share of the cores for several."""
    values = load_calibration() if cluster.calibrated else None
    if values is None or "measured" not in values:
        return None
    found, ranks = Calibration.from_dict(values), cluster.node.devices
    if cluster.device.kind == "gpu":
        return efficiency_of(found, found.shares[0], cluster, 1.0)
    cores = usable_cores()
    threads = threads or (torch.get_num_threads() if ranks == 1 else max(1, cores // ranks))
    share = found.share(ranks, threads)
    # more threads compute as much faster; ranks that share a core wait for each other
    speed = threads / share.threads / max(1.0, ranks * threads / cores)
    return efficiency_of(found, share, cluster, speed)


def efficiency_of(found: Calibration, share: Share, cluster: Cluster, speed: float) -> Efficiency:
    """The figures of one share, `speed` times as fast, beside the peaks of `cluster`."""
    device, on_cpu = cluster.device, cluster.device.kind == "cpu"
    peaks = {str(kind): rate / speed for kind, rate in device.flops.items()}
    kinds = [kind for kind in share.flops if kind in peaks]
    products = {
        kind: _curve((log2(f.amount), f.rate / peaks[kind]) for f in share.products(kind))
        for kind in kinds
    }
    head_size = _head_size(share)
    attention = {  # of heads of 64 numbers, which all lengths were measured with
        kind: _curve(
            (log2(f.sizes[0]), f.rate / peaks[kind] / head_size(6.0))
            for f in _attention(share, "causal", 64)
            if f.kind == kind
        )
        for kind in kinds
    }
    bandwidth, launch = _between(share, device.bandwidth / speed, ahead=not on_cpu)
    logits = median(LOGIT * f.rate for f in share.of("loss")) / (device.bandwidth / speed)
    updates = {
        f.kind: f.rate * update_bytes(f.kind) / (device.bandwidth / speed)
        for f in share.of("optimizer")
    }
    link, collectives = _links(found, cluster)
    return Efficiency(
        products=products,
        attention=attention,
        head_size=head_size,
        masked=_masked(share),
        bandwidth=bandwidth,
        loss=logits / bandwidth(log2(LOGIT * share.of("loss")[0].amount)),
        optimizer=updates["adamw"],
        optimizers=updates,
        launch=launch / speed,
        ahead=not on_cpu,
        link=link,
        host=_host(share, cluster),
        collectives=collectives,
        # collectives on a CPU take the time of the cores that compute
        contention=1.0 if on_cpu else typical(device).contention,
    )


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    """The median share at each size, sizes rounded to powers of two."""
    found: dict[int, list[float]] = defaultdict(list)
    for size, share in points:
        found[round(size)].append(share)
    return Curve(tuple((float(size), median(found[size])) for size in sorted(found)))


def _between(share: Share, bandwidth: float, ahead: bool) -> tuple[Curve, float]:
    """The share of the memory's bandwidth that pointwise operations reach, over the bytes of a
    pass through a layer; and seconds of starting one operation. Where the host runs `ahead`, few
    rows take as long as starting does, and many as long as the device."""
    work, (layer, _) = _measured_layer()
    starts: list[float] = []
    points: dict[int, list[float]] = defaultdict(list)
    for kind in dict.fromkeys(f.kind for f in share.of("between")):
        first, second, *_ = found = sorted(share.of("between", kind), key=lambda f: f.amount)
        row = (second.seconds - first.seconds) / (second.amount - first.amount)
        start = max(0.0, first.seconds - row * first.amount)
        starts.append(start / (3 * work.launches(layer, False)))
        moved = work.pointwise(layer, 1, 4, 4 if kind == "fp32" else 2, False)
        for figure in found[1:]:
            size = figure.amount * (moved.forward + moved.backward)
            seconds = figure.seconds - (0.0 if ahead else start)
            if not ahead or seconds > 2 * start:
                points[round(log2(size / 2))].append(size / seconds / bandwidth)
    curve = Curve(tuple((float(at), geometric_mean(points[at])) for at in sorted(points)))
    return curve if points else ALWAYS, median(starts)


def _host(share: Share, cluster: Cluster) -> float:
    """Of the link to the host, by copies up and down; all of it on a CPU, which has none."""
    rates = [f.rate for f in share.of("host")]
    return median(rates) / cluster.node.host_link.bandwidth if rates else 1.0


def _measured_layer() -> tuple[Work, tuple[Layer, int]]:
    """The layer that `between` is measured on, as the time model sees it."""
    config = config_from_dict(
        {
            "model": {"preset": "tiny"},
            "data": {"sources": [{"type": "python_docs"}], "tokenizer": {"vocabulary": 300}},
            "train": {"steps": 1},
        }
    )
    job = job_of(config, LlamaConfig(vocab_size=300, **BETWEEN))
    return Work(job, ROSTRA), job.sizes.layers[0]


def _head_size(share: Share) -> Curve:
    """Of attention with heads of 64 numbers beside those of 128."""
    wide = {(f.kind, f.sizes[0]): f.rate for f in _attention(share, "causal", 128)}
    narrow = [(f, wide.get((f.kind, f.sizes[0]))) for f in _attention(share, "causal", 64)]
    return Curve(((6.0, median(f.rate / rate for f, rate in narrow if rate)), (7.0, 1.0)))


def _masked(share: Share) -> Curve:
    """Of attention with a mask beside that without, over positions."""
    plain = {(f.kind, f.sizes[0]): f.rate for f in _attention(share, "causal", 64)}
    found = _attention(share, "masked", 64)
    return _curve((log2(f.sizes[0]), f.rate / plain[f.kind, f.sizes[0]]) for f in found)


def _attention(share: Share, kind: str, size: int) -> list[Figure]:
    return [f for f in share.of(f"attention both {kind}") if f.sizes[1] == size]


def _links(found: Calibration, cluster: Cluster) -> tuple[float, dict[str, float]]:
    """The share of the link's bandwidth that an all-reduce reaches among so many ranks, and what
    the other collectives reach of that."""
    if cluster.node.devices == 1 or not found.links:
        return 1.0, {}
    counts = {f.sizes[0] for f in found.links}
    nearest = min(counts, key=lambda count: abs(log2(count / cluster.node.devices)))
    largest = max(f.sizes[1] for f in found.links)
    rates = {f.kind: f.rate for f in found.links if f.sizes == (nearest, largest)}
    base = rates["all_reduce"]
    shares = {kind: rate / base for kind, rate in rates.items() if kind != "all_reduce"}
    return base / cluster.node.link.bandwidth, shares
