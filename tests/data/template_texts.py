"""What the named chat templates make of one conversation, written by hand."""

from __future__ import annotations

END = "<|endoftext|>"
# What each template makes of: Be brief. / Q / A / Q2 / A2 (« and » around what is trained), and
# what asks for an answer. Models of these families were tuned to these texts.
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
HEAD4 = "<|header_start|>{}<|header_end|>\n\n"
COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>"
COHERE_END = "<|END_OF_TURN_TOKEN|>"
IM, IM_END = "<|im_start|>{}\n", "<|im_end|>\n"
TEXTS = {
    "alpaca": "<s>Be brief.\n\n### Instruction:\nQ\n\n### Response:\n«A</s>»\n\n"
    "### Instruction:\nQ2\n\n### Response:\n«A2</s>»\n\n",
    "chatml": f"<s>{IM}Be brief.{IM_END}{IM}Q{IM_END}{IM}«A<|im_end|>»\n"
    f"{IM}Q2{IM_END}{IM}«A2<|im_end|>»\n",
    "cohere": f"<s>{COHERE}Be brief.{COHERE_END}{COHERE}Q{COHERE_END}{COHERE}«A{COHERE_END}»"
    f"{COHERE}Q2{COHERE_END}{COHERE}«A2{COHERE_END}»",
    "deepseek_v2": "<s>Be brief.\n\n"
    "<｜User｜>Q<｜Assistant｜>«A</s>»<｜User｜>Q2<｜Assistant｜>«A2</s>»",
    "deepseek_v3": "<s>Be brief."
    "<｜User｜>Q<｜Assistant｜>«A</s>»<｜User｜>Q2<｜Assistant｜>«A2</s>»",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|]Q\n[|assistant|]«A[|endofturn|]»\n"
    "[|user|]Q2\n[|assistant|]«A2[|endofturn|]»\n",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nQ<end_of_turn>\n<start_of_turn>model\n"
    "«A<end_of_turn>»\n<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\n"
    "«A2<end_of_turn>»\n",
    "llama3": f"<s>{HEAD}Be brief.<|eot_id|>{HEAD}Q<|eot_id|>{HEAD}«A<|eot_id|>»"
    f"{HEAD}Q2<|eot_id|>{HEAD}«A2<|eot_id|>»",
    "llama4": f"<s>{HEAD4}Be brief.<|eot|>{HEAD4}Q<|eot|>{HEAD4}«A<|eot|>»"
    f"{HEAD4}Q2<|eot|>{HEAD4}«A2<|eot|>»",
    "mistral_v1": "<s> [INST] Q [/INST] «A</s>» [INST] Q2 [/INST] «A2</s>»",
    "mistral_v2v3": "<s>[INST] Q[/INST] «A</s>»[INST] Q2[/INST] «A2</s>»",
    "mistral_v3_tekken": "<s>[INST]Q[/INST]«A</s>»[INST]Q2[/INST]«A2</s>»",
    "mistral_v7_tekken": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
    "[INST]Q[/INST]«A</s>»[INST]Q2[/INST]«A2</s>»",
    "phi_3": "<s><|system|>\nBe brief.<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n«A<|end|>»\n"
    "<|user|>\nQ2<|end|>\n<|assistant|>\n«A2<|end|>»\n",
    "phi_35": "<|system|>\nBe brief.<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n«A<|end|>»\n"
    "<|user|>\nQ2<|end|>\n<|assistant|>\n«A2<|end|>»\n",
    "phi_4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|>"
    "<|im_start|>assistant<|im_sep|>«A<|im_end|>»<|im_start|>user<|im_sep|>Q2<|im_end|>"
    "<|im_start|>assistant<|im_sep|>«A2<|im_end|>»",
    "qwen3": f"{IM}Be brief.{IM_END}{IM}Q{IM_END}{IM}«A<|im_end|>»\n"
    f"{IM}Q2{IM_END}{IM}«<think>\n\n</think>\n\nA2<|im_end|>»\n",
    "qwen_25": f"{IM}Be brief.{IM_END}{IM}Q{IM_END}{IM}«A<|im_end|>»\n"
    f"{IM}Q2{IM_END}{IM}«A2<|im_end|>»\n",
    "vicuna": "<s>Be brief. USER: Q ASSISTANT:« A</s>»USER: Q2 ASSISTANT:« A2</s>»",
    "zephyr": "<s><|system|>\nBe brief.</s>\n<|user|>\nQ</s>\n<|assistant|>\n«A</s>»\n"
    "<|user|>\nQ2</s>\n<|assistant|>\n«A2</s>»\n",
}
TEXTS |= {"aya": TEXTS["cohere"], "gemma3": TEXTS["gemma"]}
# What they write where there is no system message.
DEFAULTS = {
    "exaone": "[|system|][|endofturn|]\n",
    "qwen_25": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    "You are a helpful assistant.<|im_end|>\n",
    "vicuna": f"{END}A chat between a curious user and an artificial intelligence assistant. The "
    "assistant gives helpful, detailed, and polite answers to the user's questions. ",
}
NO_SYSTEM = {"mistral_v1", "mistral_v2v3", "mistral_v3_tekken"}
# In the order of the turns; Cohere's in its own words.
ROLES = ("system", "user", "assistant", "user", "assistant")
COHERES = ("SYSTEM", "USER", "CHATBOT", "USER", "CHATBOT")


def expected_text(name: str) -> str:
    """As in TEXTS, with the tokenizer's bos and eos, which are one."""
    text = TEXTS[name].replace("<s>", END).replace("</s>", END)
    return text.format(*(COHERES if "CHATBOT" in text or COHERE in text else ROLES))


def end_of(name: str) -> str:
    return expected_text(name).rpartition("A2")[2].partition("»")[0]
