"""Named chat templates, as Jinja text. Whoever has another gives a file, or the tokenizer's own.

The names are Axolotl's. Each writes white space around a message's text never, and its end of
turn right after the text. What models were tuned to in a long preamble (of tools, of thinking,
of today's date) is not here: the tokenizer's own template has it.
"""

from __future__ import annotations

_NO_TOOLS = r"""
{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
    {{- raise_exception('this template has no form for tools; chatml has one') }}
{%- endif %}
"""
_NO_SYSTEM = "{{ raise_exception('this template has no place for a system message') }}"
_ROLES = ("user", "assistant", "system")


def _turns(
    user: str,
    assistant: str,
    system: str = _NO_SYSTEM,
    *,
    begin: str = "{{ bos_token }}",
    default: str = "",
    thoughts: str = "",
) -> str:
    """A template of one form a role, in which TEXT stands for what the message says.

    An answer is asked for by what its form begins with, but for a space, which tokenizers join
    with the word after it, and begins itself with `thoughts`. `default` is written where there
    is no system message.
    """
    asks = assistant.partition("TEXT")[0].rstrip(" ")
    assistant = assistant.replace("TEXT", f"{thoughts}TEXT")
    prompt = f"{{% if add_generation_prompt %}}{asks}{{% endif %}}" if asks else ""
    forms = (
        f"{{% if message.role == 'system' %}}{system}"
        f"{{% elif message.role == 'user' %}}{user}"
        f"{{% else %}}{assistant}{{% endif %}}"
    ).replace("TEXT", "{{ message.content | trim }}")
    lead = f"{{% if messages[0].role != 'system' %}}{default}{{% endif %}}" if default else ""
    each = f"{{% for message in messages %}}{forms}{{% endfor %}}"
    return f"{_NO_TOOLS}{begin}{lead}{each}{prompt}".replace("EOS", "{{ eos_token }}")


CHATML = r"""
{{- bos_token }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' + system }}
    {%- if tools %}
        {{- '\n\n' if system }}
        {{- 'You may call these tools:\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' + tool | tojson }}
        {%- endfor %}
        {{- '\n</tools>\nTo call one, write its name and arguments as JSON:\n<tool_call>\n' }}
        {{- '{"name": "...", "arguments": {...}}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n' if message.content or not loop.first }}
        {%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
        {{- '<tool_call>\n' + said | tojson + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# A system message begins the first question.
GEMMA = (
    _NO_TOOLS
    + r"""
{{- bos_token }}
{%- set lead = messages[0].content | trim + '\n\n' if messages[0].role == 'system' else '' %}
{%- for message in messages if message.role != 'system' %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- (lead if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\n' }}
{%- endif %}
"""
)

# Only the last answer shows its thoughts, and none are shown as such.
_THOUGHTS = (
    "{% if loop.last and '<think>' not in message.content %}"
    "<think>\n{{ message.reasoning_content | default('', true) | trim }}\n</think>\n\n{% endif %}"
)


def _qwen(**options: str) -> str:
    """ChatML as the Qwen models write it."""
    forms = (f"<|im_start|>{role}\nTEXT<|im_end|>\n" for role in _ROLES)
    return _turns(*forms, begin="", **options)


def _llama(start: str, end: str, eot: str) -> str:
    """A header of the role before each turn."""
    return _turns(*(f"{start}{role}{end}\n\nTEXT{eot}" for role in _ROLES))


def _angled(end: str, begin: str = "") -> str:
    """The role as a mark of its own, and each turn on lines of its own."""
    return _turns(*(f"<|{role}|>\nTEXT{end}\n" for role in _ROLES), begin=begin)


_BOS = "{{ bos_token }}"
_COHERE = "<|START_OF_TURN_TOKEN|><|{}_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>"
_COMMAND = _turns(*map(_COHERE.format, ("USER", "CHATBOT", "SYSTEM")))
_PHI4 = "<|im_start|>{}<|im_sep|>TEXT<|im_end|>"
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)

TEMPLATES = {
    "alpaca": _turns("### Instruction:\nTEXT\n\n", "### Response:\nTEXTEOS\n\n", "TEXT\n\n"),
    "aya": _COMMAND,
    "chatml": CHATML,
    "cohere": _COMMAND,
    "deepseek_v2": _turns("<｜User｜>TEXT", "<｜Assistant｜>TEXTEOS", "TEXT\n\n"),
    "deepseek_v3": _turns("<｜User｜>TEXT", "<｜Assistant｜>TEXTEOS", "TEXT"),
    "exaone": _turns(
        "[|user|]TEXT\n",
        "[|assistant|]TEXT[|endofturn|]\n",
        "[|system|]TEXT[|endofturn|]\n",
        begin="",
        default="[|system|][|endofturn|]\n",
    ),
    "gemma": GEMMA,
    "gemma3": GEMMA,
    "llama3": _llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama4": _llama("<|header_start|>", "<|header_end|>", "<|eot|>"),
    # Before its second version the tokenizer has no token for [INST]; the comment keeps it from
    # being taken for one.
    "mistral_v1": _turns(" [{# text #}INST] TEXT [/{# text #}INST]", " TEXTEOS"),
    "mistral_v2v3": _turns("[INST] TEXT[/INST]", " TEXTEOS"),
    "mistral_v3_tekken": _turns("[INST]TEXT[/INST]", "TEXTEOS"),
    "mistral_v7_tekken": _turns(
        "[INST]TEXT[/INST]", "TEXTEOS", "[SYSTEM_PROMPT]TEXT[/SYSTEM_PROMPT]"
    ),
    "phi_3": _angled("<|end|>", _BOS),
    "phi_35": _angled("<|end|>"),
    "phi_4": _turns(*map(_PHI4.format, _ROLES), begin=""),
    "qwen3": _qwen(thoughts=_THOUGHTS),
    "qwen_25": _qwen(default=f"<|im_start|>system\n{_QWEN}<|im_end|>\n"),
    "vicuna": _turns("USER: TEXT ", "ASSISTANT: TEXTEOS", "TEXT ", default=_VICUNA),
    "zephyr": _angled("EOS", _BOS),
}
