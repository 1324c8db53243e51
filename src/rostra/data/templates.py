"""Named chat templates, as Jinja text. Whoever has another gives a file, or the tokenizer's own.

Each writes the tokenizer's bos (if it has one) before all, white space around a message's text
never, and its end of turn right after the text.
"""

from __future__ import annotations

_NO_TOOLS = r"""
{%- if tools or messages | selectattr('tool_calls', 'defined') | list %}
    {{- raise_exception('this template has no form for tools; chatml has one') }}
{%- endif %}
"""

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

LLAMA3 = (
    _NO_TOOLS
    + r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
)

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

ZEPHYR = (
    _NO_TOOLS
    + r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content | trim + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}
"""
)

ALPACA = (
    _NO_TOOLS
    + r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content | trim + '\n\n' }}
    {%- elif message.role == 'user' %}
        {{- '### Instruction:\n' + message.content | trim + '\n\n' }}
    {%- else %}
        {{- '### Response:\n' + message.content | trim + eos_token + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '### Response:\n' }}
{%- endif %}
"""
)

TEMPLATES = {
    "alpaca": ALPACA,
    "chatml": CHATML,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "zephyr": ZEPHYR,
}
