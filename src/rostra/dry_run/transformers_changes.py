"""All that is changed of transformers while a rank is tried: what, why, and for which versions.

The change was needed with every version within `VERSIONS`. The test of this file shows for the
installed one that transformers alone still does otherwise, and fails when the change has become
needless, or the version is a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import masking_utils

VERSIONS = ("5", "6")  # from, and below


@contextmanager
def masks_as_in_training() -> Iterator[None]:
    """Within, fake tensors get the masks that real ones get.

    transformers takes a fake tensor for one that is being compiled or exported, asks nothing of
    its values, and makes a mask [b, 1, T, T] where training has none: more memory, and another
    kernel of attention (huggingface/transformers, `masking_utils.is_tracing`).
    """
    known = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: known()
    try:
        yield
    finally:
        masking_utils.is_tracing = known
