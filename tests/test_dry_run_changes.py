"""What is changed of other libraries while a rank is tried, and that it is still needed."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from torch._subclasses import FakeTensorMode
from transformers import masking_utils

from rostra.dry_run.changes import VERSIONS, masks_as_in_training


@pytest.mark.parametrize("library", VERSIONS)
def test_the_version_is_one_for_which_the_changes_were_looked_at(library: str) -> None:
    first, below = map(Version, VERSIONS[library])
    assert first <= Version(version(library)) < below


def test_transformers_takes_fake_tensors_for_compiled_ones() -> None:
    with FakeTensorMode():
        tensor = torch.zeros(1)
    assert masking_utils.is_tracing(tensor)
    with masks_as_in_training():
        assert not masking_utils.is_tracing(tensor)
    assert masking_utils.is_tracing(tensor)
