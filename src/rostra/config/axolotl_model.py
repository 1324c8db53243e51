"""Axolotl's keys of the model, its tokenizer, precision, quantised bases and adapters."""

from __future__ import annotations

import re
from typing import Any

from rostra.config.axolotl_answers import Part, Rule, answer, to

NO_ADAPTER = "there is no adapter: all parameters are trained"


def base_model_config(part: Part, key: str, value: Any) -> None:
    if value == part.values.get("base_model"):
        part.needless(key, "the model's own")
    else:
        part.refuse(key, "the model's shape is read from its own folder; remove it")


def model_type(part: Part, key: str, value: Any) -> None:
    if re.fullmatch(r"AutoModelForCausalLM|\w+ForCausalLM|\w+LMHeadModel", str(value)):
        part.needless(key, "the model's own files tell its class")
    else:
        part.refuse(key, f"{value} is no causal language model of text alone, as Rostra trains")


def tokenizer_config(part: Part, key: str, value: Any) -> None:
    if value == part.values.get("base_model"):
        part.needless(key, "the model's own")
    else:
        part.put(key, "data.tokenizer.pretrained", value)


def special_tokens(part: Part, key: str, value: Any) -> None:
    if not isinstance(value, dict):
        part.refuse(key, "should be a table of tokens, such as `pad_token: <pad>`")
        return
    inner = Part(part.into, value, (*part.key, key), "data.tokenizer.special")
    answer(inner, SPECIAL_RULES, "special_tokens")


def special_token(part: Part, key: str, value: Any) -> None:
    part.set(key, key, value)


def added_tokens(part: Part, key: str, value: Any) -> None:
    """`tokens`, and `special_tokens.additional_special_tokens`, are one list here."""
    if isinstance(value, dict):  # as Axolotl once had special_tokens
        special_tokens(part, key, value)
        return
    before = part.into.config.get("data", {}).get("tokenizer", {}).get("added", [])
    listed = value if isinstance(value, list) else [value]
    part.put(key, "data.tokenizer.added", [*before, *listed])


def attention(part: Part, key: str, value: Any) -> None:
    """Exact kernels differ in speed alone, which is what `auto` looks for."""
    name = value if key == "attn_implementation" else ATTENTION.get(key, "auto")
    if not value:
        part.needless(key, "switched off")
    elif name in ("eager", "sdpa"):
        part.put(key, "model.attention", name)
    elif "sage" in str(name) or name == "fp8":
        part.refuse(key, "attention is not computed in 8 bits here; use flash_attention_2")
    else:
        part.needless(key, "model.attention: auto takes the fastest exact one that is there")


ATTENTION = {"eager_attention": "eager", "sdp_attention": "sdpa", "sage_attention": "sage"}


def precision(part: Part, key: str, value: Any) -> None:
    """The first of PRECISIONS that is on names the type; `bf16: auto` gives way to any other."""
    on = [k for k in PRECISIONS if part.values.get(k) not in (None, False, "auto")]
    if value is False and (on or key != "bf16"):
        part.needless(key, "switched off")
    elif on and on[0] != key:
        if {"bf16", "fp16"} <= set(on):
            part.refuse(key, f"{on[0]} is on too; keep one of them")
        else:
            part.needless(key, f"{on[0]} goes before it")
    elif key == "float16":
        part.refuse(key, "weights in float16 underflow as they learn; use fp16, or bf16")
    else:
        asked = {False: "fp32", "auto": "auto"}.get(value, PRECISIONS[key])
        part.put(key, "precision.compute", asked)


PRECISIONS = {"fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "bfloat16": "bf16_pure"}
PRECISIONS |= {"float16": "fp16", "float32": "fp32"}


def quantized(part: Part, key: str, value: Any) -> None:
    if not value:
        if key == "load_in_4bit" and part.values.get("adapter") == "qlora":
            part.refuse(key, "adapter: qlora has a 4-bit base; write true, or adapter: lora")
        else:
            part.needless(key, "switched off")
    elif not part.on("adapter"):
        part.refuse(key, "weights of a few bits cannot be trained; add an adapter, or remove it")
    elif key == "load_in_8bit" and part.on("load_in_4bit"):
        part.refuse(key, "load_in_4bit is set too; keep one of them")
    elif key == "load_in_8bit" and part.values.get("adapter") == "qlora":
        part.refuse(key, "adapter: qlora has a 4-bit base; write adapter: lora for one of 8 bits")
    else:
        part.put(key, "quantization.kind", "int8" if key == "load_in_8bit" else _four_bits(part))


def _four_bits(part: Part) -> Any:
    options = part.values.get("bnb_config_kwargs")
    return options.get("bnb_4bit_quant_type", "nf4") if isinstance(options, dict) else "nf4"


def bnb_options(part: Part, key: str, value: Any) -> None:
    own = {"bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"}
    if not isinstance(value, dict):
        part.refuse(key, "should be a table of bitsandbytes' options")
        return
    if "bnb_4bit_use_double_quant" in value:
        part.put(key, "quantization.double", value["bnb_4bit_use_double_quant"])
    else:
        part.merge(key, "the kind of 4 bits goes into quantization.kind")
    for name in set(value) - own - {"bnb_4bit_use_double_quant"}:
        part.refuse(key, f"`{name}` has no counterpart in `quantization`; remove it")


def adapter(part: Part, key: str, value: Any) -> None:
    if not value:
        part.needless(key, NO_ADAPTER)
    elif value not in ("lora", "qlora"):
        part.refuse(key, f"Axolotl's adapter {value!r} is not known here; use lora or qlora")
    else:
        part.put(key, "adapter.kind", "lora")
        if part.values.get("lora_target_modules") in (None, []) and not part.on(
            "lora_target_linear"
        ):
            part.merge(key, "names no modules: adapter.targets is all-linear")
        if value == "qlora" and "load_in_4bit" not in part.values:
            part.put(key, "quantization.kind", _four_bits(part))


def lora(name: str) -> Rule:
    """The rule of a key that is for LoRA alone."""

    def rule(part: Part, key: str, value: Any) -> None:
        if not part.on("adapter"):
            part.needless(key, NO_ADAPTER)
        else:
            part.put(key, f"adapter.{name}", value)

    return rule


def target_linear(part: Part, key: str, value: Any) -> None:
    if not part.on("adapter"):
        part.needless(key, NO_ADAPTER)
    elif value:
        ends = _ends(part)
        part.put(key, "adapter.targets", ["all-linear", *ends] if ends else "all-linear")
    else:
        part.needless(key, "switched off")


def target_modules(part: Part, key: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if not part.on("adapter"):
        part.needless(key, NO_ADAPTER)
    elif value == "all-linear" or not value:
        part.put(key, "adapter.targets", "all-linear")
    elif isinstance(value, str) and not re.fullmatch(r"[\w.]+", value):
        if part.on("lora_target_linear"):
            part.refuse(key, "a pattern, and lora_target_linear is on too; keep one of them")
        else:
            part.put(key, "adapter.targets", value, "a pattern of whole names")
    elif odd := [name for name in names if not re.fullmatch(r"[\w.]+", str(name))]:
        part.refuse(key, f"{odd[0]!r} is a pattern in a list; give one pattern, or names alone")
    elif not part.on("lora_target_linear"):
        part.put(key, "adapter.targets", names)
    elif _ends(part):
        part.merge(key, "embeddings and head beside all that lora_target_linear takes in")
    else:
        part.needless(key, "lora_target_linear takes them in")


def _ends(part: Part) -> list[str]:
    """The embeddings and the head among the names of modules: no all-linear takes them in."""
    named = part.values.get("lora_target_modules") or []
    names = named if isinstance(named, list) else [named]
    return [str(name) for name in names if re.search("embed|head|wte", str(name))]


def lora_plus(part: Part, key: str, value: Any) -> None:
    embeddings = [name for name in _ends(part) if "head" not in name]
    if not part.on("adapter"):
        part.needless(key, NO_ADAPTER)
    elif embeddings:
        part.refuse(
            key,
            f"around {embeddings[0]} Axolotl's LoRA+ learns at loraplus_lr_embedding, 1e-6 unless "
            "given; embeddings have no rate of their own here: remove one of the two",
        )
    else:
        part.put(key, "adapter.lora_plus_ratio", value)


def lora_plus_embedding(part: Part, key: str, value: Any) -> None:
    if part.number(key, value) == 1e-6:
        part.needless(key, "embeddings are no targets")
    else:
        part.refuse(key, "embeddings have no learning rate of their own; remove it")


def initial_lora(part: Part, key: str, value: Any) -> None:
    if value is True:
        part.needless(key, "as LoRA begins here too: A random, B zero")
    else:
        part.refuse(key, "LoRA begins with A random and B zero; remove it")


_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
SPECIAL_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SPECIAL, special_token),
    "additional_special_tokens": added_tokens,
}

RULES: dict[str, Rule] = {
    "base_model": to("model.pretrained"),
    "base_model_config": base_model_config,
    "model_type": model_type,
    "tokenizer_config": tokenizer_config,
    "special_tokens": special_tokens,
    "tokens": added_tokens,
    "attn_implementation": attention,
    **dict.fromkeys(
        ("flash_attention", "xformers_attention", "flex_attention", *ATTENTION), attention
    ),
    **dict.fromkeys(PRECISIONS, precision),
    "load_in_8bit": quantized,
    "load_in_4bit": quantized,
    "bnb_config_kwargs": bnb_options,
    "adapter": adapter,
    "lora_r": lora("rank"),
    "lora_alpha": lora("alpha"),
    "lora_dropout": lora("dropout"),
    "lora_modules_to_save": lora("modules_to_save"),
    "lora_model_dir": lora("pretrained"),
    "peft_use_dora": lora("dora"),
    "peft_use_rslora": lora("rslora"),
    "loraplus_lr_ratio": lora_plus,
    "loraplus_lr_embedding": lora_plus_embedding,
    "lora_target_linear": target_linear,
    "lora_target_modules": target_modules,
    "peft_init_lora_weights": initial_lora,
}
