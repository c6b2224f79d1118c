# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a wrong field is told: pydantic's errors and the engine's refusals, as errors in the client's own words.

Rules: only the first mistake is told. What was given is shown in a few characters, however large it is. `param` is
the field's path as the client wrote it, places of lists in brackets, as OpenAI's: `messages[0].role`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from metrale_ray.errors import RequestError
from metrale_ray.serve.failures import ApiError, bad_request, of_error

MAX_SHOWN_CHARACTERS = 60
MAX_PARAM_CHARACTERS = 100
_MAX_SHOWN_BITS = 128

_KINDS = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of a usual size",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "valid Unicode, without lone surrogates",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


def of_validation(error: ValidationError) -> ApiError:
    """The first mistake in a request."""
    first = error.errors(include_url=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return bad_request(f"{param} is missing; it is required", param=param)
    allowed = _allowed(first["type"], first.get("ctx", {}), first["msg"])
    return bad_request(f"{param} is {shown(first['input'])}; it {allowed}", param=param)


def over_limit(param: str, given: str, most: float, limit: str) -> ApiError:
    """Too much of something: `limit` is the name in `ServeLimits`, which allows `most`."""
    return bad_request(
        f"{param} {given}; this service allows at most {most} (its limit {limit}). Ask for less.",
        param=param,
        code="limit_exceeded",
    )


def of_refusal(error: RequestError, names: Mapping[str, str]) -> ApiError:
    """The engine's refusal. `names`: from its name of a field to the client's, where they differ."""
    told = names.get(error.param or "", error.param)
    found = of_error(error)
    if told == error.param:
        return found
    message = f"{told}: {error.message}"
    return ApiError(found.status, message, code=found.code, param=told)


def shown(given: Any) -> str:
    """What was given, in JSON's words and few characters."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    if isinstance(given, int) and given.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {given.bit_length()} bits"
    if isinstance(given, float) and not math.isfinite(given):
        return "no finite number"
    if isinstance(given, int | float):
        return repr(given)
    if isinstance(given, str):
        text = ascii(given[:MAX_SHOWN_CHARACTERS])
        return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."
    if isinstance(given, list):
        return f"a list of {len(given)}"
    return "an object" if isinstance(given, dict) else f"of type {type(given).__name__}"


def _path(location: tuple[int | str, ...]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if part != "[key]")
    return shorter("".join(parts).removeprefix("."), MAX_PARAM_CHARACTERS) or "body"


def shorter(text: str, most: int) -> str:
    """`text`, printable and of at most `most` characters: it may be a client's own."""
    plain = "".join(character if character.isprintable() else "?" for character in text[: most + 1])
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def _allowed(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "value_error":
        return str(context["error"])
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "too_short":
        return f"must have at least {context['min_length']}"
    if kind == "too_long":
        return f"must have at most {context['max_length']}"
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        if name in context:
            return f"must be {words} {_number(context[name])}"
    return f"is refused: {message}"


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
