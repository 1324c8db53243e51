"""What ranks tell each other beside tensors: answers, errors, and whether to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from rostra.errors import RostraError, TrainingFailed

T = TypeVar("T")


def this_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


def on_every_rank(action: Callable[[], T]) -> list[T]:
    """What `action` gave on each rank, told to all of them; they all call this. When it raises
    on some rank, all ranks raise: that one its own error, the others one that names it."""
    if world_size() == 1:
        return [action()]
    import torch.distributed as dist

    answer: T | None = None
    error: Exception | None = None
    told: RostraError | None = None
    try:
        answer = action()
    except RostraError as raised:
        error, told = raised, type(raised)(f"rank {this_rank()}: {raised}")
    except Exception as raised:
        error, told = raised, TrainingFailed(f"rank {this_rank()}: {raised!r}")
    answers: list[Any] = [None] * world_size()
    dist.all_gather_object(answers, (answer, told))
    if error is not None:
        raise error
    for _, failure in answers:
        if failure is not None:
            raise failure
    return [found for found, _ in answers]


def on_first_rank(action: Callable[[], T]) -> T:
    """What `action` gave on rank 0, told to all, as `on_every_rank` does."""
    return cast(T, on_every_rank(lambda: action() if this_rank() == 0 else None)[0])


def on_any_rank(flag: bool) -> bool:
    """Whether it is so on some rank; they all call this."""
    if world_size() == 1:
        return flag
    import torch
    import torch.distributed as dist

    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
