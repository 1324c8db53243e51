"""Activations on the host between forward and backward pass."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from rostra.errors import RequestError, TrainingFailed

Function = Callable[..., Any]  # of a module and the arguments of its forward

_SMALL = 4096  # bytes; a storage of less is not worth the way to the host


class Offload:
    """Sends what layers save for the backward pass to the host, and fetches it there.

    On CUDA the host is pinned memory. Copies run on a stream of their own: out while the next
    layer computes, and back while the layer behind it computes its gradients. On the CPU, whose
    memory is the host's, they are written to a temporary file (in `TMPDIR`, which should be on
    a disk and not in memory) and read again: tensors take less memory, the system's cache of
    files may take more while there is some to spare.

    Parameters stay where they are, and so does what all layers share: masks, positions.

    Raises from a forward pass: RequestError on another kind of device; TrainingFailed when the
    file cannot be written.
    """

    def __init__(self) -> None:
        self._hosts: dict[torch.device, _Host] = {}
        self._latest: weakref.ref[_Call] | None = None

    def wrap(self, inner: Function, first: bool) -> Function:
        """A forward for a layer; `first` of its model, so that nothing is fetched after it."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            call = begin(module, args, kwargs, None if first else self._latest)
            if call is None:
                return inner(module, *args, **kwargs)
            with saved_tensors_hooks(call.pack, call.unpack):
                result = inner(module, *args, **kwargs)
            end(call)
            self._latest = weakref.ref(call)
            return result

        # what is compiled is `inner` alone
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(_Call.end)
        return torch.compiler.disable(forward, recursive=False)

    def _begin(
        self, module: nn.Module, args: Any, kwargs: Any, before: weakref.ref[_Call] | None
    ) -> _Call | None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = tensors[0].device
        if not torch.is_grad_enabled() or _plain(tensors[0]) is None:
            return None
        given = [x for x in tensors if not x.requires_grad]
        known = (_plain(x) for x in (*given, *module.parameters(), *module.buffers()))
        stays = {x.untyped_storage()._cdata for x in known if x is not None}
        fake = any(isinstance(x, FakeTensor) for x in tensors)
        return _Call(_Unwritten() if fake else self._host(device), device, stays, before)

    def _host(self, device: torch.device) -> _Host:
        if device.type not in ("cpu", "cuda"):
            raise RequestError(
                "memory.activation_checkpointing = 'offload': runs on CUDA and on the CPU, not "
                f"on {device.type}; use full"
            )
        if device not in self._hosts:
            self._hosts[device] = _File() if device.type == "cpu" else _Pinned(device)
        return self._hosts[device]


def _plain(tensor: Tensor) -> Tensor | None:
    """The tensor's own part when it has real memory here."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    real = type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.device.type != "meta"
    stored = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return tensor if real and stored else None


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a cast or a view of a parameter alone, as autocast makes of each matrix."""
    node: Any = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(eq=False)
class _Copy:
    """The bytes of one storage that was saved."""

    host: Any  # where the host has them
    size: int
    uses: int = 0  # saved tensors that still have to be made from it
    here: Tensor | None = None  # while they are on the device
    done: torch.cuda.Event | None = None  # of the copying that runs

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let what `stream` does next come after the copying."""
        if self.done is not None:
            stream.wait_event(self.done)
            self.done = None


class _Host(Protocol):
    """Takes bytes, and gives them back."""

    def put(self, storage: torch.UntypedStorage) -> _Copy: ...

    def end(self) -> None:
        """The layer's forward pass has ended."""
        ...

    def fetch(self, copies: list[_Copy]) -> None:
        """Begin to bring back copies that will be needed soon."""
        ...

    def get(self, copy: _Copy) -> Tensor:
        """The bytes, for use on the current stream."""
        ...


class _File:
    """A temporary file on the CPU, for all layers; emptied when nothing in it is needed, as
    after a step: then little of it ever reaches the disk."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  it goes with this object
        self._needed: weakref.WeakSet[_Copy] = weakref.WeakSet()
        self._end = 0

    def put(self, storage: torch.UntypedStorage) -> _Copy:
        if self._end and not self._needed:
            self._end = self._file.truncate(0)
        copy = _Copy(self._end, storage.nbytes())
        try:
            self._file.seek(self._end)
            self._file.write(_bytes(storage).numpy().data)
        except OSError as error:
            raise TrainingFailed(
                "memory.activation_checkpointing = 'offload': cannot write activations to "
                f"{tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a folder with more "
                "room, or use full"
            ) from error
        self._end += copy.size
        self._needed.add(copy)
        return copy

    def end(self) -> None: ...

    def fetch(self, copies: list[_Copy]) -> None: ...

    def get(self, copy: _Copy) -> Tensor:
        if copy.here is None:
            copy.here = torch.empty(copy.size, dtype=torch.uint8)
            self._file.seek(copy.host)
            self._file.readinto(copy.here.numpy().data)
        return copy.here


class _Unwritten:
    """For fake tensors, which have no bytes: what comes back is as large as what went."""

    def put(self, storage: torch.UntypedStorage) -> _Copy:
        return _Copy(None, storage.nbytes())

    def end(self) -> None: ...

    def fetch(self, copies: list[_Copy]) -> None: ...

    def get(self, copy: _Copy) -> Tensor:
        if copy.here is None:
            copy.here = torch.empty(copy.size, dtype=torch.uint8)
        return copy.here


class _Pinned:
    """Pinned memory beside a CUDA device, for all layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._put: list[_Copy] = []  # by the layer that computes
        self._leaving: list[_Copy] = []  # of the layer before

    def put(self, storage: torch.UntypedStorage) -> _Copy:
        self._put.append(_Copy(None, storage.nbytes(), here=_bytes(storage)))
        return self._put[-1]

    def end(self) -> None:
        """Let this layer's bytes go out, and free those of the layer before.

        Device memory is kept until the computing stream has waited for its copy, so that it can
        be given to a later operation of that stream without the host waiting for anything.
        """
        computing = torch.cuda.current_stream(self._device)
        for copy in self._leaving:
            copy.wait(computing)
            copy.here = None
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            for copy in self._put:
                assert copy.here is not None
                copy.host = torch.empty(copy.size, dtype=torch.uint8, pin_memory=True)
                copy.host.copy_(copy.here, non_blocking=True)
        self._mark(self._put)
        self._leaving, self._put = self._put, []

    def fetch(self, copies: list[_Copy]) -> None:
        copies = [copy for copy in copies if copy.here is None]
        for copy in copies:
            copy.here = torch.empty(copy.size, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for copy in copies:
                assert copy.here is not None
                copy.here.copy_(copy.host, non_blocking=True)
        self._mark(copies)

    def get(self, copy: _Copy) -> Tensor:
        if copy.here is None:
            self.fetch([copy])
        copy.wait(torch.cuda.current_stream(self._device))
        assert copy.here is not None
        return copy.here

    def _mark(self, copies: list[_Copy]) -> None:
        event = self._stream.record_event()
        for copy in copies:
            copy.done = event


@dataclass(frozen=True)
class _Spec:
    """How the part of a DTensor belongs to the whole."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Spec | None:
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())

    def whole(self, part: Tensor) -> Tensor:
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.size, stride=self.stride
        )


@dataclass(frozen=True)
class _Packed:
    """A saved tensor: its place in the bytes of a storage."""

    copy: _Copy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    spec: _Spec | None


class _Call:
    """What one call of a layer saved: hooks for autograd."""

    def __init__(
        self,
        host: _Host,
        device: torch.device,
        stays: set[int],
        before: weakref.ref[_Call] | None,
    ) -> None:
        self._host, self._device, self._stays, self._before = host, device, stays, before
        self._copies: list[_Copy] = []
        # a weak reference keeps the address of a storage from being used again
        self._known: dict[tuple[StorageWeakRef, int], _Copy] = {}
        self._fetched = False

    def _pack(self, tensor: Tensor) -> Tensor | _Packed:
        plain = _plain(tensor)
        if plain is None or plain.device != self._device or _is_weight(tensor):
            return tensor.detach()
        storage = plain.untyped_storage()
        if storage.nbytes() < _SMALL or storage._cdata in self._stays:
            return tensor.detach()
        key = (StorageWeakRef(storage), plain._version)
        if key not in self._known:
            self._known[key] = self._host.put(storage)
            self._copies.append(self._known[key])
        copy = self._known[key]
        copy.uses += 1
        spec = _Spec.of(tensor)
        return _Packed(
            copy, plain.dtype, int(plain.storage_offset()), plain.size(), plain.stride(), spec
        )

    def end(self) -> None:
        self._known.clear()
        self._host.end()

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._fetch()
        copy = packed.copy
        data = self._host.get(copy)
        copy.uses -= 1
        if copy.uses <= 0:
            copy.here = None
        if isinstance(data, FakeTensor):  # which no other takes the place of
            tensor = data.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
        else:
            tensor = torch.empty(0, dtype=packed.dtype, device=self._device)
            tensor.set_(data.untyped_storage(), packed.offset, packed.size, packed.stride)
        return tensor if packed.spec is None else packed.spec.whole(tensor)

    def _fetch(self) -> None:
        """Once: what this call saved, and, while that is used, the call before."""
        if self._fetched:
            return
        self._fetched = True
        self._host.fetch(self._copies)
        before = None if self._before is None else self._before()
        if before is not None:
            self._host.fetch(before._copies)

    # autograd calls them, under the compiler's eyes when the layer is compiled
    pack = torch.compiler.disable(_pack)
    unpack = torch.compiler.disable(_unpack)
