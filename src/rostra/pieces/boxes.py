"""Rectangles of tensors, and the stretches of flattened ones that they make up."""

from __future__ import annotations

from itertools import pairwise
from math import prod

Span = tuple[int, ...]  # an offset or a size, a number for every dimension
Box = tuple[Span, Span]  # the offset and the size of a rectangle


def stretch_boxes(shape: Span, start: int, stop: int) -> list[Box]:
    """The rectangles that make up the stretch `start` to `stop` of a flattened tensor, in its
    order: the rest of a row, whole rows, the beginning of a row, at every dimension."""
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    ends = [start, stop] if first > last else sorted({start, first * row, last * row, stop})
    boxes: list[Box] = []
    for begin, end in pairwise(ends):
        if begin % row == 0 and end % row == 0:
            rows = (begin // row, (end - begin) // row)
            boxes.append(((rows[0], *(0 for _ in shape[1:])), (rows[1], *shape[1:])))
            continue
        at = begin // row
        for offset, size in stretch_boxes(shape[1:], begin - at * row, end - at * row):
            boxes.append(((at, *offset), (1, *size)))
    return boxes


def overlap(a: Box, b: Box) -> Box | None:
    low = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    high = [min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True)]
    size = tuple(end - start for start, end in zip(low, high, strict=True))
    return (low, size) if all(n > 0 for n in size) else None


def without(box: Box, taken: Box) -> list[Box]:
    """Rectangles that make up `box` without `taken`."""
    shared = overlap(box, taken)
    if shared is None:
        return [box]
    rest = []
    offset, size = list(box[0]), list(box[1])
    for dim, (start, length) in enumerate(zip(*shared, strict=True)):
        end = offset[dim] + size[dim]
        for low, high in ((offset[dim], start), (start + length, end)):
            if low < high:
                rest.append(
                    (
                        (*offset[:dim], low, *offset[dim + 1 :]),
                        (*size[:dim], high - low, *size[dim + 1 :]),
                    )
                )
        offset[dim], size[dim] = start, length
    return rest


def slices(box: Box, origin: Span) -> tuple[slice, ...]:
    """`box` as slices of a tensor that begins at `origin`."""
    return tuple(slice(x - o, x - o + n) for x, n, o in zip(*box, origin, strict=True))
