"""What a GPU has beside live tensors: blocks that PyTorch's allocator keeps, the context of the
device, and buffers of NCCL.

The allocator takes memory in segments and gives none back (PyTorch's notes on CUDA semantics,
"Memory management"): a block that is free, but too small for what comes, or another stream's,
stays. So what is reserved exceeds what lives by what was given back before the peak, and cannot
be used at it.
"""

from __future__ import annotations

from rostra.layout import AXES, Layout
from rostra.plan.memory.growth import at
from rostra.plan.memory.step import Moment, Stage

CONTEXT = 500 << 20  # of a device with its kernels and libraries, as `nvidia-smi` shows it
CHANNELS = 128 << 20  # buffers of a communicator of NCCL: 16 channels, send and receive, 4 MiB
ROUNDED = 0.01  # of what is taken for a time, by rounding to 2 MiB and the gaps between blocks


def kept_blocks(stage: Stage, moment: Moment, tokens: int) -> float:
    """Bytes of blocks that are free at `moment`, with micro batches of so many tokens, and of no
    use then."""
    found = ROUNDED * (moment.activations + moment.logits).real
    p = stage.parts
    if p.layer:  # gathered on a stream of its own: the largest buffer, of which one layer's lives
        found += max(0.0, max(p.around, 2 * p.layer) - p.layer)
        # and gradients are reduced on another, where the blocks of the last step's wait
        found += p.pool if p.stays else max(0.0, p.pool - moment.gradients.real)
    if moment.logits and stage.loss is not None:
        found += at(stage.loss.blocks, tokens)
        found += max(at(spare, tokens) for spare in stage.layers.spare)
    return found


def outside(layout: Layout) -> float:
    """Bytes that are not the allocator's."""
    groups = sum(getattr(layout, axis) > 1 for axis in AXES)
    return CONTEXT + CHANNELS * groups
