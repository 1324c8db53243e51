"""AdamW with states of 8 and 4 bits: near AdamW, small, saved bit by bit, sharded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rostra.config.schema import OptimizerSection
from rostra.errors import RequestError
from rostra.hardware import can_compile
from rostra.optim import Optimizers, make_optimizers
from rostra.optim.low_bit import SLOTS, Part
from rostra.pieces import local_piece
from support import need

TORCHAO = ["int8", "int4", "fp8"]
SECTION = OptimizerSection(learning_rate=1e-2)
State = tuple[dict[str, Tensor], dict[str, Any]]


def model_of(rows: int = 64) -> nn.Module:
    """Matrices of 8,192 and 64 * rows values, and a norm, which is too small for blocks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(rows, 64), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.LayerNorm(64)
    )


def optimizers_of(model: nn.Module, states: Any) -> Optimizers:
    return make_optimizers(SECTION, list(model.named_parameters()), set(), states)


def train(
    model: nn.Module, optimizers: Optimizers, steps: range, bring: Callable[[], None] | None = None
) -> list[float]:
    losses = []
    for step in steps:
        optimizers.set_fraction(1 - step / 20)
        tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if bring is not None:
            bring()
        optimizers.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def on_disk(state: State, folder: Path) -> State:
    save_file({k: v.contiguous() for k, v in state[0].items()}, folder / "state.safetensors")
    return load_file(folder / "state.safetensors"), state[1]


def equal(one: State, two: State) -> bool:
    assert one[0].keys() == two[0].keys()
    return one[1] == two[1] and all(
        torch.equal(v.flatten().view(torch.uint8), two[0][k].flatten().view(torch.uint8))
        for k, v in one[0].items()
    )


@pytest.mark.parametrize("states", TORCHAO)
def test_training_is_near_adamws(states: str) -> None:
    """Losses fall from 4.4 to 0.3, and are within 0.05 of AdamW's, or 0.2 with fewer bits: fp8
    has no room for both the small and the large of a second moment."""
    plain, small = model_of(), model_of()
    expected = train(plain, optimizers_of(plain, "fp32"), range(15))
    found = train(small, optimizers_of(small, states), range(15))
    assert expected[-1] < expected[0] / 2
    assert found == pytest.approx(expected, abs=0.05 if states == "int8" else 0.2)


@pytest.mark.parametrize(
    ("states", "expected"), [("int8", 2 + 8 / 256), ("int4", 1 + 8 / 128), ("fp8", 2 + 8 / 256)]
)
def test_states_have_the_bytes_of_their_kind(states: str, expected: float) -> None:
    model = model_of()
    optimizers = optimizers_of(model, states)
    train(model, optimizers, range(1))
    tensors, _ = optimizers.state()
    matrices = {k: v for k, v in tensors.items() if k.startswith("1.weight/exp")}
    found = sum(v.nbytes for k, v in matrices.items() if not k.endswith(".qmap"))
    assert found / (64 * 128) == expected
    assert tensors["4.weight/exp_avg"].dtype == torch.float32  # too small for blocks


@pytest.mark.parametrize("states", TORCHAO)
def test_state_comes_back_bit_by_bit(states: str, tmp_path: Path) -> None:
    one, two = model_of(), model_of()
    first, second = optimizers_of(one, states), optimizers_of(two, states)
    train(one, first, range(3))
    two.load_state_dict(one.state_dict())
    second.load_state(*on_disk(first.state(), tmp_path))
    assert equal(first.state(), second.state())
    assert train(one, first, range(3, 6)) == train(two, second, range(3, 6))


@pytest.mark.parametrize("after", ["fp32", *TORCHAO])
@pytest.mark.parametrize("before", ["fp32", *TORCHAO])
def test_a_run_goes_on_with_states_of_another_kind(before: str, after: str) -> None:
    one, two = model_of(), model_of()
    first, second = optimizers_of(one, before), optimizers_of(two, after)
    train(one, first, range(3))
    two.load_state_dict(one.state_dict())
    tensors, values = first.state()
    second.load_state({k: v.clone() for k, v in tensors.items()}, values)
    tolerance = 0.1 if "int4" in (before, after) else 0.02
    expected = train(one, first, range(3, 6))
    assert train(two, second, range(3, 6)) == pytest.approx(expected, rel=tolerance)


def test_bitsandbytes_and_torchao_have_one_state() -> None:
    """What a CUDA device and a CPU make of int8: the same codes, and each loads the other's."""
    library = importlib.import_module("bitsandbytes.optim")
    names = dict.fromkeys(("w", "odd", "norm"))
    shapes = {"w": (64, 96), "odd": (41, 101), "norm": (64,)}
    for rounds in range(2):
        torch.manual_seed(rounds)
        named = [(name, nn.Parameter(torch.randn(shapes[name]))) for name in names]
        theirs = [(name, nn.Parameter(p.detach().clone())) for name, p in named]
        gradients = [[torch.randn_like(p) for _, p in named] for _ in range(4)]
        section = OptimizerSection(learning_rate=1e-2, weight_decay=0)
        ours = make_optimizers(section, named, set(), "int8")
        arguments = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0}
        part = library.AdamW8bit([p for _, p in theirs], **arguments)
        other = Optimizers([part], {p: name for name, p in theirs}, "int8")

        def step(both: Any, steps: list[list[Tensor]]) -> None:
            for optimizers, pairs in both:
                for grads in steps:
                    for (_, p), grad in zip(pairs, grads, strict=True):
                        p.grad = grad.clone()
                    optimizers.step()

        one, two = (ours, named), (other, theirs)
        if rounds:
            one, two = two, one
        step([one], gradients[:2])
        two[0].load_state(*one[0].state())
        assert float(two[0].state()[0]["w/step"]) == 2
        for key in SLOTS:
            for inner in ("codes", "scale"):
                name = f"w/{key}.{inner}"
                assert torch.equal(one[0].state()[0][name], two[0].state()[0][name])
        for (_, p), (_, q) in zip(one[1], two[1], strict=True):
            q.data.copy_(p.data)
        step([one, two], gradients[2:])
        for (name, p), (_, q) in zip(one[1], two[1], strict=True):
            assert torch.allclose(p, q, atol=2e-3), name


def sharded_training(
    states: str, rows: int, before: State | None = None
) -> tuple[list[float], dict[str, list[tuple[Any, Any, Tensor]]]]:
    """Losses, and of each state its pieces: whole shape, offset and values. The optimizer has
    what each rank holds, as plain tensors."""
    mesh = init_device_mesh("cpu", (2,))
    model = model_of(rows)
    for layer in (model[0], model[1], model[3], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    parameters: Any = dict(model.named_parameters())
    held, named = {}, []
    for name, p in parameters.items():
        piece = local_piece(p)
        held[name] = Part(piece.shape, piece.offset, 2)
        named.append((name, nn.Parameter(piece.data)))
    optimizers = make_optimizers(SECTION, named, set(), states, held=held)  # type: ignore[arg-type]
    if before is not None:
        optimizers.load_state(*before)

    def bring() -> None:
        for name, value in named:
            value.grad = parameters[name].grad.to_local()

    losses = train(model, optimizers, range(8), bring)
    tensors, values = optimizers.state()
    again = make_optimizers(SECTION, named, set(), states, held=held)  # type: ignore[arg-type]
    again.load_state({k: v.clone() for k, v in tensors.items()}, values)  # of this part alone
    assert equal((tensors, values), again.state())
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, pieces_of(tensors, held))
    whole = joined(everyone)
    again = make_optimizers(SECTION, named, set(), states, held=held)  # type: ignore[arg-type]
    again.load_state(whole, values)
    assert equal((tensors, values), again.state())
    return losses, whole


def pieces_of(tensors: dict[str, Tensor], held: dict[str, Part]) -> dict[str, Any]:
    pieces = {}
    for key, tensor in tensors.items():
        part = held[key.rpartition("/")[0]]
        shared = tensor.dim() == 0 or key.endswith(".qmap")
        place = (tuple(tensor.shape), (0,) * tensor.dim()) if shared else part.place(tensor.shape)
        pieces[key] = (*place, tensor.dtype, tensor.contiguous().view(_plain(tensor)))
    return pieces


def joined(everyone: list[dict[str, Any]]) -> dict[str, Tensor]:
    whole = {}
    assert everyone[0].keys() == everyone[1].keys()
    for key, (shape, _, dtype, tensor) in everyone[0].items():
        whole[key] = torch.empty(shape, dtype=tensor.dtype)
        for pieces in everyone:
            assert pieces[key][0] == shape
            _, offset, _, values = pieces[key]
            box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            whole[key][box] = values
        whole[key] = whole[key].view(dtype)
    return whole


def _plain(tensor: Tensor) -> torch.dtype:
    """float8 cannot be sent as an object."""
    return torch.uint8 if tensor.dtype == torch.float8_e4m3fn else tensor.dtype


@pytest.mark.parametrize("states", TORCHAO)
def test_parts_of_whole_blocks_train_as_one_process(states: str, ranks: Any) -> None:
    """Blocks are the same on one rank and two, and so are losses (to rounding) and states."""
    model = model_of(128)
    optimizers = optimizers_of(model, states)
    expected = train(model, optimizers, range(8))
    losses, found = ranks.run(2, sharded_training, states, 128)[0]
    assert losses == pytest.approx(expected, abs=1e-5)
    state, _ = optimizers.state()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in found.items()}
    for key in (k for k in state if k.endswith(".codes")):  # rounding may tip one over
        unequal = (state[key].float() != found[key].float()).float().mean().item()
        assert unequal < 0.01, key


def test_parts_that_are_not_whole_blocks_keep_float_states(ranks: Any) -> None:
    """135 rows are 68 and 67, of which the second is not whole blocks: no rank has codes."""
    model = model_of(135)
    expected = train(model, optimizers_of(model, "int8"), range(8))
    losses, whole = ranks.run(2, sharded_training, "int8", 135)[0]
    assert losses == pytest.approx(expected, rel=0.05)
    assert whole["0.weight/exp_avg"].dtype == torch.float32
    optimizers = optimizers_of(model_of(135), "int8")
    optimizers.load_state(whole, {})  # into one process
    tensors, _ = optimizers.state()
    assert tensors["1.weight/exp_avg.codes"].dtype == torch.uint8


@pytest.mark.parametrize("states", ["fp32", "int4", "int8"])
def test_what_one_process_saved_loads_into_parts(states: str, ranks: Any) -> None:
    model = model_of(136)
    optimizers = optimizers_of(model, "int8")
    train(model, optimizers, range(2))
    ranks.run(2, sharded_training, states, 136, optimizers.state())


def test_codes_of_the_whole_load_into_a_stretch() -> None:
    """ZeRO-1 updates stretches of flattened parameters."""
    model = model_of()
    optimizers = optimizers_of(model, "int8")
    train(model, optimizers, range(2))
    stretch = nn.Parameter(torch.zeros(1000))
    held = {"1.weight": Part((128, 64), (1500,), 2)}
    part = make_optimizers(SECTION, [("1.weight", stretch)], set(), held=held)
    tensors, _ = optimizers.state()
    part.load_state({k: v for k, v in tensors.items() if k.startswith("1.weight/")}, {})
    whole = make_optimizers(SECTION, [("1.weight", nn.Parameter(torch.zeros(128, 64)))], set())
    whole.load_state({k: v for k, v in tensors.items() if k.startswith("1.weight/")}, {})
    expected = whole.state()[0]["1.weight/exp_avg"].flatten()[1500:2500]
    assert torch.equal(part.state()[0]["1.weight/exp_avg"], expected)


def test_a_compiled_step_is_the_same() -> None:
    need(can_compile(torch.device("cpu")), "a C++ compiler")
    torch.manual_seed(0)
    weight, gradient = torch.randn(64, 64), torch.randn(64, 64)
    found = []
    for compiled in (False, True):
        parameter = nn.Parameter(weight.clone())
        optimizers = make_optimizers(SECTION, [("w", parameter)], set(), "int8", compiled)
        parameter.grad = gradient.clone()
        optimizers.step()
        optimizers.step()
        found.append(parameter.detach())
    assert torch.allclose(*found, atol=1e-5)


def test_other_optimizers_have_no_low_bit_states() -> None:
    named = list(model_of().named_parameters())
    with pytest.raises(RequestError, match=r"optimizer\.name is lion; use fp32"):
        make_optimizers(OptimizerSection(name="lion"), named, set(), "int8")


def test_paged_states_need_cuda() -> None:
    with pytest.raises(RequestError, match=r"paged_int8: .* are on cpu; use int8"):
        optimizers_of(model_of(), "paged_int8")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(RequestError, match=r'torchao.*pip install "rostra\[lowbit\]"'):
        optimizers_of(model_of(), "int4")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("states", ["int8", "paged_int8", "int4", "fp8"])
def test_on_cuda(states: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(512, 512) for _ in range(6)]
    start = torch.randn(512, 512)

    def run(kind: str, steps: range, weight: Tensor, state: State | None) -> tuple[Tensor, State]:
        parameter = nn.Parameter(weight.cuda())
        optimizers = make_optimizers(SECTION, [("w", parameter)], set(), kind)  # type: ignore[arg-type]
        if state is not None:
            optimizers.load_state(*state)
        for step in steps:
            parameter.grad = gradients[step].cuda()
            optimizers.step()
        torch.cuda.synchronize()
        return parameter.detach().cpu(), on_disk(optimizers.state(), tmp_path)

    expected, _ = run("fp32", range(6), start, None)
    straight, _ = run(states, range(6), start, None)
    half, state = run(states, range(3), start, None)
    resumed, _ = run(states, range(3, 6), half, state)
    assert torch.equal(straight, resumed)
    assert (straight - expected).abs().mean() < 0.2 * (expected - start).abs().mean()
