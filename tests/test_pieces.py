"""Whatever partition is written, whatever is read: it equals the original."""

from __future__ import annotations

import json
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ranks import Ranks
from rostra.errors import RequestError
from rostra.layout import Layout
from rostra.parallel.held import first_of_copies
from rostra.parallel.mesh import Mesh
from rostra.pieces import (
    INDEX,
    Piece,
    PieceReader,
    Tensors,
    fill,
    index_file,
    local_piece,
    merge,
    stretch_boxes,
    write_pieces,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A partition into rectangles: cut in two along some dimension, again and again."""
    parts: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offset, size = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, size[dim]))
        for low, length in ((0, cut), (cut, size[dim] - cut)):
            start = (*offset[:dim], offset[dim] + low, *offset[dim + 1 :])
            parts.append((start, (*size[:dim], length, *size[dim + 1 :])))
    return parts


@st.composite
def stretches(draw: st.DrawFn, count: int) -> list[Box]:
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    return [((a,), (b - a,)) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


def part(whole: Tensor, box: Box) -> Tensor:
    offset, size = box
    if len(offset) != whole.dim():
        return whole.flatten()[offset[0] : offset[0] + size[0]]
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


def write(folder: Path, whole: Tensor, parts: list[Box]) -> PieceReader:
    """Every part by a rank of its own."""
    shape = tuple(whole.shape)
    indexes = [
        write_pieces(
            folder / f"part-{rank}.safetensors", {"x": Piece(part(whole, box), shape, box[0])}
        )[0]
        for rank, box in enumerate(parts)
    ]
    (folder / INDEX).write_text(json.dumps(merge(indexes)))
    return PieceReader(folder)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_partition_written_and_any_region_read_equals_the_original(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = torch.arange(prod(shape)).reshape(shape).to(dtype)
    kinds = st.one_of(boxes(shape), stretches(prod(shape)))
    parts = [box for box in data.draw(kinds) if prod(box[1])]
    wanted = [*data.draw(boxes(shape)), *data.draw(stretches(prod(shape)))]
    with tempfile.TemporaryDirectory() as name:
        reader = write(Path(name), whole, parts)
        assert reader.shape("x") == shape
        for box in wanted:
            found = reader.read("x", *box)
            assert tuple(found.shape) == tuple(box[1])
            if found.numel():
                assert found.dtype == dtype
                assert torch.equal(found, part(whole, box))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_stretch_is_few_rectangles_in_its_order(dims: list[int], data: st.DataObject) -> None:
    whole = torch.arange(prod(dims)).reshape(dims)
    start = data.draw(st.integers(0, prod(dims)))
    stop = data.draw(st.integers(start, prod(dims)))
    parts = stretch_boxes(tuple(dims), start, stop)
    assert len(parts) <= 2 * len(dims) - 1
    found = [x for box in parts for x in part(whole, box).flatten().tolist()]
    assert found == list(range(start, stop))


def test_a_hole_is_named_with_its_place(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    reader = write(tmp_path, whole, [((0, 0), (4, 2)), ((0, 2), (3, 4))])
    assert torch.equal(reader.read("x", (1, 1), (2, 4)), whole[1:3, 1:5])
    with pytest.raises(RequestError, match=r"x: nothing holds .* \(1, 4\) at \(3, 2\)"):
        reader.read("x", (0, 0), (4, 6))
    with pytest.raises(RequestError, match="nothing holds"):
        reader.read("x", (22,), (2,))
    with pytest.raises(KeyError):
        reader.shape("y")


def test_copies_of_a_part_do_no_harm(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    reader = write(tmp_path, whole, [((0, 0), (2, 4)), ((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert torch.equal(reader.read("x", (0, 0), (3, 4)), whole)


def test_slices_of_one_buffer_are_written_apart(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    pieces = {"a": Piece(flat[:4], (2, 2), (0,)), "b": Piece(flat[4:], (6,), (0,))}
    index, _ = write_pieces(tmp_path / "part-0.safetensors", pieces)
    assert (tmp_path / "part-0.safetensors").stat().st_size < 40 + 300
    reader = PieceReader(tmp_path, index)
    assert torch.equal(reader.read("a", (1, 0), (1, 2)), torch.tensor([[2.0, 3.0]]))
    assert torch.equal(reader.read("b", (0,), (6,)), flat[4:])


def test_a_file_of_whole_tensors_is_read_alike(tmp_path: Path) -> None:
    whole = torch.randn(3, 4)
    pieces = {"x": Piece(whole, (3, 4), (0, 0)), "step": Piece(torch.tensor(3.0), (), ())}
    write_pieces(tmp_path / "all.safetensors", pieces)
    reader = PieceReader(tmp_path, index_file(tmp_path / "all.safetensors"))
    assert set(reader.names()) == {"x", "step"}
    assert torch.equal(reader.read("x", (1, 1), (2, 2)), whole[1:, 1:3])
    assert reader.read("step", (), ()) == 3


def test_what_was_read_may_be_changed(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    files = write(tmp_path, whole, [((0, 0), (3, 4))])
    for reader in (files, Tensors({"x": whole.clone()})):
        for box in (((0, 0), (3, 4)), ((0, 1), (3, 2)), ((2,), (5,))):
            found = reader.read("x", *box)
            assert found.untyped_storage().nbytes() == 4 * prod(box[1])
            found.zero_()
            assert torch.equal(reader.read("x", *box), part(whole, box))


def test_ranks_that_disagree_on_a_tensor_are_seen(tmp_path: Path) -> None:
    one, _ = write_pieces(tmp_path / "0.safetensors", {"x": Piece(torch.zeros(2), (4,), (0,))})
    two, _ = write_pieces(tmp_path / "1.safetensors", {"x": Piece(torch.zeros(2), (5,), (2,))})
    with pytest.raises(ValueError, match="x: ranks hold"):
        merge([one, two])


def test_filling_casts_and_checks_the_shape(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    reader = write(tmp_path, whole, [((0,), (6,))])
    tensor = torch.empty(2, 3, dtype=torch.bfloat16, requires_grad=True)
    fill(tensor, reader, "x")
    assert torch.equal(tensor.detach(), whole.bfloat16())
    with pytest.raises(ValueError, match=r"x: has the shape \(2, 3\) there, and \(3, 2\) here"):
        fill(torch.empty(3, 2), reader, "x")


def placed(whole: Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def fully_sharded(whole: Tensor, mesh: DeviceMesh, dim: int, shard_dim: int = 0) -> DTensor:
    """FSDP2 over tensor parallelism, as it really comes out."""
    module = nn.Module()
    module.x = nn.Parameter(placed(whole, mesh["tensor"], Shard(dim)))
    fully_shard(module, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(shard_dim))
    found = module.x
    assert isinstance(found, DTensor)
    return found


def task_placements(folder: str) -> list[tuple[bool, ...]]:
    """Each DTensor's piece is its part of the whole; those owned are written once, and fill
    tensors of any other placement."""
    rank = dist.get_rank()
    ranks = Mesh.of(Layout(1, 1, shard=2, tensor=2, sharding="full_shard"), torch.device("cpu"))
    mesh = ranks.grid_of(("shard",), ("tensor",))
    one, r, s0, s1 = mesh["tensor"], Replicate(), Shard(0), Shard(1)
    whole = torch.arange(35.0).reshape(5, 7)
    even = torch.arange(64.0).reshape(8, 8)
    tensors: dict[str, tuple[Tensor, Tensor]] = {
        "plain": (whole, whole.clone()),
        "whole": (whole, placed(whole, mesh, r, r)),
        "rows": (whole, placed(whole, mesh, s0, r)),
        "columns": (whole, placed(whole, mesh, r, s1)),
        "both": (whole, placed(whole, mesh, s0, s1)),
        "twice": (whole, placed(whole, mesh, s0, s0)),
        "short": (whole[:1], placed(whole[:1], mesh, s0, s1)),
        "submesh": (whole, placed(whole, one, s0)),
        "colwise": (whole, fully_sharded(whole, mesh, 0)),
        "rowwise": (whole, fully_sharded(whole, mesh, 1)),
        "even": (even, fully_sharded(even, mesh, 0)),
        "wide": (even, fully_sharded(even, mesh, 1, 1)),
    }
    mine, owned = {}, []
    for name, (original, tensor) in tensors.items():
        piece = local_piece(tensor)
        box = (piece.offset, tuple(piece.data.shape))
        assert torch.equal(piece.data, part(original, box)), (name, rank, box)
        owned.append(first_of_copies(tensor, ranks))
        if owned[-1]:
            mine[name] = piece
    index, _ = write_pieces(Path(folder) / f"part-{rank}.safetensors", mine)
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, index)
    reader = PieceReader(Path(folder), merge(every))
    for name, (original, tensor) in tensors.items():
        covered = sum(prod(size) for *_, size in reader._index[name]["pieces"])
        assert covered == original.numel(), name
        with torch.no_grad():
            tensor.zero_()
        fill(tensor, reader, name)
        piece = local_piece(tensor)
        assert torch.equal(piece.data, part(original, (piece.offset, tuple(piece.data.shape))))
        if isinstance(tensor, DTensor) and name in ("rows", "both", "even", "rowwise"):
            assert torch.equal(tensor.full_tensor(), original)
    return [tuple(owned)]


def test_pieces_of_dtensors_fit_together(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(4, task_placements, str(tmp_path))
    counts = [sum(x) for x in zip(*(answer[0] for answer in found), strict=True)]
    assert counts == [1, 1, 2, 2, 4, 4, 4, 2, 4, 4, 4, 4]


def task_no_rectangle() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="unreduced"):
        local_piece(DTensor.from_local(torch.zeros(2), mesh, (Partial(),)))
    whole = torch.arange(8.0)
    strided = fully_strided(whole, mesh)
    with pytest.raises(ValueError, match="not one rectangle"):
        local_piece(strided)


def fully_strided(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    from torch.distributed.tensor.placement_types import _StridedShard

    local = whole.view(2, 2, 2)[:, dist.get_rank()].flatten()
    return DTensor.from_local(local, mesh, (_StridedShard(0, split_factor=2),), run_check=False)


def test_what_is_no_rectangle_is_refused(ranks: Ranks) -> None:
    ranks.run(2, task_no_rectangle)
