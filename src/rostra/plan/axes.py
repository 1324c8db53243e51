"""What a config's `parallel` table says of the mesh, for so many ranks."""

from __future__ import annotations

from math import prod
from typing import Any

from rostra.config.deepspeed import layout_keys, read_deepspeed
from rostra.config.schema import MemorySection, ParallelTable
from rostra.errors import RequestError
from rostra.layout import AXES


def as_in_file(
    table: ParallelTable, memory: MemorySection
) -> tuple[dict[str, Any], ParallelTable, MemorySection]:
    """The table's DeepSpeed file, and table and memory with what it decides where the config
    leaves it open; without a file, nothing and themselves."""
    if table.deepspeed is None:
        return {}, table, memory
    file = read_deepspeed(table.deepspeed)
    found = layout_keys(file)
    sharding = table.sharding or found.get("sharding")
    offload = memory.offload.model_copy(
        update={
            kind: found.get(f"offload_{kind}", "none")
            for kind in ("parameters", "optimizer")
            if getattr(memory.offload, kind) in ("auto", "none")
        }
    )
    return (
        file,
        table.model_copy(update={"sharding": sharding}),
        memory.model_copy(update={"offload": offload}),
    )


def choose_axes(table: ParallelTable, ranks: int) -> dict[str, Any]:
    """Sizes of the mesh axes and the sharding strategy, for so many ranks.

    Raises RequestError when they do not make up `ranks`.
    """
    axes: dict[str, Any] = {
        name: getattr(table, name) for name in ("context", "tensor", "pipeline", "expert")
    }
    split = prod(axes.values())
    left, over = divmod(ranks, split)
    given = table.replicate or table.shard
    asked = split * (table.replicate or 1) * (table.shard or 1)
    if over or (given and asked != ranks):
        wanted = asked if given else split * max(1, round(ranks / split))
        asking = [f"parallel.{name} = {n}" for name in AXES if (n := getattr(table, name) or 1) > 1]
        raise RequestError(
            f"{', '.join(asking) or 'parallel'}: these axes make up {asked} ranks"
            f"{'' if given else ' or a multiple'}, and {ranks} were started; start {wanted} "
            f"(`--workers {wanted}` on this machine), or change the axes"
        )
    sharding = table.sharding
    if sharding is None and (table.shard or 1) > 1:
        sharding = "hybrid_shard" if (table.replicate or 1) > 1 else "full_shard"
    rest = "replicate" if sharding in (None, "no_shard") else "shard"
    sizes = {"replicate": table.replicate or 1, "shard": table.shard or 1}
    if not given:
        sizes[rest] = left
    return {**axes, **sizes, "sharding": sharding or "no_shard"}
