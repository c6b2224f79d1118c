# SPDX-License-Identifier: MIT OR Apache-2.0
"""Chat templates in the style of known families, and conversations to lay out with them."""

from __future__ import annotations

from typing import Any

SMOL = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|start|>system
Be helpful<|end|>
' }}{% endif %}{{ '<|start|>' + message['role'] + '
' + message['content'] + '<|end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant
' }}{% endif %}"""

QWEN = """
{%- if tools %}
    {{- '<|start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "You may call these functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|start|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, is_searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.is_searching and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.is_searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last_query %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.lstrip('\\n') if message.content else '' }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|/header|>\\n\\nToday is " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system + "<|end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|/header|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|end|>" }}
    {%- else %}
        {{- "<|header|>ipython<|/header|>\\n\\n" }}
        {%- if message.content is mapping or message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}{{- ', "id": "' + tool_call.id[-9:] + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- set content = message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ', "call_id": "' + message.tool_call_id[-9:] + '"}' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

TRAINING = """{% for message in messages %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
    {% if message.content == 'stop' %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}{% set who = 'me' %}{{ message.content ~ who ~ loop.index ~ eos_token }}{% endgeneration %}
        {{- who is defined }}
    {% else %}
        {{- dict(a=message.content)|tojson(sort_keys=true, separators=(',', ':')) }}
        {{- dict.fromkeys(['x'], message.role)['x'] }}
    {% endif %}
{% endfor %}
{{ documents|length if documents else 'no documents' }}{{ "<>&'é" | tojson }}
"""

TEMPLATES = {"smol": SMOL, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "training": TRAINING}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & here: 'é'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "X"]}}},
    },
}
HELLO = [{"role": "user", "content": "Hello there"}]
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is 2 + 2? "},
    {"role": "assistant", "content": "\n4 ", "reasoning_content": "\nsums\n"},
    {"role": "user", "content": "skip"},
    {"role": "assistant", "content": "<|end|> ünïcödé 🚀"},
    {"role": "user", "content": ""},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_123456789",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Köln", "days": [1, 2.5], "now": true}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_123456789", "content": '{"rain": null}'},
]
