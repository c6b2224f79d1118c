# SPDX-License-Identifier: MIT OR Apache-2.0
"""A model whose engine a test plays: what is submitted is seen, and what comes back is what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient
from metrale_ray.serve.backend import GenerationDefaults, Health, ServedModel
from metrale_ray.serve.front import Front
from metrale_ray.serve.openai.call import ApiSettings, Call
from metrale_ray.serve.text import Tokenizer
from tests.serve.pieces import Pieces
from tests.serve.test_front import PlayedHead

PROMPT_ID = 0
"""What every text is encoded as."""


class TextPieces(Pieces):
    """Pieces that may be asked for a text's ids too: always the same one, after which any piece may come."""

    def encode(self, text: str, **more: Any) -> list[int]:
        return [PROMPT_ID] if text else []


class PlayedBackend:
    """An engine that is there, until it is told to have died."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.reason: EngineDead | None = None

    def front(self) -> Front:
        return self._front

    def health(self) -> Health:
        return Health(True, "", True, "")

    def figures(self) -> Mapping[str, Any]:
        return {}

    async def explain(self, seen: EngineDead) -> EngineDead:
        return self.reason or seen


class PlayedTemplate:
    """Lays out messages as JSON, so that a test sees what came; `suffix` comes behind them."""

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix
        self.asked: list[dict[str, Any]] = []

    async def render(self, messages: Sequence[Mapping[str, Any]], **given: Any) -> str:
        self.asked.append({"messages": list(messages), **given})
        return json.dumps(list(messages)) + self.suffix


class CountingMeter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.num_tokens = 0
        self.reasons: list[str] = []

    def prompt(self, num_tokens: int) -> None:
        self.prompts.append(num_tokens)

    def tokens(self, count: int) -> None:
        self.num_tokens += count

    def finished(self, reason: str) -> None:
        self.reasons.append(reason)


class Played:
    """One model of these pieces, and calls for it. Piece i is token i; the special ones end a text."""

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        special: Sequence[int] = (),
        template: PlayedTemplate | None = None,
        **model: Any,
    ) -> None:
        self.head = PlayedHead()
        tokenizer = Tokenizer(TextPieces(pieces, special), special)
        self.backend = PlayedBackend(Front(cast(FrontClient, self.head), tokenizer, max_waiting=100))
        self.meter = CountingMeter()
        self.template = template or PlayedTemplate()
        self.model = ServedModel(
            ("played",), self.backend, tokenizer, self.template, GenerationDefaults(), 100, 1_700_000_000, **model
        )

    def call(self, settings: ApiSettings | None = None) -> Call:
        return Call(self.model, "played", settings or ApiSettings(), "request-1", self.meter)


async def settle() -> None:
    """Let every task run until it waits for something that has not come."""
    for _ in range(20):
        await asyncio.sleep(0)


def documents(data: bytes) -> list[Any]:
    """The JSON documents of some events, and "[DONE]"."""
    assert data.endswith(b"\n\n")
    found = []
    for event in data.removesuffix(b"\n\n").split(b"\n\n"):
        assert event.startswith(b"data: ")
        text = event.removeprefix(b"data: ")
        found.append("[DONE]" if text == b"[DONE]" else json.loads(text, parse_constant=_no_constant))
    return found


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


async def read(chunks: AsyncGenerator[bytes, None]) -> list[Any]:
    """All documents of a stream."""
    return [document async for data in chunks for document in documents(data)]
