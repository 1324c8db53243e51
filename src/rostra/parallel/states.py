"""What an engine holds, as named pieces for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rostra.optim import Optimizers
from rostra.parallel.held import Gradients, Held, first_of_copies, local
from rostra.parallel.mesh import Mesh
from rostra.parallel.stage import Stage
from rostra.pieces import Piece, Reader, fill, local_piece, read_whole


def weights(stage: Stage) -> Iterator[tuple[str, Tensor, bool]]:
    """Parameters and saved buffers: name in the whole model, tensor, and whether this stage
    is the one that writes it (of tied embeddings in two stages, the first is). Beside a frozen
    base, only what trains: the base is read again from where it came from."""
    parameters = list(stage.model.named_parameters())
    trained = [(name, p) for name, p in parameters if p.requires_grad]
    buffers: list[tuple[str, Tensor]] = []
    if len(trained) == len(parameters):
        saved = stage.model.state_dict(keep_vars=True)
        buffers = [(name, b) for name, b in stage.model.named_buffers() if name in saved]
    for name, tensor in (*trained, *buffers):
        yield stage.aliases.get(name, name), tensor, name not in stage.aliases


def pieces(
    stages: Sequence[Stage], gradients: Gradients, optimizers: Optimizers, mesh: Mesh
) -> tuple[dict[str, Piece], dict[str, Any]]:
    """The pieces this rank writes, and the optimizer's plain values of all ranks."""
    found: dict[str, Piece] = {}
    for stage in stages:
        for name, tensor, written in weights(stage):
            if written and first_of_copies(tensor, mesh):
                found[f"model/{name}"] = local_piece(tensor.detach())
    for held in gradients.masters:
        if held.written:
            found[f"master/{held.name}"] = Piece(held.value.detach(), held.shape, held.offset)
    holders = {held.name: held for held in gradients.held}
    states, values = optimizers.state()
    for key, tensor in states.items():
        held = holders[key.rsplit("/", 1)[0]]
        if held.written and (_lies_in_parts(key, tensor) or not any(held.offset)):
            found[f"optimizer/{key}"] = _of_optimizer(held, key, tensor)
    return found, _merged(values, mesh)


@torch.no_grad()
def materialize(
    stage: Stage, device: torch.device, reader: Reader, parameters: torch.device | None = None
) -> None:
    """Give a stage on the meta device memory on `device` and its weights, part by part.

    Parameters go to `parameters`, if given: FSDP wants those that it offloads on the host.
    """
    real: dict[int, Tensor] = {}
    for module in stage.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in real:  # tied ones stay one
                    is_parameter = isinstance(tensor, nn.Parameter)
                    place = (parameters or device) if is_parameter else device
                    made = torch.empty_like(tensor, device=place)
                    trains = tensor.requires_grad
                    real[id(tensor)] = nn.Parameter(made, trains) if is_parameter else made
                table[name] = real[id(tensor)]  # type: ignore[assignment]
    for name, tensor in (*stage.model.named_parameters(), *stage.model.named_buffers()):
        fill(tensor, reader, stage.aliases.get(name, name))


def _lies_in_parts(key: str, tensor: Tensor) -> bool:
    return tensor.dim() > 0 and not key.endswith(".qmap")


def _of_optimizer(held: Held, key: str, tensor: Tensor) -> Piece:
    """A state that lies as the parameter does, in numbers or (`KEY.codes`, `KEY.scale`) in
    blocks of rows; or stands for all of it."""
    if not _lies_in_parts(key, tensor):
        return local_piece(tensor)
    if "." in key.rsplit("/", 1)[1]:
        return Piece(tensor, *held.part.place(tensor.shape))
    if tensor.shape != held.value.shape:  # Adafactor's, of rows and columns; never in parts
        return local_piece(tensor)
    return Piece(tensor, held.shape, held.offset)


def _merged(values: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    if mesh.grid is None:
        return values
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return {key: value for found in everyone for key, value in found.items()}


@torch.no_grad()
def load_pieces(
    stages: Sequence[Stage],
    gradients: Gradients,
    optimizers: Optimizers | None,
    reader: Reader,
    values: dict[str, Any],
) -> None:
    """Fill the model in place, and the optimizer's state unless `optimizers` is None.

    Raises ValueError when the reader's weights are not those of the model.
    """
    known, filled = set(reader.names()), set()
    for stage in stages:
        for name, tensor, _ in weights(stage):
            exact = f"master/{name}"
            source = exact if exact in known else f"model/{name}"
            if source not in known or reader.shape(source) != tuple(tensor.shape):
                raise ValueError(
                    f"weights do not fit the model: {name} is missing or of "
                    f"another shape than {tuple(tensor.shape)}"
                )
            fill(tensor, reader, source)
            if tensor.requires_grad:
                filled.add(_memory(tensor))
    for held in gradients.held:
        if _memory(held.value) in filled:
            continue  # others are copies: more exact, or on the host
        source = f"master/{held.name}"
        source = source if source in known else f"model/{held.name}"
        held.value.copy_(reader.read(source, held.offset, tuple(held.value.shape)))
    if optimizers is not None:
        _load_optimizer(gradients, optimizers, reader, values)


def _memory(tensor: Tensor) -> int:
    """Where this rank's part lies."""
    return local(tensor).untyped_storage().data_ptr()


def _load_optimizer(
    gradients: Gradients, optimizers: Optimizers, reader: Reader, values: dict[str, Any]
) -> None:
    """One parameter at a time: codes of low-bit states are read whole."""
    holders = {held.name: held for held in gradients.held}
    keys: dict[str, list[str]] = {}
    for full in reader.names():
        kind, _, key = full.partition("/")
        if kind == "optimizer" and (name := key.rsplit("/", 1)[0]) in holders:
            keys.setdefault(name, []).append(key)
    plain: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if (name := key.rsplit("/", 1)[0]) in holders:
            plain.setdefault(name, {})[key] = value
    for name in sorted({*keys, *plain}):
        tensors = {key: _read(reader, holders[name], key) for key in keys.get(name, [])}
        optimizers.load_state(tensors, plain.get(name, {}))


def _read(reader: Reader, held: Held, key: str) -> Tensor:
    full = f"optimizer/{key}"
    shape = reader.shape(full)
    if shape == held.shape and "." not in key.rsplit("/", 1)[1]:
        return reader.read(full, held.offset, tuple(held.value.shape))
    return read_whole(reader, full)
