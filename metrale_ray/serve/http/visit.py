# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Visit`: one request over HTTP as it passes through: what its line in the log and the metrics are made of."""

from __future__ import annotations

import re
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from metrale_ray.serve.openai.call import Meter

Role = Literal["anyone", "api", "admin"]
"""By which key a request came: none, an API key, an admin key."""

MAX_ID_CHARACTERS = 128
_SANE_ID = re.compile(rf"[A-Za-z0-9._:+/=-]{{1,{MAX_ID_CHARACTERS}}}")
_SCOPE_KEY = "metrale_ray.visit"


@dataclass(slots=True)
class Visit:
    """`status` is None until an answer began; `route` is the template of the path, None where no route has it."""

    request_id: str
    role: Role = "anyone"
    route: str | None = None
    status: int | None = None
    error_code: str | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0


class VisitMeter:
    """Counts one visit's tokens for its line in the log, and hands everything on."""

    def __init__(self, visit: Visit, meter: Meter) -> None:
        self._visit = visit
        self._meter = meter

    def prompt(self, num_tokens: int) -> None:
        """So many tokens of prompts."""
        self._visit.num_prompt_tokens += num_tokens
        self._meter.prompt(num_tokens)

    def tokens(self, count: int) -> None:
        """So many new tokens."""
        self._visit.num_tokens += count
        self._meter.tokens(count)

    def finished(self, reason: str) -> None:
        """One sequence ended."""
        self._meter.finished(reason)


def begin_visit(scope: MutableMapping[str, Any], given_id: str | None) -> Visit:
    """A visit for the request of `scope`, with the id that the client gave if it can be written anywhere."""
    is_sane = given_id is not None and _SANE_ID.fullmatch(given_id) is not None
    visit = Visit(given_id if given_id is not None and is_sane else uuid.uuid4().hex)
    scope[_SCOPE_KEY] = visit
    return visit


def visit_of(scope: MutableMapping[str, Any]) -> Visit:
    """The visit of this request; a new one for a request that came past the log."""
    visit = scope.get(_SCOPE_KEY)
    return visit if isinstance(visit, Visit) else begin_visit(scope, None)
