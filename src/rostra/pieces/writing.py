"""Pieces into a file, through little memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rostra.pieces.piece import Piece

STRETCH = 1 << 22  # bytes that are brought to the host, hashed and written at once
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_pieces(path: Path, pieces: dict[str, Piece]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write one safetensors file (https://github.com/huggingface/safetensors#format) and sync it
    to the disk; returns what an index says of it, for `merge`, and its SHA-256 and size, as a
    manifest has them. Pieces without an element are left out.

    What lies on the host is written from where it lies, and what lies on a device comes through
    `STRETCH` bytes of the host, so that writing takes no more memory, however large the pieces.
    Of a piece that is not contiguous a whole row comes at once, if that is more.
    """
    held = [(name, piece) for name, piece in pieces.items() if piece.data.numel()]
    held.sort(key=lambda x: (-x[1].data.element_size(), x[0]))  # so that all are aligned
    digest = hashlib.sha256()
    with path.open("wb") as file:
        file.write(header := _header(held))
        digest.update(header)
        for _, piece in held:
            for stretch in _stretches(piece.data.detach()):
                file.write(stretch)
                digest.update(stretch)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    index = {
        name: {
            "shape": list(piece.shape),
            "dtype": str(piece.data.dtype).removeprefix("torch."),
            "pieces": [[path.name, name, list(piece.offset), list(piece.data.shape)]],
        }
        for name, piece in held
    }
    return index, {"sha256": digest.hexdigest(), "bytes": size}


def _header(held: list[tuple[str, Piece]]) -> bytes:
    """The length of what follows in 8 bytes; dtype, shape and place of each tensor as JSON, and
    spaces, so that the first begins at a multiple of 8."""
    entries, end = {}, 0
    for name, piece in held:
        start, end = end, end + piece.data.nbytes
        entries[name] = {
            "dtype": TYPES[piece.data.dtype],
            "shape": list(piece.data.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _stretches(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor` on the host, some at a time."""
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = tensor.nbytes // len(tensor)
    for rows in tensor.split(max(1, STRETCH // row)):
        plain = rows.contiguous().view(-1).view(torch.uint8).cpu()
        yield memoryview(plain.numpy())
