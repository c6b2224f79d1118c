# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Target`: the server that is checked: where it is, what it is asked for, and what it is said not to have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import openai

TIMEOUT_S = 120.0
FEATURES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "models": "/v1/models",
    "tools": "tools and tool_choice",
    "schemas": "response_format",
    "logprobs": "logprobs",
    "sampling": "n, seed, stop and limits",
    "errors": "errors as OpenAI has them",
    "keys": "keys; needs --api-key",
    "token-ids": "prompts of token ids",
}


class NotApplicable(Exception):
    """A check has nothing to look at in this server's answers, and says why."""


@dataclass(frozen=True)
class Target:
    """`url` ends before /v1. `missing`: names of FEATURES that are not checked."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    missing: frozenset[str] = frozenset()

    @property
    def base_url(self) -> str:
        """What the clients call so."""
        return f"{self.url}/v1"

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        """The client that all checks share, since making one takes longer than most of them. It never asks twice."""
        yield self._client

    def async_client(self) -> openai.AsyncOpenAI:
        """A client for one event loop."""
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self._key, max_retries=0, timeout=TIMEOUT_S)

    def close(self) -> None:
        """Close what was opened."""
        self._client.close()

    @cached_property
    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=self._key, max_retries=0, timeout=TIMEOUT_S)

    @property
    def _key(self) -> str:
        return self.api_key or "none"  # the client takes no empty one
