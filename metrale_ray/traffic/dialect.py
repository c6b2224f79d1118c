# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Dialect`: how requests are written for one server: which fields beyond the plainest it takes.

Rules: the richest form is tried first. A field that a server refuses by its name is left out from then on, and the
report says so. What it leaves out: asking the server (`server`).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from metrale_ray.traffic.question import Question

CHAT, COMPLETIONS = "chat", "completions"
ENDPOINTS = {CHAT: "chat/completions", COMPLETIONS: "completions"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of a request. `length_field`: the field for the tokens to generate."""

    model: str
    endpoint: str = COMPLETIONS
    ignore_eos: bool = True
    include_usage: bool = True
    length_field: str = "max_tokens"
    temperature: float | None = None

    @property
    def path(self) -> str:
        """Where requests go, below the version."""
        return ENDPOINTS[self.endpoint]

    def body(self, question: Question) -> bytes:
        """The request for `question`, a stream, as JSON."""
        fields: dict[str, Any] = {"model": self.model, "stream": True, self.length_field: question.max_tokens}
        if self.endpoint == CHAT:
            fields["messages"] = [{"role": "user", "content": question.prompt}]
        else:
            fields["prompt"] = question.prompt
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        return json.dumps(fields, separators=(",", ":")).encode()

    def without(self, refusal: str) -> tuple[Dialect, str] | None:
        """The form without the field that `refusal` names, and what that means; None when it names none of them."""
        if self.ignore_eos and "ignore_eos" in refusal:
            return dataclasses.replace(self, ignore_eos=False), "ignore_eos is refused: answers may end early"
        if self.include_usage and ("stream_options" in refusal or "include_usage" in refusal):
            changed = dataclasses.replace(self, include_usage=False)
            return changed, "stream_options is refused: tokens are counted by pieces"
        if self.length_field == "max_tokens" and "max_completion_tokens" in refusal:
            changed = dataclasses.replace(self, length_field="max_completion_tokens")
            return changed, "max_completion_tokens instead of max_tokens"
        return None
