"""What is changed of transformers while a rank is tried, and that it is still needed."""

from __future__ import annotations

import torch
import transformers
from torch._subclasses import FakeTensorMode
from transformers.masking_utils import is_tracing

from rostra.dry_run import transformers_changes
from rostra.dry_run.transformers_changes import VERSIONS, masks_as_in_training


def test_the_version_is_one_for_which_the_changes_were_looked_at() -> None:
    version = int(transformers.__version__.partition(".")[0])
    assert int(VERSIONS[0].partition(".")[0]) <= version < int(VERSIONS[1].partition(".")[0])


def test_transformers_takes_fake_tensors_for_compiled_ones() -> None:
    with FakeTensorMode():
        tensor = torch.zeros(1)
    assert is_tracing(tensor)
    with masks_as_in_training():
        assert not transformers_changes.masking_utils.is_tracing(tensor)
    assert transformers_changes.masking_utils.is_tracing(tensor)
