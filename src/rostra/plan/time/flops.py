"""Floating point operations of a step: what the model needs, and what the hardware does.

MFU divides the model's by the peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): 6 for
each number in a matrix product and token, and attention as if every query saw every key, 12·T·
width a layer and token. Counting the causal half of attention instead gives lower figures; the
field uses both, and `causal` chooses. HFU adds what is computed again.
"""

from __future__ import annotations

from rostra.layout import Layout
from rostra.plan.conventions import ROSTRA
from rostra.plan.job import Job
from rostra.plan.time.work import Work


def model_flops(job: Job, layout: Layout, causal: bool = False) -> float:
    """Of a step of all ranks, forward and backward; of frozen weights no gradient."""
    products, scores = _forward(job, causal)
    passes = 3 if layout.adapter == "none" else 2
    return job.global_batch * job.length * (passes * products + 3 * scores)


def hardware_flops(job: Job, layout: Layout, causal: bool = False) -> float:
    """With the forward pass that full activation checkpointing repeats (every N-th layer's under
    `every:N`, its part under `selective:attention` and `selective:mlp`)."""
    products, scores = _forward(job, causal, head=False)
    kind, _, what = layout.activation_checkpointing.partition(":")
    again = 0.0
    if kind in ("full", "every"):
        again = (products + scores) / (int(what) if kind == "every" else 1)
    elif what in ("attention", "mlp"):
        work = Work(job, ROSTRA)
        again = sum(
            count * p.operations
            for layer, count in job.sizes.layers
            for p in work.products(layer, 1)
            if p.part == what
        ) + scores * (what == "attention")
    return model_flops(job, layout, causal) + job.global_batch * job.length * again


def _forward(job: Job, causal: bool, head: bool = True) -> tuple[float, float]:
    """Operations a token of matrix products, and of attention."""
    sizes, work = job.sizes, Work(job, ROSTRA)
    products = scores = 0.0
    for layer, count in sizes.layers:
        products += count * sum(p.operations for p in work.products(layer, 1))
        pairs = work.pairs(layer, job.length) * (1 if causal else 2)
        scores += count * 4.0 * sizes.heads * sizes.head_size * pairs / job.length
    if head:
        products += 2.0 * sizes.embedding
    return products, scores


def trainable(job: Job) -> float:
    """Numbers that train: all, or an adapter's."""
    sizes, adapter = job.sizes, job.config.adapter
    if adapter.kind == "none":
        return sizes.parameters
    if adapter.kind == "lora":
        work, ends = Work(job, ROSTRA), sum(job.ends_adapted)
        return ends * adapter.rank * (sizes.hidden + sizes.vocabulary) + sum(
            count * adapter.rank * (x.inputs + x.outputs)
            for layer, count in sizes.layers
            for x in work.products(layer, 1)
            if x.adapted
        )
    if adapter.kind == "ia3":
        width = 2 * sizes.kv_heads * sizes.head_size + sizes.intermediate
        return sizes.depth * width
    width = sizes.hidden if adapter.kind == "prompt" else 0
    prefix = 2 * sizes.kv_heads * sizes.head_size * sizes.depth if adapter.kind == "prefix" else 0
    return adapter.virtual_tokens * (width + prefix)
