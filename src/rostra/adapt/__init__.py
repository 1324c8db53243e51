"""Adapters and quantised bases: what is trained beside a frozen model, and in how many bits
that model lies."""

from rostra.adapt.apply import add_adapter
from rostra.adapt.dropout import key_dropout
from rostra.adapt.embeddings import Grown, GrownWeights, grow_embeddings
from rostra.adapt.files import (
    Adapter,
    SavedAdapter,
    read_adapter,
    save_adapter,
    virtual_tokens,
)
from rostra.adapt.head import head_update
from rostra.adapt.keyed import Keys
from rostra.adapt.neftune import Neftune
from rostra.adapt.prefix import attend_to_prefix
from rostra.adapt.prompt import virtual_ids
from rostra.adapt.weights import AdaptedWeights, adapter_weights, base_name

__all__ = [
    "AdaptedWeights",
    "Adapter",
    "Grown",
    "GrownWeights",
    "Keys",
    "Neftune",
    "SavedAdapter",
    "adapter_weights",
    "add_adapter",
    "attend_to_prefix",
    "base_name",
    "grow_embeddings",
    "head_update",
    "key_dropout",
    "read_adapter",
    "save_adapter",
    "virtual_ids",
    "virtual_tokens",
]
