"""All that is changed of other libraries while a rank is tried: what, why, for which versions.

Each change was needed with every version within `VERSIONS`. The tests of this file show for the
installed ones that they still do otherwise, and fail when a change has become needless, or a
version is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch import _meta_registrations as meta
from transformers import masking_utils

from rostra.parallel.deepspeed_start import import_deepspeed
from rostra.parallel.stage import Stage

VERSIONS = {  # from, and below
    "torch": ("2.11", "2.14"), "transformers": ("5", "6"), "deepspeed": ("0.19", "0.20"),
}  # fmt: skip


@contextmanager
def masks_as_in_training() -> Iterator[None]:
    """Within, fake tensors get the masks that real ones get.

    transformers takes a fake tensor for one that is being compiled or exported, asks nothing of
    its values, and makes a mask [b, 1, T, T] where training has none: more memory, and another
    kernel of attention (huggingface/transformers, `masking_utils.is_tracing`).
    """
    known = masking_utils.is_tracing
    with patch.object(masking_utils, "is_tracing", lambda tensor=None: known()):
        yield


@contextmanager
def grouped_products() -> Iterator[None]:
    """Within, fake tensors of any type go through products of experts, as real ones do.

    The shapes of `torch._grouped_mm` are told for bfloat16 alone, where its kernels take float32
    and float16 too (pytorch/pytorch, `_meta_registrations._meta_grouped_mm_common`).
    """

    def shapes(a: Tensor, b: Tensor, *_: Any, offs: Tensor, out_dtype: Any, **__: Any) -> Tensor:
        out: Tensor = meta._create_grouped_mm_output_tensor(a, b, offs, out_dtype)
        return out

    with patch.object(meta, "_meta_grouped_mm_common", shapes):
        yield


class _NoKernel:
    """In place of the builder of a kernel, and of what it builds."""

    def load(self) -> _NoKernel:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def deepspeed_alone() -> Iterator[None]:
    """Within, DeepSpeed's engine runs on fake tensors in a group of PyTorch's `fake` backend.

    Ranks that are not there would answer, in its checks that all do the same, with numbers that
    nobody sent; what they would tell each other is taken to be the same. A model moves to a
    device by new parameters where these are fake, which weak references of theirs forbid; it is
    there already. Gradients are looked at, and finite. The Adam for the host is a kernel that
    reads memory, and there is none.
    """
    import_deepspeed(torch.device("cpu"))
    from deepspeed.ops.adam import cpu_adam  # type: ignore[import-untyped]
    from deepspeed.runtime.zero import (  # type: ignore[import-untyped]
        partitioned_param_coordinator,
        stage_1_and_2,
    )

    def same(answers: list[Any], own: Any, group: Any = None) -> None:
        answers[:] = [own] * len(answers)

    def finite(looks: Callable[..., Any]) -> Callable[..., bool]:
        return lambda *args, **kwargs: looks(*args, **kwargs) is None

    whole = stage_1_and_2.DeepSpeedZeroOptimizer
    with ExitStack() as stack:
        for owner, name, value in (
            (whole, "has_overflow", finite(whole.has_overflow)),
            (cpu_adam, "CPUAdamBuilder", _NoKernel),
            (dist, "all_gather_object", same),
            (Stage, "to", lambda stage, *_, **__: stage),
            (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda *_: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
