# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keys, containers and texts are counted as they are, whatever stands in texts, and before anything is parsed."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.serve import json_bounds
from metrale_ray.serve.json_bounds import MAX_CONTAINERS, MAX_KEYS, MAX_TEXTS, excess

TEXTS = st.text(alphabet='a"\\:[{,\n\u00e9', max_size=6)
VALUES = st.recursive(
    st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def _walk(value: Any) -> tuple[int, int, int]:
    """Keys, containers and texts in `value`."""
    if isinstance(value, str):
        return 0, 0, 1
    if isinstance(value, dict):
        inner = [_walk(one) for one in value.values()]
        return (
            len(value) + sum(one[0] for one in inner),
            1 + sum(one[1] for one in inner),
            len(value) + sum(one[2] for one in inner),
        )
    if isinstance(value, list):
        inner = [_walk(one) for one in value]
        return sum(one[0] for one in inner), 1 + sum(one[1] for one in inner), sum(one[2] for one in inner)
    return 0, 0, 0


@given(VALUES, st.booleans(), st.tuples(*[st.integers(0, 6)] * 3))
def test_each_bound_is_exact(value: Any, plain: bool, most: tuple[int, int, int]) -> None:
    counts = _walk(value)
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in zip(("MAX_KEYS", "MAX_CONTAINERS", "MAX_TEXTS"), most, strict=True):
            patch.setattr(json_bounds, name, bound)
        found = excess(json.dumps(value, ensure_ascii=plain).encode())
    assert (found is None) == all(count <= bound for count, bound in zip(counts, most, strict=True))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'"a":' * (MAX_KEYS + 1), f"holds {MAX_KEYS + 1} keys; at most {MAX_KEYS} are allowed"),
        (b"[{" * MAX_CONTAINERS, f"holds {2 * MAX_CONTAINERS} lists and objects; at most {MAX_CONTAINERS} are allowed"),
        (b'"",' * (MAX_TEXTS + 1), f"holds {MAX_TEXTS + 1} texts; at most {MAX_TEXTS} are allowed"),
    ],
)
def test_what_is_too_much_is_told_with_what_is_allowed(data: bytes, says: str) -> None:
    assert excess(data) == says


@pytest.mark.parametrize("text", ["a,:[{", "\\", '"', '\\"', '[\\"', "e1 "])
def test_one_long_text_is_no_excess_and_costs_little(text: str) -> None:
    data = json.dumps([text * (4 * 2**20 // len(text)), 1]).encode()
    began_s = time.thread_time()
    assert excess(data) is None
    assert time.thread_time() - began_s < 0.4  # 0.06 s


@pytest.mark.parametrize("data", [b'"' * 2**22, b'"a":' * 2**20, b"[" * 2**22, rb'"\"' * 2**20, b"\\" * 2**22])
def test_any_bytes_are_counted_soon(data: bytes) -> None:
    began_s = time.thread_time()
    excess(data)
    assert time.thread_time() - began_s < 0.4
