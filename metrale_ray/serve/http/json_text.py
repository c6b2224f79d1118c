# SPDX-License-Identifier: MIT OR Apache-2.0
"""`parse_object`: from a body's bytes to one JSON object that is safe to walk and to send on.

Rules: UTF-8 only; no key twice, no NaN, no infinity (also none by a number too large), no half of a surrogate pair; a
depth and a number of lists and objects that later walks can bear. The parser gives up early at all of these.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

import jiter

from metrale_ray.serve.failures import ApiError, bad_request

MAX_CONTAINERS = 2**17
"""Lists and objects in one body. Each costs the parser and Python's collector a microsecond or several."""

MAX_MESSAGE_CHARACTERS = 300
_TEXT = re.compile(rb'"(?:[^"\\]+|\\.)*+"?', re.DOTALL)


def parse_object(data: bytes, max_depth: int) -> dict[str, Any]:
    """The object that `data` is. Raises ApiError 400."""
    num_brackets = data.count(b"[") + data.count(b"{")
    if num_brackets > MAX_CONTAINERS:
        _check_count(data)
    try:
        value = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="keys")
    except ValueError as error:
        raise _refusal(str(error)) from error
    if not isinstance(value, dict):
        raise _refusal(f"it is {_NAMES.get(type(value), 'a number')}; an object is needed, such as {{}}")
    _check_inside(value, max_depth)
    return value


def _check_count(data: bytes) -> None:
    """Most brackets may be those of texts, such as program code."""
    bare = _TEXT.sub(b"", data)
    count = bare.count(b"[") + bare.count(b"{")
    if count > MAX_CONTAINERS:
        raise _refusal(f"it holds {count} lists and objects; at most {MAX_CONTAINERS} are allowed")


def _check_inside(value: dict[str, Any], max_depth: int) -> None:
    """Depth and numbers, without recursion. The time it takes grows with the values, not with the texts among them."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [inner for holder in level for inner in _inner(_items(holder))]
        if not level:
            return
    raise _refusal(f"lists and objects are nested more than {max_depth} deep")


def _inner(items: Collection[Any]) -> list[Any]:
    """The lists and objects among these. Raises ApiError for a number that is none."""
    kinds = set(map(type, items))
    if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
        raise _refusal("a number is too large to be one; at most 1.8e308 is allowed")
    if kinds.isdisjoint((dict, list)):
        return []
    return [item for item in items if type(item) is dict or type(item) is list]


def _items(holder: Any) -> Collection[Any]:
    return holder.values() if type(holder) is dict else holder


def _refusal(problem: str) -> ApiError:
    problem = problem if len(problem) <= MAX_MESSAGE_CHARACTERS else problem[:MAX_MESSAGE_CHARACTERS] + "..."
    return bad_request(f"the body is no JSON that can be used: {problem}", code="invalid_json")


_NAMES: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
