"""Data: from sources to batches.

Readers yield documents, `prepare` tokenizes them into shards that are cached by content, and a
`Loader` makes batches from those: every sample a pure function of seed, manifest and position.
"""

from __future__ import annotations

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
from rostra.data.prepare import prepare
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
