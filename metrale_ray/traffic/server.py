# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Server`: the address of a server, and what has to be asked of it before a run.

Rules: one short request must succeed before any load is sent, so that a wrong address, key or model is one error and
not thousands. What the server refuses by name is left out (`dialect`). Addresses with and without `/v1` are the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from metrale_ray.errors import UserError
from metrale_ray.traffic.dialect import CHAT, Dialect
from metrale_ray.traffic.exchange import describe_failure, exchange, read_refusal
from metrale_ray.traffic.question import Question
from metrale_ray.traffic.sample import Sample
from metrale_ray.traffic.words import TEXT, PromptMaker, TokenIds, Words

VERSION = "/v1"
MAX_REPLY_BYTES = 16 * 2**20
PROBE_TOKENS = 1
FEATURES = 4  # so many things a server may refuse by name, one after another
MIN_POOL = 16  # fewer different token ids are no prompt like any other


def read_url(text: str) -> str:
    """The address without its version and the slash at its end. Raises UserError."""
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_right = False
    if not is_right:
        raise UserError(f"{text!r} is no address of a server; write one such as http://127.0.0.1:8000")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix(VERSION), "", "")).rstrip("/")


class Server:
    """A server at `url` (see `read_url`), asked over `client`, which carries the key."""

    def __init__(self, client: aiohttp.ClientSession, url: str) -> None:
        self._client = client
        self.url = url

    def address(self, path: str) -> str:
        """The address of a path below the version."""
        return f"{self.url}{VERSION}/{path}"

    async def first_model(self) -> str:
        """The model that the server names first. Raises UserError."""
        status, body = await self._ask("GET", self.address("models"))
        try:
            return str(body["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise UserError(
                f"{self.address('models')} names no model (status {status}: {_short(body)}); give it with --model"
            ) from error

    async def prompt_maker(self, model: str, endpoint: str, vocab_size: int | None) -> PromptMaker:
        """What makes prompts of a given length: token ids where they can be sent and are known, else words."""
        if endpoint != CHAT and vocab_size is not None:
            return TokenIds(range(vocab_size))
        status, body = await self._ask("POST", f"{self.url}/tokenize", {"model": model, "prompt": TEXT})
        tokens = body.get("tokens") if status == 200 and isinstance(body, dict) else None
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            return Words()
        pool = sorted(set(tokens))
        return TokenIds(pool) if endpoint != CHAT and len(pool) >= MIN_POOL else Words(len(tokens) / len(TEXT.split()))

    async def learn(self, dialect: Dialect, maker: PromptMaker) -> tuple[Dialect, PromptMaker, list[str]]:
        """What the server takes of `dialect` and of `maker`'s prompts, and a note on each thing that it does not.

        Raises UserError when it does not even answer the plainest form.
        """
        notes: list[str] = []
        for _ in range(FEATURES + 1):
            sample = await self._probe(dialect, maker)
            if sample.error is None:
                return dialect, maker, notes
            simpler = dialect.without(sample.message)
            if simpler is not None:
                dialect, note = simpler
            elif isinstance(maker, TokenIds) and _is_about_prompts(sample.message):
                maker, note = Words(), "prompts of token ids are refused: they are words"
            else:
                break
            notes.append(note)
        raise UserError(
            f"{self.address(dialect.path)} does not answer a request for {PROBE_TOKENS} token of the model "
            f"{dialect.model!r}: {sample.error}: {sample.message or 'no message'}"
        )

    async def _probe(self, dialect: Dialect, maker: PromptMaker) -> Sample:
        question = Question(maker.make(4, Random("probe"), 0), PROBE_TOKENS)
        sample = Sample(perf_counter())
        await exchange(self._client, self.address(dialect.path), dialect.body(question), sample, lambda: None)
        return sample

    async def _ask(self, method: str, url: str, fields: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON of a small answer; None for what is no JSON. Raises UserError without an answer."""
        data = None if fields is None else json.dumps(fields).encode()
        try:
            async with self._client.request(method, url, data=data) as response:
                if response.status == 401 or response.status == 403:
                    code, message = await read_refusal(response)
                    raise UserError(f"{url} refuses the key: {code}: {message}; name the key's variable: --api-key-env")
                return response.status, _parse(await response.content.read(MAX_REPLY_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UserError(f"cannot reach {url}: {describe_failure(error)[1]}") from error


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_about_prompts(message: str) -> bool:
    return "prompt" in message or "token" in message


def _short(body: Any) -> str:
    return json.dumps(body)[:200]
