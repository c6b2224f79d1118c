# SPDX-License-Identifier: MIT OR Apache-2.0
"""`framed`: what a template's process is told, as JSON, if it is not too large.

Rules: it is measured before it is written, so that what is too large costs no more than its measuring, which stops
where the limit is passed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from metrale_ray.errors import RequestError
from metrale_ray.serve.templates.outcome import MAX_REASON_CHARACTERS

CHARACTERS_PER_VALUE = 16
"""What a value costs besides its characters, so that many small ones are not free."""


def framed(template: str, variables: Mapping[str, Any], max_characters: int, continue_at: str | None = None) -> bytes:
    """The work as JSON. Raises RequestError when the variables pass `max_characters`, or are no JSON."""
    _check_size(dict(variables), max_characters)
    work = {
        "template": template,
        "variables": variables,
        "max_characters": max_characters,
        "continue_at": continue_at,
    }
    try:
        return json.dumps(work, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        shown = error.object[error.start : error.end].encode("unicode_escape").decode()
        raise RequestError(
            f"the messages have a lone surrogate, {shown}; give valid Unicode", param="messages"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)[:MAX_REASON_CHARACTERS]
        raise RequestError(f"the messages cannot be given to the chat template: {reason}", param="messages") from error


def _check_size(variables: Mapping[str, Any], max_characters: int) -> None:
    room = max_characters
    todo: list[Any] = [variables]
    while todo:
        value = todo.pop()
        room -= CHARACTERS_PER_VALUE
        if isinstance(value, str):
            room -= len(value)
        elif isinstance(value, dict):
            room -= sum(map(len, value))
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        if room < CHARACTERS_PER_VALUE * len(todo):
            raise RequestError(
                f"messages, tools and template variables have more than {max_characters} characters together "
                f"(each value counts {CHARACTERS_PER_VALUE} more); shorten them",
                code="context_length_exceeded",
                param="messages",
            )
