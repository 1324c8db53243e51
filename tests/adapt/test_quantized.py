"""Quantised layers compute what bitsandbytes' do, and keep no float weight."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import AutoConfig, BitsAndBytesConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from rostra.adapt import quantized_format, quantized_weights
from rostra.adapt.quantized import QuantizedLinear, freeze_base, quantize_model
from rostra.adapt.quantized_format import Format, dequantize, quantize
from rostra.adapt.quantized_weights import (
    DequantizedWeights,
    QuantizedWeights,
    cached_weights,
    folder_identity,
)
from rostra.config.tuning import QuantizationTable
from rostra.errors import RequestError
from rostra.memory import measure
from rostra.models import create_model, model_on_meta
from rostra.models.experts import autocast_experts
from rostra.models.weights import FolderWeights
from rostra.pieces import Reader, Tensors, fill
from rostra.store import MANIFEST

KINDS = [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False)]
FOUR_BITS = KINDS[:-1]


def layer_of(form: Format, weight: Tensor, bias: Tensor | None = None) -> QuantizedLinear:
    layer = QuantizedLinear(form, None if bias is None else nn.Parameter(bias, False))
    stored = quantize(form, lambda start, stop: weight[start:stop])
    for name, tensor in stored.items():
        made = tensor if name == "code" else nn.Parameter(tensor, requires_grad=False)
        setattr(layer, name, made)
    return layer


def shape_of(size: int = 64) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=96,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
    )


def filled(model: PreTrainedModel, weights: Reader) -> PreTrainedModel:
    """`model`, which is on the meta device, with its weights."""
    model.to_empty(device="cpu")
    model.tie_weights()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fill(tensor, weights, name)
    return model


def quantized_of(
    shape: LlamaConfig, base: Reader, **table: Any
) -> tuple[PreTrainedModel, QuantizedWeights]:
    model = model_on_meta(shape)
    quantize_model(model, QuantizationTable(**table))
    return model, QuantizedWeights(base, model)


class Counted:
    """A Reader that counts the numbers of weights read from it."""

    def __init__(self, inner: Reader) -> None:
        self.inner, self.numbers, self.largest = inner, 0, 0

    def names(self) -> Iterable[str]:
        return self.inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.inner.shape(name)

    def read(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        found = self.inner.read(name, offset, size)
        self.numbers += found.numel()
        self.largest = max(self.largest, found.nbytes)
        return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    create_model(shape_of(), 1).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "double"), FOUR_BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_products_are_those_of_bitsandbytes(
    kind: str, double: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the weight is quantised 64 rows at a time; blocks cross its rows of 110."""
    monkeypatch.setattr(quantized_format, "_CHUNK", 64 * 110)
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(*size).to(dtype) for size in ((300, 110), (300,), (7, 110)))
    theirs = bnb.nn.Linear4bit(110, 300, compute_dtype=dtype, quant_type=kind)
    theirs.weight = bnb.nn.Params4bit(
        weight.clone(), requires_grad=False, compress_statistics=double, quant_type=kind
    )
    theirs.bias = nn.Parameter(bias)
    theirs.to("cpu")
    form = Format(kind, double, (300, 110))  # type: ignore[arg-type]
    ours = layer_of(form, weight, bias)
    expected = bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    assert torch.equal(dequantize(kind, ours._stored(), dtype), expected)
    rounding = 0.3 if dtype == torch.bfloat16 else 1e-4  # of sums around 10; theirs cast scales
    assert (ours(x) - theirs(x)).abs().max() < rounding
    for name, (shape, stored) in form.tensors().items():
        assert (tuple(getattr(ours, name).shape), getattr(ours, name).dtype) == (shape, stored)


def test_int8_is_within_half_a_step() -> None:
    weight = torch.randn(20, 33)
    weight[3] = 0
    layer = layer_of(Format("int8", False, (20, 33)), weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((layer.weight - weight).abs() <= step * 0.5001).all()


@pytest.mark.parametrize(("kind", "compiled"), [("nf4", False), ("int8", False), ("nf4", True)])
def test_gradients_are_exact_and_no_float_weight_stays(kind: str, compiled: bool) -> None:
    size = 256
    form = Format(kind, kind == "nf4", (size, size))  # type: ignore[arg-type]
    net = nn.Sequential(*(layer_of(form, torch.randn(size, size) / 16) for _ in range(6)))
    plain = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in net))
    for layer, other in zip(net, plain, strict=True):
        other.weight = nn.Parameter(layer.weight, requires_grad=False)
    run = torch.compile(net, dynamic=False) if compiled else net
    x = torch.randn(4, size, requires_grad=True)
    run(x).square().sum().backward()
    found, x.grad = x.grad, None
    plain(x).square().sum().backward()
    assert torch.allclose(found, x.grad, rtol=1e-5, atol=1e-5)
    x.grad = None
    with measure(net) as memory:
        run(x).square().sum().backward()
    # one weight at a time, twice that of int8 on the CPU, beside activations of 4 rows
    assert memory.bytes["activations"] < 2 * size * size * 4 + 20 * x.nbytes
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        run(x)
    assert saved and not any(t.is_floating_point() and t.numel() >= size * size for t in saved)


def test_autocast_decides_what_is_computed_in() -> None:
    weight = torch.randn(32, 64)
    layer = layer_of(Format("nf4", True, (32, 64)), weight, torch.randn(32))
    x = torch.randn(3, 5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        expected = functional.linear(x, layer.weight, layer.bias)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(y, expected, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32
    layer.to(torch.bfloat16)  # which a scale would not survive
    assert torch.equal(layer.weight, layer_of(layer.form, weight).weight)


def test_a_model_as_transformers_quantises_it(saved: Path) -> None:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    theirs = LlamaForCausalLM.from_pretrained(
        saved, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    )
    model, weights = quantized_of(shape_of(), FolderWeights(saved, shape_of()), kind="nf4")
    ours = filled(model, weights)
    checked = 0
    for name, module in theirs.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            expected = bnb.functional.dequantize_4bit(module.weight.data, state)
            assert torch.equal(ours.get_submodule(name).weight, expected), name
            checked += 1
    assert checked == 14
    tokens = torch.arange(1, 20)[None]
    assert torch.allclose(ours(tokens).logits, theirs(tokens).logits.float(), atol=1e-4)
    plain = DequantizedWeights(weights, model)
    assert set(plain.names()) == set(weights.weights.names())
    name = "model.layers.1.mlp.down_proj.weight"
    part = plain.read(name, (3, 8), (20, 40))
    assert torch.equal(part, ours.get_submodule(name.removesuffix(".weight")).weight[3:23, 8:48])


def test_only_a_part_of_a_float_weight_exists_while_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peak is the packed model and one weight's worth of numbers in work."""
    monkeypatch.setattr(quantized_format, "_CHUNK", 64 * 64)
    shape = shape_of(256)
    base = Counted(Tensors(dict(create_model(shape, 1).named_parameters())))
    model, weights = quantized_of(shape, base, kind="nf4")
    named = (*model.named_parameters(), *model.named_buffers())  # as they are filled in
    packed = {n: p for n, p in named if not p.is_floating_point()}
    size = sum(p.nbytes for p in packed.values())
    largest = 4 * 2 * 256 * 256  # bytes of one weight in float32
    filled_model: dict[str, Tensor] = {}
    with measure(nn.Linear(1, 1)) as memory:
        for name, p in packed.items():
            filled_model[name] = weights.read(name, (0,) * p.dim(), tuple(p.shape))
    assert memory.bytes["total"] < size + largest
    assert base.largest <= 64 * 512 * 4
    assert base.numbers == sum(f.shape[0] * f.shape[1] for f in weights.forms.values())


def test_names_shapes_and_parts_are_those_of_the_model(saved: Path) -> None:
    base = FolderWeights(saved, shape_of())
    for table in ({"kind": "int8"}, {"kind": "fp4", "double": False}, {"kind": "nf4"}):
        model, weights = quantized_of(shape_of(), base, skip=["1.mlp.up_proj", "k_proj"], **table)
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        assert set(named) == set(weights.names())
        assert all(tuple(t.shape) == weights.shape(name) for name, t in named.items())
        assert type(model.get_submodule("model.layers.1.mlp.up_proj")) is nn.Linear
        assert type(model.get_submodule("model.layers.0.self_attn.k_proj")) is nn.Linear
        assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is QuantizedLinear
        assert type(model.lm_head) is nn.Linear
        name = "model.layers.0.mlp.up_proj.packed"
        whole = weights.read(name, (0, 0), weights.shape(name))
        weights.read("model.layers.1.mlp.down_proj.scales", (0,), (3,))
        assert torch.equal(weights.read(name, (5, 2), (9, 30)), whole[5:14, 2:32])


def test_what_cannot_be_quantised_is_refused() -> None:
    from transformers import GPT2Config

    table = QuantizationTable(kind="nf4")
    with pytest.raises(RequestError, match=r"gpt2's layers \(such as 0\..*c_fc.weight\)"):
        quantize_model(model_on_meta(GPT2Config(n_layer=2, n_embd=32, n_head=4)), table)
    with pytest.raises(RequestError, match=r"skip: 'gate' names no linear .* down_proj, gate_proj"):
        quantize_model(model_on_meta(shape_of()), QuantizationTable(kind="nf4", skip=("gate",)))
    odd = LlamaConfig(
        vocab_size=8, hidden_size=12, intermediate_size=25, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    with pytest.raises(RequestError, match=r"0.mlp.down_proj takes 25; name it in quant"):
        quantize_model(model_on_meta(odd), table)
    quantize_model(model_on_meta(odd), QuantizationTable(kind="int8"))


def test_the_copy_on_disk(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised once; read again with the same bytes; made anew when it is broken, or the
    weights or settings are others."""
    monkeypatch.setattr(quantized_weights, "_FILE", 9000)  # several files
    base = Counted(FolderWeights(saved, shape_of()))
    model, weights = quantized_of(shape_of(), base, kind="nf4")
    matrices = sum(f.shape[0] * f.shape[1] for f in weights.forms.values())
    identity = folder_identity(saved)
    names = [n for n, p in model.named_parameters() if not p.is_floating_point()]

    def read(reader: Reader) -> list[Tensor]:
        return [reader.read(n, (0,) * len(s := reader.shape(n)), s) for n in names]

    first = read(cached_weights(weights, identity, tmp_path))
    assert base.numbers == matrices
    (folder,) = (tmp_path / "quantized").iterdir()
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    cached = cached_weights(weights, identity, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(first, read(cached), strict=True))
    assert set(cached.names()) == set(weights.names())
    assert base.numbers == matrices  # nothing was quantised
    assert torch.equal(cached.read(names[0], (7, 3), (8, 20)), first[0][7:15, 3:23])
    content = files[1].read_bytes()
    files[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = read(cached_weights(weights, identity, tmp_path))
    assert base.numbers == 2 * matrices
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (folder / MANIFEST).unlink()  # as a machine that went down leaves it
    cached_weights(weights, identity, tmp_path)
    assert base.numbers == 3 * matrices
    other = quantized_of(shape_of(), base, kind="nf4", double=False)[1]
    cached_weights(other, identity, tmp_path)
    changed = {**identity, "model.safetensors": "another hash"}
    cached_weights(weights, changed, tmp_path)
    assert base.numbers == 5 * matrices
    assert len(list((tmp_path / "quantized").iterdir())) == 3


def test_frozen_experts_in_16_bits_give_the_same_loss() -> None:
    shape = AutoConfig.for_model(
        "gpt_oss", vocab_size=96, hidden_size=32, intermediate_size=64, head_dim=8,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    made = create_model(shape, 1).to(torch.bfloat16)
    base = Tensors(dict(made.named_parameters()) | dict(create_model(shape, 1).named_buffers()))
    tokens = torch.arange(24).reshape(2, 12)
    losses, sizes = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = model_on_meta(shape).requires_grad_(False)
        freeze_base(model, dtype)
        autocast_experts(model)
        filled(model, base)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(tokens, labels=tokens).loss)
        sizes.append(sum(p.nbytes for p in model.model.layers[0].mlp.experts.parameters()))
    assert torch.equal(*losses)
    assert sizes[1] == sizes[0] / 2


@pytest.mark.parametrize("tied", [False, True])
def test_a_frozen_base_in_16_bits_gives_the_same_loss(saved: Path, tied: bool) -> None:
    shape = shape_of()
    shape.tie_word_embeddings = tied
    made = create_model(shape, 1).to(torch.bfloat16)
    base = Tensors(dict(made.named_parameters()) | dict(create_model(shape, 1).named_buffers()))
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    losses, sizes = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = model_on_meta(shape).requires_grad_(False)
        freeze_base(model, dtype)
        filled(model, base)
        for norm in (m for n, m in model.named_modules() if n.endswith("norm")):
            norm.weight.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append((loss, model.model.norm.weight.grad, model.model.layers[0].input_layernorm))
        sizes.append(sum(p.nbytes for p in model.parameters()))
        assert model.model.norm.weight.dtype == torch.float32
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])
    assert torch.equal(losses[0][2].weight.grad, losses[1][2].weight.grad)
    assert sizes[1] < 0.53 * sizes[0]
