"""Which memory lives when, and what is sent: seen of every operation on tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from rostra.memory import KINDS, stored_tensors

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def _role(namespace: str, name: str) -> str | None:
    """What tensors are for that an operation takes and gives."""
    if namespace in ("c10d", "_c10d_functional", "fsdp"):
        gathers = name in ("_allgather_base_", "all_gather_copy_in", "split_with_sizes_copy")
        return "gathered" if gathers else "communication"
    return "quantization" if namespace == "bitsandbytes" else None


class Watch(TorchDispatchMode):
    """Sees every operation on plain tensors.

    `changes` are what happened to memory, in order: the number of a block, and bytes taken or,
    negative, given back. `roles` has the blocks that were seen in an exchange, by what for.
    `calls` counts collectives by kind. A fake tensor has no value to be read: a number is 1, so
    that losses and norms are finite, and a condition is true. With several stages on a rank, the
    schedule waits at its end for what was sent, which lives on until then: it is in `sent`.
    `hears` is called with the name of each `torch.profiler.record_function` that begins.
    """

    def __init__(self, keeps_sent: bool = False) -> None:
        super().__init__()
        self.keeps_sent = keeps_sent
        self.sent: list[Any] = []
        self.hears: Callable[[str], None] | None = None
        self.calls: Counter[str] = Counter()
        self.changes: list[tuple[int, int]] = []
        self.roles: dict[int, str] = {}
        self._live: dict[int, _Block] = {}  # by the storage's address
        self._resized: dict[int, _Block] = {}  # of these, who may be resized again
        self._blocks = self._now = self._highest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # what a DTensor or a low-bit tensor is made of comes here
        if function is torch.ops.aten._local_scalar_dense.default:
            with suppress(DataDependentOutputException):  # of what has a value
                return function(*args)
            return 1.0 if args[0].is_floating_point() else 1
        if self.hears and function is torch.ops.profiler._record_function_enter_new.default:
            self.hears(args[0])
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional"):
            short = name.replace("_", "")
            self.calls.update(k for k in COLLECTIVES if short.startswith(k.replace("_", "")))
            if name == "send" and self.keeps_sent:
                self.sent.append(args[0])
        role = _role(function.namespace, name)
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, Tensor) and x.device.type != "meta":
                number = self._see(x.untyped_storage())
                if role is not None:
                    self.roles.setdefault(number, role)
        self._look(everywhere=self._now > self._highest or function.namespace in ("c10d", "fsdp"))
        self._highest = max(self._highest, self._now)
        return result

    def look(self) -> None:
        """See now what was given back."""
        self._look(everywhere=True)

    def _look(self, everywhere: bool) -> None:
        """FSDP gives back what it has gathered by resizing it to nothing, which no operation
        tells: look after it, and before a new maximum, or when it gathers the next layer, also
        at what was never seen to be resized."""
        for block in list((self._live if everywhere else self._resized).values()):
            self._resize(block)

    def _see(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        if address not in self._live:
            self._blocks += 1
            block = _Block(self._blocks, weakref.ref(storage, lambda _: self._end(address)))
            self._live[address] = block
        self._resize(self._live[address])
        return self._live[address].number

    def _end(self, address: int) -> None:
        block = self._live.pop(address)
        self._resized.pop(address, None)
        self._change(block, 0)

    def _resize(self, block: _Block) -> None:
        storage = block.storage()
        if storage is None or storage.nbytes() == block.bytes:
            return
        address, size = storage._cdata, storage.nbytes()
        if block.bytes == 0 and block.emptied:
            self._resized[address] = block
        elif size == 0:
            block.emptied = True
            self._resized.pop(address, None)
        self._change(block, size)

    def _change(self, block: _Block, size: int) -> None:
        self.changes.append((block.number, size - block.bytes))
        self._now += size - block.bytes
        block.bytes = size

    def live(self) -> dict[int, int]:
        """Bytes of each block that there is now."""
        return {block.number: block.bytes for block in self._live.values()}

    def blocks(self, tensors: Iterable[Any]) -> set[int]:
        """Those that hold `tensors` now; whatever else is among them holds none."""
        found = set()
        for tensor in tensors:
            for part in stored_tensors(tensor) if isinstance(tensor, Tensor) else ():
                if (block := self._live.get(part.untyped_storage()._cdata)) is not None:
                    found.add(block.number)
        return found

    def at_peak(self, kinds: Mapping[str, set[int]], built: int, kept: set[str]) -> dict[str, int]:
        """Bytes by kind, and their `total`, when it was largest after the first `built` changes.

        A block is of the first of KINDS that names it; the rest are activations. Blocks of the
        `kept` kinds count from the beginning: the step before, or micro batch, has left them.
        """
        kind_of = {n: kind for kind in reversed(KINDS) for n in kinds.get(kind, ())}
        now = dict.fromkeys(KINDS, 0)
        for number, size in self.changes:
            if (kind := kind_of.get(number)) in kept:
                now[kind] += size
        peak: dict[str, int] = {}
        for index, (number, size) in enumerate(self.changes):
            if (kind := kind_of.get(number, "activations")) not in kept:
                now[kind] += size
            if index >= built and sum(now.values()) > sum(peak.values()):
                peak = dict(now)
        return {**peak, "total": sum(peak.values())}


@dataclass
class _Block:
    """Memory of one storage."""

    number: int
    storage: weakref.ref[torch.UntypedStorage]
    bytes: int = 0
    emptied: bool = False
