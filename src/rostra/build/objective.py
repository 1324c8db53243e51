"""What a model is called with, and the loss of what comes out."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rostra.adapt import head_update
from rostra.batch import Batch
from rostra.models import Head
from rostra.optim import chunked_cross_entropy, cross_entropy_sum
from rostra.parallel import Loss
from rostra.parallel.context import Context
from rostra.parallel.tensor import vocabulary_shard


def whole_inputs(batch: Batch, isolate: bool, prefix: bool) -> tuple[dict[str, Any], Batch]:
    """What the model is called with for all positions of a micro batch, and the batch."""
    inputs = {"input_ids": batch.input_ids, "use_cache": False}
    if isolate:
        inputs["position_ids"] = batch.position_ids
    if prefix:
        inputs["virtual_ids"] = batch.input_ids
    return inputs, batch


def context_inputs(
    context: Context, isolate: bool, prefix: bool, batch: Batch
) -> tuple[dict[str, Any], Batch]:
    """What the model is called with for this rank's positions, and these of the batch."""
    own = Batch(**{name: context.part(tensor) for name, tensor in batch.tensors().items()})
    inputs = context.inputs(batch, isolate)
    if prefix:
        inputs["virtual_ids"] = own.input_ids
    return inputs, own


def make_loss(head: Head | None, chunk: int, compiled: bool) -> Loss:
    """The loss of a micro batch, by chunks of logits where the head can be split off."""

    def by_chunks(
        model: PreTrainedModel, inputs: dict[str, Any], batch: Batch, factor: float
    ) -> tuple[Tensor, Tensor]:
        assert head is not None
        hidden = model.base_model(**inputs).last_hidden_state
        weight, vocabulary = vocabulary_shard(head.layer.weight)
        bias = None if head.layer.bias is None else vocabulary_shard(head.layer.bias)[0]
        return chunked_cross_entropy(
            hidden,
            weight,
            batch.labels,
            weights=batch.weights,
            scale=factor,
            chunk=chunk,
            bias=bias,
            softcap=head.softcap,
            compiled=compiled and vocabulary is None,
            vocabulary=vocabulary,
            update=head_update(head.module, hidden),
        )

    def whole(
        model: PreTrainedModel, inputs: dict[str, Any], batch: Batch, factor: float
    ) -> tuple[Tensor, Tensor]:
        total = cross_entropy_sum(model(**inputs).logits, batch.labels, batch.weights)
        return total * factor, total.detach()

    return by_chunks if head is not None else whole
