"""All that is changed of DeepSpeed while it runs: what, why, and for which versions.

Each change was needed with every version within `VERSIONS`. The tests of this file show for the
installed one that DeepSpeed alone still does otherwise, and fail when a change has become
needless, or the version is a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

VERSIONS = ("0.19", "0.20")  # from, and below


@contextmanager
def known_norm(zero: Any, stage: int, norm: float | None) -> Iterator[None]:
    """Within, the step of `zero`, DeepSpeed's optimizer of a ZeRO `stage` 1 to 3, takes `norm`
    for that of the gradients (as they are, not yet divided by its loss scale); with None it
    passes the step over and clears the gradients.

    DeepSpeed computes norms in its step alone (deepspeedai/DeepSpeed#1292). Who must know one
    before, to decide whether to step at all, would have all gradients read a second time, and
    cannot tell the step not to be taken. -1 is DeepSpeed's own sign for a norm that is not
    finite.
    """
    known = torch.tensor(-1.0 if norm is None else norm)
    name, value = ("scaled_global_norm", known) if stage < 3 else ("_get_norm_groups", [known])
    setattr(zero, name, lambda: value)
    try:
        yield
    finally:
        delattr(zero, name)


def forget_group(deepspeed: Any) -> None:
    """Let go of all that DeepSpeed remembers of the process group that it was started in.

    It knows only of groups that it destroyed itself, and then still keeps its backend (`cdb`),
    which has memory shared among the ranks of that group: in the next group, of more or other
    ranks, their sums would be wrong, or never come.
    """
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
