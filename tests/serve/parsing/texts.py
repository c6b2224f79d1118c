# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers in each family's form, and what a client must have of them: `TEXTS[family]` is a list of both."""

from __future__ import annotations

from tests.serve.parsing.reading import Answer

# Arguments as a model writes them: the ends are those that parsers lose, the strings those that they trip over.
ARGUMENTS = [
    "{}",
    '{"a": 1}',
    '{"a": -0.5e+3}',
    '{"a": true}',
    '{"a": {"b": null}}',
    '{"a": [1, {"b": []}]}',
    '{"a": ""}',
    '{"a": "</tool_call>"}',
    '{"a": "{"}',
    '{"a": "}]"}',
    '{"a": "<tool_call>[TOOL_CALLS]<|python_tag|>;"}',
    '{"a": "\\"\\\\ \\u00e9 你好"}',
    '{"z": 1, "a": 2}',
    '{\n  "a" : [ 1 ,2 ]\n}',
]


def _whole(content: str, *calls: tuple[str, str]) -> Answer:
    return Answer(content, list(calls), True)


def _block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


HERMES = [
    *((_block("f", one), _whole("", ("f", one))) for one in ARGUMENTS),
    ("hello", Answer("hello")),
    (
        f"Hi. \n{_block('now', '{}')}\n{_block('f', '[1]')} bye\n",
        Answer('Hi. \n<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call> bye\n', [("now", "{}")], True),
    ),
    (f"Hi\n{_block('now', '{}')}\n", _whole("Hi", ("now", "{}"))),
    (f"{_block('now', '{}')} bye ", _whole("bye ", ("now", "{}"))),
    (f"one{_block('now', '{}')} two", _whole("one two", ("now", "{}"))),
    ('<tool_call>{"name":"now"}</tool_call>', _whole("", ("now", "{}"))),
    ('<tool_call>{"name":"now","arguments":null}</tool_call>', _whole("", ("now", "{}"))),
    ('<tool_call>{"name":"now","arguments":""}</tool_call>', _whole("", ("now", "{}"))),
    ('<tool_call>{"name":"f","arguments":"{\\"a\\": \\"x\\"}"}</tool_call>', _whole("", ("f", '{"a": "x"}'))),
    ('<tool_call>{"arguments":{"a":1},"id":7,"name":"f"}', _whole("", ("f", '{"a":1}'))),
    ('<tool_call>{"name":"now"}\n{"name":"f"}</tool_call>', _whole("", ("now", "{}"), ("f", "{}"))),
    ('<tool_call>{"name":"now"}<tool_call>{"name":"f"}', _whole("", ("now", "{}"), ("f", "{}"))),
    ('<tool_call>{"name":"f","arguments":{"a":"1\n2\t"}}', _whole("", ("f", '{"a":"1\\n2\\t"}'))),
    ('<tool_call>{"name":"f","arguments":{"a":tru}}', Answer("}}", [("f", '{"a":tru')])),
    ('<tool_call>{"name":"f","arguments":{"a":1}]', Answer("]", [("f", '{"a":1}')])),
    ("a <tool_call> b", Answer("a <tool_call> b")),
    ("<tool_call><tool_call>{}", Answer("<tool_call><tool_call>{}")),
    ('<tool<tool_call>{"name":"f"} </tool', _whole("<tool", ("f", "{}"))),
    ('<tool_call>{"name":""}', Answer('<tool_call>{"name":""}')),
    ('<tool_call>{"name":"f","name":"now"}', Answer('<tool_call>{"name":"f","name":"now"}')),
    ('<tool_call>{"name":"f","arguments":"[]"}', Answer('<tool_call>{"name":"f","arguments":"[]"}')),
    ("</tool_call>", Answer("</tool_call>")),
    (
        '<tool_call>{"name":"f","arguments":{"a":tru}}<tool_call>{"name":"now"}',
        Answer("}}", [("f", '{"a":tru'), ("now", "{}")]),
    ),
    ('<tool_call>{"name":"a\\n"}', Answer('<tool_call>{"name":"a\\n"}')),
    ('<tool_call>{"name":"\\ud800"}', Answer('<tool_call>{"name":"\\ud800"}')),
    (
        '<tool_call>{"name":"f","arguments":"{\\"\\ud800\\":1}"}',
        Answer('<tool_call>{"name":"f","arguments":"{\\"\\ud800\\":1}"}'),
    ),
]


def _mistral_list(*calls: tuple[str, str]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in calls) + "]"


MISTRAL = [
    *((_mistral_list(("f", one)), _whole("", ("f", one))) for one in ARGUMENTS),
    *((f"[TOOL_CALLS]f[ARGS]{one}", _whole("", ("f", one))) for one in ARGUMENTS),
    ("hello [TOOL", Answer("hello [TOOL")),
    (f"Hi {_mistral_list(('now', '{}'), ('f', '{}'))} bye", _whole("Hi bye", ("now", "{}"), ("f", "{}"))),
    ('[TOOL_CALLS]now{}[TOOL_CALLS]f [ARGS] {"a":[]} x', _whole("x", ("now", "{}"), ("f", '{"a":[]}'))),
    ("[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}", _whole("", ("f", "{}"))),
    ('[TOOL_CALLS]{"name":"f"}', _whole("", ("f", "{}"))),
    ("[TOOL_CALLS] [[TOOL_CALLS]f{}", _whole("[TOOL_CALLS] [", ("f", "{}"))),
    ("[TOOL_CALLS]now [TOOL_CALLS]f{}", _whole("[TOOL_CALLS]now", ("f", "{}"))),
    ("[TOOL_CALLS]now [ARGS][TOOL_CALLS]f{}", _whole("[TOOL_CALLS]now [ARGS]", ("f", "{}"))),
    (f"[TOOL_CALLS]{'f' * 64}{{}}", _whole("", ("f" * 64, "{}"))),
    (f"[TOOL_CALLS]{'f' * 65}{{}}", Answer(f"[TOOL_CALLS]{'f' * 65}{{}}")),
    ("[TOOL_CALLS]f[CALL_ID]a[CALL_ID]b{}", Answer("[TOOL_CALLS]f[CALL_ID]a[CALL_ID]b{}")),
    ("[TOOL_CALLS]f[ARGS][1]", Answer("[TOOL_CALLS]f[ARGS][1]")),
    ("[TOOL_CALLS] []", Answer("[TOOL_CALLS] []")),
    ("[TOOL_CALLS] and so on", Answer("[TOOL_CALLS] and so on")),
    ('[TOOL_CALLS]f{"a":}', Answer("}", [("f", '{"a":')])),
]


def _llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in calls)


LLAMA3_JSON = [
    *((_llama(("f", one)), _whole("", ("f", one))) for one in ARGUMENTS),
    ("hello <|py", Answer("hello <|py")),
    (f" {_llama(('now', '{}'), ('f', '{}'))}", _whole("", ("now", "{}"), ("f", "{}"))),
    (f"Hi <|python_tag|>{_llama(('other', '{}'))}; bye", _whole("Hi ; bye", ("other", "{}"))),
    ('{"type": "function", "name": "f", "parameters": {}}', _whole("", ("f", "{}"))),
    ('{"name": "other", "parameters": {}}', Answer('{"name": "other", "parameters": {}}')),
    ('{"name": "f", "age": 3}', Answer('{"name": "f", "age": 3}')),
    ('{"city": "Paris"}', Answer('{"city": "Paris"}')),
    ('so {"name": "f", "parameters": {}}', Answer('so {"name": "f", "parameters": {}}')),
    ("<|python_tag|>print(1)", Answer("<|python_tag|>print(1)")),
    ('{"name": "f"}', _whole("", ("f", "{}"))),
    ('{"name": "now"}{"name": "f", "parameters": {"a": 1}}', _whole("", ("now", "{}"), ("f", '{"a": 1}'))),
    ('{"name": "now"}\n{"name": "f"}\n; {"name": "now"}', _whole("", ("now", "{}"), ("f", "{}"), ("now", "{}"))),
    ('<|python_tag|>{"name": "other"}\n\n{"name": "f"} so', _whole("so", ("other", "{}"), ("f", "{}"))),
    ('{"name": "now"}\n{"name": "other"}', _whole('{"name": "other"}', ("now", "{}"))),
    ('{"name": "now"}\n{"city": 1} {"name": "f"}', _whole('{"city": 1} {"name": "f"}', ("now", "{}"))),
]

TEXTS = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA3_JSON}
