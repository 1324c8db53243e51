from __future__ import annotations

import functools
import mmap
import os
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from rostra.memory import KINDS, measure, peak_resident_bytes, resident_bytes

torch.set_num_threads(1)
FLOAT = 4
Step = Callable[[], None]


class DispatchCount(TorchDispatchMode):
    """A second count by other means, for eager code: storages as operations return them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, key)
        return result

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _mlp(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
    )


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: int,
    width: int,
    compiled: bool = False,
) -> Step:
    def loss(x: Tensor) -> Tensor:
        return model(x).sum()

    run = torch.compile(loss) if compiled else loss

    def step() -> None:
        run(torch.ones(rows, width)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=2, tie_word_embeddings=True, **shape)
    return LlamaForCausalLM(config)


def _bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
        ),
    ],
)
def test_peak_of_saved_activations_is_as_computed_by_hand(compiled: bool) -> None:
    """Many rows, small layers: the peak is at the start of the backward pass, when the input,
    each tanh, and the gradient of the last one live, and no weight has a gradient yet."""
    layers, width, rows = 6, 32, 16384
    model = _mlp(layers, width)
    optimizer = torch.optim.AdamW(model.parameters())
    step = _step(model, optimizer, rows, width, compiled)
    step()
    with measure(model, optimizer) as memory:
        step()
    states = 2 * _bytes(model) + 2 * layers * FLOAT  # two moments; a counter of steps each
    assert memory.bytes["parameters"] == _bytes(model)
    assert memory.bytes["optimizer"] == states
    assert memory.bytes["activations"] == pytest.approx(
        (1 + layers + 1) * rows * width * FLOAT, rel=0.01
    )
    assert memory.bytes["total"] == sum(memory.bytes[kind] for kind in KINDS)


def test_peak_while_the_optimizer_steps_has_all_gradients_and_its_temporaries() -> None:
    """One row, large layers: the peak is in the optimizer, not in forward or backward."""
    model = _mlp(3, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    step = _step(model, optimizer, 1, 256)
    with measure(model, optimizer) as first:
        step()
    with measure(model, optimizer) as second:
        step()
    for memory in (first, second):
        assert memory.bytes["gradients"] == pytest.approx(_bytes(model), rel=0.01)
        assert memory.bytes["activations"] < 0.02 * _bytes(model)
    # The first step makes the states; they are told from other tensors by their address.
    assert first.bytes["optimizer"] == second.bytes["optimizer"] == _bytes(model)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_agrees_to_the_byte_with_a_dispatch_mode_on_a_llama(micro_batches: int) -> None:
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        for _ in range(micro_batches):
            tokens = torch.arange(4 * 128).remainder(512).view(4, 128)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with DispatchCount() as count:
        step()
    with measure(model, optimizer) as memory:
        step()
    buffers = sum(b.nbytes for b in model.buffers())
    assert memory.bytes["parameters"] == _bytes(model) + buffers  # tied weights once
    resting = memory.bytes["parameters"] + memory.bytes["optimizer"]
    assert memory.bytes["total"] == resting + count.peak
    if micro_batches == 2:  # the second backward starts with all gradients there
        assert memory.bytes["gradients"] == _bytes(model)


def test_master_weights_are_the_optimizers_and_their_gradients_are_gradients() -> None:
    model = _mlp(3, 128).to(torch.bfloat16)
    named = [(name, p) for name, p in model.named_parameters()]
    masters = [nn.Parameter(p.detach().float()) for _, p in named]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9, foreach=False)

    def move(parameter: Tensor, master: Tensor) -> None:
        master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]

    for (_, p), master in zip(named, masters, strict=True):
        p.register_post_accumulate_grad_hook(functools.partial(move, master=master))

    def step() -> None:
        model(torch.ones(1, 128, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure(model, optimizer) as memory:
        step()
    assert memory.bytes["parameters"] == _bytes(model)
    assert memory.bytes["optimizer"] == 4 * _bytes(model)  # fp32 masters and their momentum
    assert memory.bytes["gradients"] == pytest.approx(2 * _bytes(model), rel=0.02)


def test_hooks_do_not_make_compiled_code_compile_again() -> None:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    model = _mlp(2, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    step = _step(model, optimizer, 64, 16, compiled=True)
    step()
    torch._dynamo.utils.counters.clear()
    with torch.compiler.set_stance("fail_on_recompile"), measure(model, optimizer):
        step()
    with torch.compiler.set_stance("fail_on_recompile"):
        step()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_error_in_the_step_comes_through_and_the_instrument_works_again() -> None:
    model = _mlp(1, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ZeroDivisionError), measure(model, optimizer):
        1 / 0  # noqa: B018
    with measure(model, optimizer) as memory:
        _step(model, optimizer, 4, 8)()
    assert memory.bytes["total"] > memory.bytes["parameters"]


def test_standard_error_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    model = _mlp(1, 8)
    with measure(model):
        pass
    assert capfd.readouterr().err == ""


def test_resident_bytes_are_this_process() -> None:
    before = resident_bytes()
    block = mmap.mmap(-1, 64 << 20)  # fresh pages, whatever the C library has kept
    block.write(b"1" * (64 << 20))
    assert resident_bytes() - before > 48 << 20
    assert peak_resident_bytes() >= psutil.Process(os.getpid()).memory_info().rss - (8 << 20)
    block.close()
