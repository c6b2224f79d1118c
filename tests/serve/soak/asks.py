# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests to a SUCC service, each with what its answer must be.

A plain answer counts up from the prompt's last token; a constrained one is one of the texts that its constraint lets
through (a part of one where it was cut). Constraints allow few texts, so that every answer can be looked up.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.serve.text import Tokenizer
from tests.fixtures.tiny import VOCAB_SIZE
from tests.service_rig import MODEL_NAME

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MAX_TOKENS = 24
MAX_CONSTRAINED_TOKENS = 72
LAST_LETTER = 90
"""Tokens 1 to 90 are printable characters of ASCII, one each: a text that goes on behind one begins anew."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "cat"]}, "big": {"type": "boolean"}},
    "required": ["kind", "big"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "perhaps"]
REGEX = "[ab]{2}-[0-3]"


@dataclass
class Sequence:
    """One choice of an answer, however it came."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Reply:
    """One answer. `prompt_token_ids` are those of the first prompt."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    usage: dict[str, Any] | None = None


Judge = Callable[[Sequence, list[int]], None]
"""Asserts that one sequence is right; the second argument are the prompt's token ids."""


@dataclass(frozen=True)
class Ask:
    """One request. `name` says of which kind it is."""

    name: str
    path: str
    body: dict[str, Any]
    judge: Judge

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    def check(self, reply: Reply) -> None:
        """Assert that the answer is whole and right."""
        assert sorted(reply.sequences) == list(range(self.body.get("n", 1))), (self.name, reply)
        for sequence in reply.sequences.values():
            assert sequence.finish_reason in ("stop", "length"), (self.name, sequence)
            self.judge(sequence, reply.prompt_token_ids)
            if self.body.get("logprobs"):
                assert len(sequence.logprobs) == len(sequence.token_ids), (self.name, sequence)
                assert all(-200 < given <= 0 for given in sequence.logprobs if given is not None), (self.name, sequence)
        if reply.usage is not None:
            count = sum(len(sequence.token_ids) for sequence in reply.sequences.values())
            assert reply.usage["completion_tokens"] == count, (self.name, reply)


class Asker:
    """Makes requests by a seed."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer

    def ask(self) -> Ask:
        """The next request: every second one has a constraint."""
        make = self._random.choice([self._constrained, self._random.choice([self._counting, self._stopping])])
        ask = make()
        ask.body.update(model=MODEL_NAME, return_token_ids=True, n=self._random.choice([1, 1, 1, 2, 3]))
        if self._random.random() < 0.5:
            ask.body.update(stream=True, stream_options={"include_usage": True})
        if self._random.random() < 0.3:
            ask.body.update({"logprobs": True, "top_logprobs": 2} if ask.path == CHAT else {"logprobs": 2})
        return ask

    def _counting(self) -> Ask:
        count = self._random.randint(1, MAX_TOKENS)

        def judge(sequence: Sequence, prompt: list[int]) -> None:
            chain = _chain(prompt, count)
            assert (sequence.token_ids, sequence.finish_reason) == (chain, "length"), (sequence, prompt)
            assert sequence.text == self._tokenizer.decode(chain, True), (sequence, prompt)

        return self._plain("counting", {"max_tokens": count}, judge)

    def _stopping(self) -> Ask:
        """A stop string of two letters that the chain reaches."""
        prompt = list(range(self._random.randint(1, 30), self._random.randint(31, LAST_LETTER - 20)))
        place = self._random.randint(1, 12)
        stop = self._tokenizer.decode(_chain(prompt, 20)[place : place + 2], True)

        def judge(sequence: Sequence, prompt: list[int]) -> None:
            assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop), (sequence, prompt)
            assert sequence.text == self._tokenizer.decode(_chain(prompt, place), True), (sequence, prompt)

        body = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stop": ["never", stop]}
        return Ask("stopping", COMPLETION, {**body, "prompt": prompt}, judge)

    def _constrained(self) -> Ask:
        name, constraint, texts = self._random.choice(_CONSTRAINTS)

        def judge(sequence: Sequence, prompt: list[int]) -> None:
            if sequence.finish_reason == "stop":
                assert texts(sequence.text), (name, sequence)

        body = {"max_tokens": MAX_CONSTRAINED_TOKENS, "temperature": self._random.choice([0, 1]), **constraint}
        return Ask(name, *self._prompted(body), judge)

    def _plain(self, name: str, body: dict[str, Any], judge: Judge) -> Ask:
        return Ask(name, *self._prompted({**body, "temperature": 0, "ignore_eos": True}), judge)

    def _prompted(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if self._random.random() < 0.4:
            content = " ".join(self._random.choices(["one", "two", "three", "fox"], k=self._random.randint(1, 12)))
            return CHAT, {**body, "messages": [{"role": "user", "content": content}]}
        length = self._random.choice([0, 5, 17, 40])
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(length)]
        return COMPLETION, {**body, "prompt": [*prompt, self._random.randint(1, LAST_LETTER)]}


def _chain(prompt: list[int], count: int) -> list[int]:
    return [(prompt[-1] + 1 + place) % VOCAB_SIZE for place in range(count)]


def _is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"kind", "big"} and value["kind"] in ("fox", "cat") and type(value["big"]) is bool


def _is_of_regex(text: str) -> bool:
    return len(text) == 4 and set(text[:2]) <= {"a", "b"} and text[2] == "-" and text[3] in "0123"


_FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
_CONSTRAINTS: list[tuple[str, dict[str, Any], Callable[[str], bool]]] = [
    ("json_schema", {"response_format": _FORMAT}, _is_of_schema),
    ("json", {"structured_outputs": {"json": SCHEMA}}, _is_of_schema),
    ("regex", {"structured_outputs": {"regex": REGEX}}, _is_of_regex),
    ("choice", {"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
]
CONSTRAINED = frozenset(name for name, _, _ in _CONSTRAINTS)
