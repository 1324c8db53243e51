"""How many micro batches a rank of a pipeline keeps at once."""

from __future__ import annotations

from rostra.layout import Layout


def in_flight(layout: Layout, rank: int) -> float:
    """Micro batches whose activations pipeline rank `rank` keeps at its peak, each of all its
    stages; part of one where only some of its stages have it.

    GPipe keeps all (Huang et al. 2019, arXiv:1811.06965); 1F1B what it has begun before the
    first comes back, as many as there are stages to the end (Narayanan et al. 2019,
    arXiv:1806.03377); interleaved stages begin a round of each stage but the last, and two more
    for each rank behind (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), and zero bubble,
    which leaves gradients of weights for later, one (Qi et al. 2024, arXiv:2401.10241). As
    torch.distributed.pipelining has them.
    """
    ranks, stages, given = layout.pipeline, layout.stages, layout.accumulation
    if ranks == 1:
        return 1.0
    schedule = layout.pipeline_schedule
    if schedule == "gpipe":
        return float(given)
    if schedule == "1f1b":
        return float(min(given, ranks - rank))
    each_round = given // max(1, given // ranks)
    behind = ranks - 1 - rank
    begun = (stages - 1) * each_round + (2 if schedule == "interleaved_1f1b" else 1) * behind
    return min(given * stages, begun + 1 + late(layout, rank)) / stages


def late(layout: Layout, rank: int) -> float:
    """Micro batches that wait between the two parts of zero bubble's backward pass: those whose
    gradients of weights are left for when the pipeline would wait."""
    if not layout.splits_backward:
        return 0.0
    return float(min(rank, layout.accumulation))


def waiting(layout: Layout, rank: int) -> float:
    """Those, and the one that is in the first part, as a share of the rank's stages."""
    alone = rank == 0 and layout.stages == 1  # the model's first stage goes back in one
    if not layout.splits_backward or alone:
        return 0.0
    return (late(layout, rank) + 1) / layout.stages
