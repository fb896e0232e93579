"""Chat templates in the shape of known ones, and a tokenizer that has their special tokens."""

from __future__ import annotations

from typing import Any

from tests import tiny

# Tools behind the system text, calls as JSON under <tool_call>, results within a turn of the user: as Qwen 2.5 does.
QWEN = """{%- set has_system = messages[0].role == 'system' %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\\n' + (messages[0].content if has_system else 'You help.') }}
    {%- if tools %}
        {{- '\\n\\n# Tools\\n\\nThese can be called:\\n<tools>' }}
        {%- for tool in tools %}
            {{- '\\n' }}
            {{- tool | tojson }}
        {%- endfor %}
        {{- '\\n</tools>\\n\\nCall them so:\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and has_system) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# A turn for every message, and a system text where there is none: as SmolLM2 does.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Texts are trimmed, as by Llama 3.
TRIMMING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim }}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)


def im_tokenizer(template: str = QWEN) -> Any:
    """Special tokens that begin and end turns, and one for calls that is not special."""
    found = tiny.tokenizer()
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.add_tokens(["<tool_call>", "</tool_call>"])
    found.chat_template = template
    return found
