"""Data: from sources to batches.

Readers yield documents, `prepare` tokenizes them into shards that are cached by content, and a
`Loader` makes batches from those: every sample a pure function of seed, manifest and position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# At once: its module has its name, and importing that later would put it in its place.
from rostra.data.prepare import prepare
from rostra.lazy import on_first_use

if TYPE_CHECKING:
    from rostra.data.epochs import Source
    from rostra.data.inspection import Inspection, inspect_data
    from rostra.data.loader import (
        Loader,
        Position,
        held_out_samples,
        training_loader,
        training_samples,
    )
    from rostra.data.mixture import Mixture
    from rostra.data.packing import Packed
    from rostra.data.permutation import Permutation
    from rostra.data.prepared import HeldOut, Prepared, held_out, open_prepared
    from rostra.data.read_ahead import ReadAhead
    from rostra.data.samples import Samples
    from rostra.data.streaming import StreamLoader, streaming_loader
    from rostra.data.streams import Stream
    from rostra.data.tokenizer import Encoder, load_tokenizer, train_tokenizer

__all__ = [
    "Encoder",
    "HeldOut",
    "Inspection",
    "Loader",
    "Mixture",
    "Packed",
    "Permutation",
    "Position",
    "Prepared",
    "ReadAhead",
    "Samples",
    "Source",
    "Stream",
    "StreamLoader",
    "held_out",
    "held_out_samples",
    "inspect_data",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "streaming_loader",
    "train_tokenizer",
    "training_loader",
    "training_samples",
]

_HOME = {
    "Encoder": "rostra.data.tokenizer",
    "HeldOut": "rostra.data.prepared",
    "Inspection": "rostra.data.inspection",
    "Loader": "rostra.data.loader",
    "Mixture": "rostra.data.mixture",
    "Packed": "rostra.data.packing",
    "Permutation": "rostra.data.permutation",
    "Position": "rostra.data.loader",
    "Prepared": "rostra.data.prepared",
    "ReadAhead": "rostra.data.read_ahead",
    "Samples": "rostra.data.samples",
    "Source": "rostra.data.epochs",
    "Stream": "rostra.data.streams",
    "StreamLoader": "rostra.data.streaming",
    "held_out": "rostra.data.prepared",
    "held_out_samples": "rostra.data.loader",
    "inspect_data": "rostra.data.inspection",
    "load_tokenizer": "rostra.data.tokenizer",
    "open_prepared": "rostra.data.prepared",
    "streaming_loader": "rostra.data.streaming",
    "train_tokenizer": "rostra.data.tokenizer",
    "training_loader": "rostra.data.loader",
    "training_samples": "rostra.data.loader",
}

__getattr__ = on_first_use(__name__, _HOME)
