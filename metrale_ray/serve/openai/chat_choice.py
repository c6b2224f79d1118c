# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ChatChoice`: one answer of a chat, read by its parser: content, reasoning and calls of tools, whole or in parts.

Rules. A whole answer is its parts joined: what a stream's reader puts together is what a reader without a stream gets,
a call that was cut included. The reason is "tool_calls" only where the model ended by itself behind whole calls; a
named function that was demanded ends with "stop", as in OpenAI's. Where a call is not whole it is "length", whatever
cut the call: a stop string, which `stop_reason` tells, or the model itself. Tokens count as reasoning up to the one
that made the first content or call certain.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.serve.deltas import SequenceDelta
from metrale_ray.serve.openai.logprobs import chat_logprobs
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.parsing.pieces import CallDelta, OutputParser, Piece
from metrale_ray.serve.text import Tokenizer

_ALPHABET = string.ascii_letters + string.digits


def long_call_id() -> str:
    """As OpenAI's."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Nine letters and digits: what templates of Mistral's models demand."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a request wants to see of its answers, and how they are read.

    `top_logprobs`: how many likely tokens, None for no log probabilities. `has_reasoning`: reasoning has a field of its
    own. `is_named`: one function was demanded by its name. `has_answer`: False where max_tokens is 0. `call_id` makes
    the id of a call.
    """

    top_logprobs: int | None = None
    has_reasoning: bool = False
    is_named: bool = False
    has_answer: bool = True
    has_token_ids: bool = False
    call_id: Callable[[], str] = long_call_id


@dataclass(slots=True)
class _New:
    """What was added and not taken."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # as they are told, where they are

    def add(self, piece: Piece) -> None:
        """Take what a parser gave."""
        self.reasoning.append(piece.reasoning)
        self.content.append(piece.content)
        self.calls += piece.calls


class ChatChoice:
    """One answer. It is asked for `deltas` again and again, or for its `message` once, in the end."""

    def __init__(self, index: int, shape: ChatShape, parser: OutputParser, tokenizer: Tokenizer | None) -> None:
        self.finish_reason: str | None = None
        self.num_reasoning_tokens = 0
        self._index = index
        self._shape = shape
        self._parser = parser
        self._tokenizer = tokenizer
        self._stop_reason: str | int | None = None
        self._is_first = True
        self._is_behind_reasoning = not shape.has_reasoning
        self._num_unsettled = 0  # tokens that are reasoning if some of it comes
        self._new = _New()

    async def add(self, new: SequenceDelta, pace: Pace) -> None:
        """Take what is new. Nothing else is asked of this meanwhile."""
        if self._shape.has_answer:
            self._read(new)
            if self._shape.top_logprobs is not None:
                self._new.logprobs += await chat_logprobs(new.logprobs, self._shape.top_logprobs, self._tokenizer, pace)
        if new.finish_reason is not None:
            self._end(new)

    def message(self) -> dict[str, Any]:
        """OpenAI's choice object of a whole answer."""
        new, self._new = self._new, _New()
        content = "".join(new.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._shape.has_reasoning:
            message["reasoning_content"] = "".join(new.reasoning) or None
        if new.calls:
            message["content"] = content or None
            message["tool_calls"] = self._joined(new.calls)
        return {**self._choice(new, "message", message), **self._ended()}

    def deltas(self) -> list[dict[str, Any]]:
        """OpenAI's choice objects of what is new, in order: the role, what came, the end; each only if it is there."""
        new, self._new = self._new, _New()
        found = []
        if self._is_first:
            self._is_first = False
            found.append(self._choice(None, "delta", {"role": "assistant", "content": "", "refusal": None}))
        delta = self._delta(new)
        if delta or (new.token_ids and (self._shape.has_token_ids or self._shape.top_logprobs is not None)):
            found.append(self._choice(new, "delta", delta))
        if self.finish_reason is not None:
            found.append({**self._choice(None, "delta", {}), **self._ended()})
        return found

    def _read(self, new: SequenceDelta) -> None:
        self._new.token_ids += new.token_ids
        # One at a time: how many tokens are reasoning must not depend on how many came at once.
        texts = [new.text] if self._is_behind_reasoning else new.texts
        for number, text in enumerate(texts):
            self._take(self._parser.push(text), is_token=number < len(new.token_ids))

    def _take(self, piece: Piece, *, is_token: bool) -> None:
        self._new.add(piece)
        if self._is_behind_reasoning:
            return
        self._is_behind_reasoning = bool(piece.content or piece.calls)
        self._num_unsettled += is_token and not self._is_behind_reasoning
        if piece.reasoning or self.num_reasoning_tokens:
            self.num_reasoning_tokens += self._num_unsettled
            self._num_unsettled = 0

    def _end(self, new: SequenceDelta) -> None:
        self.finish_reason, self._stop_reason = new.finish_reason, new.stop_reason
        if not self._shape.has_answer:
            self.finish_reason, self._stop_reason = "length", None
            return
        self._new.add(self._parser.flush())
        if self.finish_reason == "stop" and self._parser.has_cut_call:
            self.finish_reason = "length"
        elif self.finish_reason == "stop" and self._parser.has_calls and not self._shape.is_named:
            self.finish_reason = "tool_calls"

    def _choice(self, new: _New | None, name: str, content: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, name: content, "logprobs": None, "finish_reason": None}
        if new is None:
            return choice
        if self._shape.top_logprobs is not None:
            choice["logprobs"] = {"content": new.logprobs, "refusal": None}
        if self._shape.has_token_ids:
            choice["token_ids"] = new.token_ids
        return choice

    def _ended(self) -> dict[str, Any]:
        return {"finish_reason": self.finish_reason, "stop_reason": self._stop_reason}

    def _delta(self, new: _New) -> dict[str, Any]:
        texts = {"reasoning_content": "".join(new.reasoning), "content": "".join(new.content)}
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        if new.calls:
            delta["tool_calls"] = [self._call_delta(call) for call in _merged(new.calls)]
        return delta

    def _call_delta(self, call: CallDelta) -> dict[str, Any]:
        function = {"arguments": call.arguments}
        if call.name is None:
            return {"index": call.index, "function": function}
        return {"index": call.index, **self._call(call.name, call.arguments)}

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {"id": self._shape.call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}

    def _joined(self, calls: Sequence[CallDelta]) -> list[dict[str, Any]]:
        return [self._call(call.name or "", call.arguments) for call in _merged(calls)]


def _merged(calls: Sequence[CallDelta]) -> list[CallDelta]:
    """One for each index: its name, and its arguments joined."""
    names: dict[int, str | None] = {}
    arguments: dict[int, list[str]] = {}
    for call in calls:
        names[call.index] = call.name or names.get(call.index)
        arguments.setdefault(call.index, []).append(call.arguments)
    return [CallDelta(index, name, "".join(arguments[index])) for index, name in names.items()]
