"""Virtual tokens: as peft has them, in packed samples too, under every kernel of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_of_tests import TOKENS, adapted, saved, tiny, trained
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rostra.adapt import Adapter, attend_to_prefix, virtual_ids
from rostra.batch import IGNORE
from rostra.config.tuning import AdapterTable
from rostra.models import create_model
from rostra.models.attention import register
from rostra.optim import cross_entropy_sum

COUNT = 3


def placed(example: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and positions of an example with its virtual tokens, no targets, before it."""
    ids = torch.cat([virtual_ids(COUNT), example])
    labels = torch.cat([torch.full((COUNT,), IGNORE), example[1:], torch.tensor([IGNORE])])
    return ids, labels, torch.arange(len(ids))


def run(model: PreTrainedModel, kind: str, *columns: Tensor) -> Tensor:
    """The loss, summed over all targets, of ids, labels and positions [b, T]."""
    ids, labels, positions = columns
    more = {"virtual_ids": ids} if kind == "prefix" else {}
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits
    return cross_entropy_sum(logits, labels)


def made(
    family: str, kind: Any, noise: float = 0.3, kernel: str = "eager", **values: Any
) -> tuple[PreTrainedModel, Adapter]:
    base = create_model(tiny(family, **values), seed=1)
    model, adapter = adapted(base, AdapterTable(kind=kind, virtual_tokens=COUNT), noise=noise)
    register()
    model.set_attn_implementation(kernel)
    if kind == "prefix":
        attend_to_prefix(model)
    return model, adapter


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3_text"])
def test_loss_and_gradients_are_those_of_peft(family: str, kind: str, tmp_path: Path) -> None:
    values = {"num_attention_heads": 4, "num_key_value_heads": 2} if family == "llama" else {}
    model, adapter = made(family, kind, **values)
    base = create_model(tiny(family, **values), seed=1, attention="eager")
    base.save_pretrained(tmp_path / "base")
    folder = saved(model, adapter, tmp_path / "adapter", str(tmp_path / "base"))
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    peft = PeftModel.from_pretrained(fresh, folder).eval()
    learned = peft.prompt_encoder["default"].embedding.weight.requires_grad_(True)
    for example in TOKENS:
        columns = [x[None] for x in placed(example)]
        loss = run(model, kind, *columns)
        labels = example[None].clone()
        labels[0, 0] = IGNORE  # which a virtual token would foretell
        theirs = peft(input_ids=example[None], labels=labels).loss * (len(example) - 1)
        torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-5)
        for one in (loss, theirs):
            one.backward()
    ours = {name: p.grad for name, p in trained(model).items()}
    grads = saved_gradients(adapter, ours, tmp_path / "gradients")
    expected = learned.grad
    assert expected is not None and expected.abs().max() > 1e-3
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5)


def saved_gradients(adapter: Adapter, grads: dict[str, Any], folder: Path) -> Tensor:
    """Gradients laid out as peft lays out what they are of."""
    from safetensors.torch import load_file

    from rostra.adapt import save_adapter

    folder.mkdir()
    save_adapter(folder, grads, adapter, None)
    return load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "rostra_blocked"])
def test_packed_examples_are_as_alone(kernel: str, kind: str) -> None:
    values = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model, _ = made("llama", kind, kernel=kernel, **values)
    examples = [TOKENS[0], TOKENS[1][:5], TOKENS[0][2:]]
    alone, _ = made("llama", kind, **values)
    expected = sum(run(alone, kind, *(x[None] for x in placed(e))) for e in examples)
    packed = [torch.cat(parts)[None] for parts in zip(*map(placed, examples), strict=True)]
    found = run(model, kind, *packed)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for loss in (expected, found):
        loss.backward()
    for name, parameter in trained(model).items():
        theirs = trained(alone)[name].grad
        assert theirs is not None and theirs.abs().max() > 1e-3
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-5)


def test_a_prompt_begins_as_its_text() -> None:
    base = create_model(tiny("gemma3_text"), seed=1)
    table = AdapterTable(kind="prompt", virtual_tokens=5)
    model, _ = adapted(base, table, prompt=[7, 9])
    vectors = next(iter(trained(model).values()))
    embedded = base.get_input_embeddings()(torch.tensor([7, 9, 7, 9, 7]))
    torch.testing.assert_close(vectors, embedded)
    drawn = next(iter(trained(adapted(base, table)[0]).values()))
    rows = base.get_input_embeddings()(torch.arange(64))
    assert all(any(torch.allclose(row, vector) for row in rows) for vector in drawn)


def test_attention_without_the_ids_is_an_error() -> None:
    model, _ = made("llama", "prefix")
    with pytest.raises(RuntimeError, match="virtual_ids"):
        model(TOKENS)
