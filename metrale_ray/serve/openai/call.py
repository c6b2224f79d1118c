# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Call`: one request over HTTP, as those who answer it know it, without HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.limits import ServeLimits


class Meter(Protocol):
    """Is told how one request goes, for the figures. Every method may be called from the loop, and is quick."""

    def prompt(self, num_tokens: int) -> None:
        """Its prompts have so many tokens together."""
        ...

    def tokens(self, count: int) -> None:
        """So many tokens came just now; the first call is the time to the first token."""
        ...

    def finished(self, reason: str) -> None:
        """One sequence ended: "stop", "length", "tool_calls", "abort" or "error"."""
        ...


class NoMeter:
    """Nobody counts."""

    def prompt(self, num_tokens: int) -> None:
        """Not counted."""

    def tokens(self, count: int) -> None:
        """Not counted."""

    def finished(self, reason: str) -> None:
        """Not counted."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What the owner of a service allows.

    `strict`: unknown fields are refused. `allow_request_templates`: a request may bring a chat template of its own.
    """

    limits: ServeLimits = field(default_factory=ServeLimits)
    strict: bool = False
    allow_request_templates: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One request: for which model, under which of its names, and within which limits."""

    model: ServedModel
    model_name: str
    settings: ApiSettings
    request_id: str
    meter: Meter = field(default_factory=NoMeter)
