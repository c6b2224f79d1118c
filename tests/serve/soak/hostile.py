# SPDX-License-Identifier: MIT OR Apache-2.0
"""Inputs that have ended, blocked or filled other services, each with the statuses that are right for it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "x"}]
LOOP = "{% for a in range(25000) %}{% for b in range(25000) %}{% endfor %}{% endfor %}"
MiB = 2**20
RIGHT_OR_REFUSED = (200, 400)
"""For what makes sense to one library and not to another: a right answer is one, a refusal too."""


@dataclass(frozen=True)
class Hostile:
    """One request. `name` says what is wrong with it; `chunked`: it has no length."""

    name: str
    content: bytes
    statuses: tuple[int, ...] = (400,)
    path: str = CHAT
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    chunked: bool = False


def chat(name: str, statuses: tuple[int, ...] = (400,), **fields: Any) -> Hostile:
    body = {"messages": USER, "max_tokens": 4, **fields}
    return Hostile(name, json.dumps(body).encode(), statuses)


def completion(name: str, **fields: Any) -> Hostile:
    body = {"prompt": [1], "max_tokens": 4, **fields}
    return Hostile(name, json.dumps(body).encode(), path=COMPLETION)


def schema(name: str, content: Any, statuses: tuple[int, ...] = RIGHT_OR_REFUSED) -> Hostile:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}
    return chat(f"schema: {name}", statuses, response_format=form)


def regex(name: str, pattern: str, statuses: tuple[int, ...] = RIGHT_OR_REFUSED) -> Hostile:
    return chat(f"regex: {name}", statuses, structured_outputs={"regex": pattern})


def constraints() -> list[Hostile]:
    """Patterns, schemas and grammars that are wrong, or cost their reader much."""
    deep = '{"properties":{"a":' * 1000 + "{}" + "}}" * 1000
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}
    return [
        regex("not closed", "(", (400,)),
        regex("a loop of a look behind", "(?<=x)*", (400,)),
        regex("good", "(a+)+b"),
        regex("an empty alternative", "^(|.*)$"),
        regex("5000 groups", "(" * 5000, (400,)),
        regex("nested loops", "(((a+)+)+)+$"),
        regex("many repeats", "((a{1,1000}){1,1000}){1,1000}"),
        schema("a property that is a text", {"properties": {"foo": "bar"}}, (400,)),
        schema("a large maximum", {"type": "integer", "maximum": 20_000_000_000}),
        schema("of itself", {"$ref": "#"}),
        schema("everything", {}),
        chat("schema: 1000 deep, as a text", structured_outputs={"json": deep}),
        schema("an enum of 100,000", {"enum": list(range(100_000))}, (400,)),
        schema("true", True),
        chat("grammar: 60,000 groups", structured_outputs={"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000}),
        chat("grammar: 30,000 groups", structured_outputs={"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}),
        chat("grammar: none", structured_outputs={"grammar": "start: ???"}),
        chat("a tool whose schema is none", tools=[tool], tool_choice="required"),
    ]


def bodies() -> list[Hostile]:
    """Bodies that a parser or a packer fails at."""
    plain = json.dumps({"messages": USER}).encode()
    json_type = {"Content-Type": "application/json"}
    return [
        Hostile("half of a pair", rb'{"messages":[{"role":"user","content":"\ud83d"}]}'),
        Hostile("the other half", rb'{"messages":[{"role":"user","content":"x \ude00 y"}]}'),
        Hostile("NUL", rb'{"messages":[{"role":"user","content":"a\u0000b"}],"max_tokens":4}', (200,)),
        chat("tools that are brackets", tools="[" * 3000),
        Hostile("3000 brackets", b'{"messages":' + b"[" * 3000),
        Hostile("3000 lists", b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}"),
        Hostile("a key twice", b'{"messages":[],"messages":[]}'),
        Hostile("no number", b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}'),
        Hostile("50 MB", b'{"prompt":"' + b"a" * 50 * MiB + b'"}', (413,), COMPLETION),
        Hostile("50 MB of no length", b'{"prompt":"' + b"a" * 50 * MiB + b'"}', (413,), COMPLETION, chunked=True),
        Hostile("3 MB of text", b'{"prompt":"' + b"a " * (3 * MiB // 2) + b'"}', (400,), COMPLETION),
        Hostile("a million lists", b'{"messages":[' + b"[]," * MiB + b"[]]}"),
        Hostile("another charset", plain, (415,), headers={"Content-Type": "application/json; charset=utf-16"}),
        Hostile("no JSON by its type", plain, (415,), headers={"Content-Type": "text/plain"}),
        Hostile(
            "a gzip bomb", gzip.compress(bytes(50 * MiB)), (415,), headers={**json_type, "Content-Encoding": "gzip"}
        ),
    ]


def orders() -> list[Hostile]:
    """Small bodies that ask for much work."""
    return [
        completion("n", n=10**6),
        completion("best_of", best_of=10**6),
        completion("stop strings", stop=[f"s{number}" for number in range(300_000)]),
        completion("a stop string of 1 MB", stop="x" * MiB),
        completion("bad words", bad_words=[f"w{number}" for number in range(50_000)]),
        completion("logprobs", logprobs=10**6),
        completion("prompt_logprobs of all", prompt_logprobs=320),
        completion("negative prompt_logprobs", prompt_logprobs=-1),
        completion("prompts", prompt=["x"] * 10_000),
        completion("biases", logit_bias={str(number): 1 for number in range(100_000)}),
        completion("a length of 10 digits", max_tokens=10**10),
        chat("n of a chat", n=10**6),
        chat("messages", messages=USER * 10_000),
    ]


def templates() -> list[Hostile]:
    """Templates in requests, which are not taken."""
    return [
        chat("a template that loops", chat_template=LOOP),
        chat("the same, hidden", chat_template_kwargs={"chat_template": LOOP}),
        chat("a large one", chat_template="{{ 'x' * 10**9 }}"),
        chat("one that looks around", chat_template="{{ ''.__class__.__mro__ }}"),
        chat("other messages", chat_template_kwargs={"messages": []}),
        chat("other tools", chat_template_kwargs={"tools": []}),
    ]
