# SPDX-License-Identifier: MIT OR Apache-2.0
"""`parse_object`: from a body's bytes to one JSON object that is safe to walk and to send on.

Rules: UTF-8 only; no key twice, no NaN, no infinity (also none by a number too large), no half of a surrogate pair; a
depth that later walks can bear, at which the parser gives up early; and no more in it than `json_bounds` allows, which
is counted before.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jiter

from metrale_ray.serve.failures import ApiError, bad_request
from metrale_ray.serve.json_bounds import excess
from metrale_ray.serve.slices import slices

MAX_MESSAGE_CHARACTERS = 300


def parse_object(data: bytes, max_depth: int) -> dict[str, Any]:
    """The object that `data` is. Raises ApiError 400."""
    too_much = excess(data)
    if too_much is not None:
        raise _refusal(f"it {too_much}")
    try:
        with _without_collector():
            value = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True, cache_mode="none")
    except ValueError as error:
        raise _refusal(str(error)) from error
    if not isinstance(value, dict):
        raise _refusal(f"it is {_NAMES.get(type(value), 'a number')}; an object is needed, such as {{}}")
    _check_inside(value, max_depth)
    return value


@contextmanager
def _without_collector() -> Iterator[None]:
    """No garbage is made by parsing, and looking for it a hundred times on the way takes several times as long.

    Of threads that parse at once, one turns it off and on again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_inside(value: dict[str, Any], max_depth: int) -> None:
    """Depth and numbers, without recursion. The time it takes grows with the values, not with the texts among them."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        level = [inner for holder in level for items in slices(_items(holder)) for inner in _inner(items)]
        if not level:
            return
    raise _refusal(f"lists and objects are nested more than {max_depth} deep")


def _inner(items: Sequence[Any]) -> list[Any]:
    """The lists and objects among these. Raises ApiError for a number that is none."""
    kinds = set(map(type, items))
    if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
        raise _refusal("a number is too large to be one; at most 1.8e308 is allowed")
    if kinds.isdisjoint((dict, list)):
        return []
    return [item for item in items if type(item) is dict or type(item) is list]


def _items(holder: Any) -> Sequence[Any]:
    return list(holder.values()) if type(holder) is dict else holder


def _refusal(problem: str) -> ApiError:
    problem = problem if len(problem) <= MAX_MESSAGE_CHARACTERS else problem[:MAX_MESSAGE_CHARACTERS] + "..."
    return bad_request(f"the body is no JSON that can be used: {problem}", code="invalid_json")


_NAMES: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
