# SPDX-License-Identifier: MIT OR Apache-2.0
"""From what a service sends, whole or as events, to one `Reply`."""

from __future__ import annotations

import json
from typing import Any

from tests.serve.soak.asks import Reply, Sequence


class EventReader:
    """Takes a stream's bytes as they come. `is_done`: [DONE] was read."""

    def __init__(self) -> None:
        self.reply = Reply()
        self.is_done = False
        self._rest = b""

    def push(self, data: bytes) -> None:
        """More bytes, cut anywhere."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            assert event.startswith(b"data: "), event
            assert not self.is_done, event
            if event == b"data: [DONE]":
                self.is_done = True
            else:
                self._take(json.loads(event[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.reply.usage = chunk.get("usage") or self.reply.usage
        _add(self.reply, chunk)


def whole_reply(answer: dict[str, Any]) -> Reply:
    """A reply that came at once."""
    reply = Reply(usage=answer["usage"])
    _add(reply, answer)
    return reply


def _add(reply: Reply, told: dict[str, Any]) -> None:
    reply.prompt_token_ids = reply.prompt_token_ids or told.get("prompt_token_ids") or []
    for choice in told["choices"]:
        reply.prompt_token_ids = reply.prompt_token_ids or choice.get("prompt_token_ids") or []
        sequence = reply.sequences.setdefault(choice["index"], Sequence())
        assert sequence.finish_reason is None, (sequence, choice)
        sequence.text += _text(choice)
        sequence.token_ids += choice.get("token_ids") or []
        sequence.logprobs += _logprobs(choice.get("logprobs"))
        sequence.finish_reason, sequence.stop_reason = choice["finish_reason"], choice.get("stop_reason")


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta")
    text = choice.get("text") if message is None else message.get("content")
    return text or ""


def _logprobs(given: dict[str, Any] | None) -> list[float | None]:
    if not given:
        return []
    if "content" in given:
        return [entry["logprob"] for entry in given["content"]]
    logprobs: list[float | None] = given["token_logprobs"]
    return logprobs
