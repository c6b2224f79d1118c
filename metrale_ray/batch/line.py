# SPDX-License-Identifier: MIT OR Apache-2.0
"""One line of INPUT: a request, or what is wrong with it.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Rules: as OpenAI's batches have it; other keys are let be. What is in the body is judged when it is asked, as a service
would (`answering`). A line that is no request becomes an error with a code of OpenAI's for it, under its `custom_id`
where it has one.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.json_text import parse_object
from metrale_ray.serve.limits import ServeLimits

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT_URL, COMPLETION_URL)
METHOD = "POST"
AROUND_BODY_BYTES = 64 * 1024
"""What a line may have besides its body: an id of any sensible length."""

DUPLICATE = "duplicate_custom_id"
_PARSERS_PLACE = " at line 1 column "  # of the one line that it was given
_PARSERS_WORDS = "the body is no JSON that can be used: "


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request. `number`: its line's, from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request. `custom_id`: None where it has none that can be used."""

    number: int
    custom_id: str | None
    code: str
    message: str


Line = BatchRequest | BadLine


def most_bytes(limits: ServeLimits) -> int:
    """How long a line may be."""
    return limits.max_body_bytes + AROUND_BODY_BYTES


def read_line(number: int, data: bytes, limits: ServeLimits) -> Line:
    """What stands in one line."""
    try:
        value = parse_object(data, limits.max_body_depth + 1)
    except ApiError as error:
        problem = error.message.removeprefix(_PARSERS_WORDS).replace(_PARSERS_PLACE, " at column ")
        return BadLine(number, None, "invalid_json_line", f"the line is no JSON that can be used: {problem}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        code = "missing_required_parameter" if custom_id is None else "invalid_custom_id"
        return BadLine(number, None, code, f"custom_id {_given(custom_id)}; it must be a text that no other line has")
    return _wrong(number, custom_id, value) or BatchRequest(number, custom_id, value["url"], value["body"])


def too_long(number: int, limits: ServeLimits) -> BadLine:
    """A line of which not even the beginning is looked at."""
    most = most_bytes(limits)
    message = f"the line is too long; at most {most} bytes are allowed (max_body_bytes and {AROUND_BODY_BYTES})"
    return BadLine(number, None, "line_too_long", message)


def duplicate(line: Line) -> BadLine:
    """The line, which has the custom_id of one before it."""
    shown = reprlib.repr(line.custom_id)
    message = f"custom_id is {shown}, which an earlier line has already; give each line another one"
    return BadLine(line.number, line.custom_id, DUPLICATE, message)


def key_of(line: Line) -> bytes:
    """Under which a line is known: its custom_id; its number where it has none of its own."""
    return key(line.number, line.custom_id, line.code if isinstance(line, BadLine) else None)


def key(number: int | None, custom_id: str | None, code: str | None) -> bytes:
    """The same, of what OUTPUT tells of it; `code` is that of its error."""
    if custom_id is None or code == DUPLICATE:
        return b"line:%d" % (number or 0)
    return b"id:" + custom_id.encode()


def _wrong(number: int, custom_id: str, value: dict[str, Any]) -> BadLine | None:
    """The first thing that is wrong besides the id."""
    method, url, body = value.get("method"), value.get("url"), value.get("body")
    if method != METHOD:
        return _refused(number, custom_id, "method", method, "invalid_method", f"'{METHOD}'")
    if url not in URLS:
        return _refused(number, custom_id, "url", url, "invalid_url", " or ".join(map(repr, URLS)))
    if not isinstance(body, dict):
        return _refused(number, custom_id, "body", body, "invalid_body", "an object, the request itself")
    return None


def _refused(number: int, custom_id: str, name: str, given: object, code: str, allowed: str) -> BadLine:
    code = "missing_required_parameter" if given is None else code
    return BadLine(number, custom_id, code, f"{name} {_given(given)}; it must be {allowed}")


def _given(value: object) -> str:
    if value is None:
        return "is missing"
    return f"is {reprlib.repr(value)}" if isinstance(value, str | bool | float) else f"is {_KINDS[type(value)]}"


_KINDS: dict[type, str] = {int: "a number", list: "a list", dict: "an object"}
