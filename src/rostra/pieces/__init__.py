"""Parts of named tensors: what a rank holds, writes into a checkpoint, and asks of one."""

from rostra.pieces.boxes import stretch_boxes
from rostra.pieces.piece import (
    Below,
    Piece,
    Reader,
    Tensors,
    cut,
    fill,
    local_piece,
    read_whole,
)
from rostra.pieces.reading import INDEX, PieceReader, index_file, merge
from rostra.pieces.writing import write_pieces

__all__ = [
    "INDEX",
    "Below",
    "Piece",
    "PieceReader",
    "Reader",
    "Tensors",
    "cut",
    "fill",
    "index_file",
    "local_piece",
    "merge",
    "read_whole",
    "stretch_boxes",
    "write_pieces",
]
