"""What this model or this config does not allow of a layout, beside the one table."""

from __future__ import annotations

from transformers import PretrainedConfig

from rostra.config import Config
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.parallel.context import check_context
from rostra.parallel.pipeline import check_pipeline
from rostra.parallel.pipeline_split import check_stages
from rostra.parallel.tensor import check_tensor


def check_layout(config: Config, layout: Layout, shape: PretrainedConfig) -> None:
    """Raises RequestError for what this model or this config does not allow of a layout."""
    length, size = config.data.sequence_length, config.train.global_batch_size
    check_tensor(shape, layout.tensor, length // layout.context)
    check_context(shape, layout.context, length, layout.tensor, layout.context_method)
    check_pipeline(layout, shape.get_text_config().num_hidden_layers)
    if layout.pipeline > 1:
        check_stages(shape)
    check_optimizer(config.optimizer.name, layout)
    check_schedule(shape, layout)
    if layout.data > size:
        raise RequestError(
            f"train.global_batch_size = {size}: leaves some of the {layout.data} data ranks "
            f"(parallel.replicate x parallel.shard) without a sample; set it to {layout.data} "
            "or more"
        )


def check_schedule(shape: PretrainedConfig, layout: Layout) -> None:
    """Raises RequestError for a schedule that a model of this family does not go through."""
    if layout.splits_backward and shape.model_type == "gpt2":
        raise RequestError(
            "parallel.schedule = zero_bubble: a gpt2's fused projections give views, which a split "
            "backward pass cannot detach; set parallel.schedule: 1f1b"
        )


def check_optimizer(name: str, layout: Layout) -> None:
    """Raises RequestError for an optimizer that cannot update what `layout` leaves on a rank."""
    matrices = name in ("muon", "adafactor")
    if matrices and layout.engine == "deepspeed":
        raise RequestError(
            f"optimizer.name = {name}: needs whole matrices, and DeepSpeed cuts them into flat "
            "parts; use adamw (or lion, sgd), or parallel.engine: torch"
        )
    parts = layout.sharding != "no_shard" and layout.shard * layout.context > 1
    if matrices and (parts or layout.tensor > 1):
        raise RequestError(
            f"optimizer.name = {name}: needs whole matrices, and "
            f"{layout.in_config(('sharding', 'tensor'))} cut them up; use adamw, or "
            "parallel.sharding: no_shard with parallel.tensor: 1"
        )
    if layout.optimizer_states != "fp32" and name != "adamw":
        raise RequestError(
            f"memory.optimizer_states = {layout.optimizer_states}: these are states of AdamW, and "
            f"optimizer.name is {name}; use fp32, or optimizer.name: adamw"
        )
