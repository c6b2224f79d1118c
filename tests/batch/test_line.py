# SPDX-License-Identifier: MIT OR Apache-2.0
"""One line of INPUT: what is a request, and how each thing that is wrong is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.batch.line import BadLine, BatchRequest, duplicate, key, key_of, read_line, too_long
from metrale_ray.serve.limits import ServeLimits
from tests.batch.rig import chat, completion

LIMITS = ServeLimits()


def read(value: Any, limits: ServeLimits = LIMITS) -> BatchRequest | BadLine:
    return read_line(7, value if isinstance(value, bytes) else json.dumps(value).encode(), limits)


@pytest.mark.parametrize("line", [chat("a"), completion("a"), completion("a") | {"more": [1]}])
def test_a_request_is_what_openais_batches_have(line: dict[str, Any]) -> None:
    assert read(line) == BatchRequest(7, "a", line["url"], line["body"])


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "message"),
    [
        (
            b"{",
            None,
            "invalid_json_line",
            "the line is no JSON that can be used: EOF while parsing an object at column 1",
        ),
        (b"[1]", None, "invalid_json_line", "it is a list; an object is needed"),
        (b"\xff{}", None, "invalid_json_line", "the line is no JSON"),
        (b'{"custom_id": "a", "custom_id": "b"}', None, "invalid_json_line", "custom_id"),
        (b'{"custom_id": "a", "body": {"x": NaN}}', None, "invalid_json_line", "the line is no JSON"),
        (b'{"custom_id": "\\ud800"}', None, "invalid_json_line", "the line is no JSON"),
        (b"{}", None, "missing_required_parameter", "custom_id is missing; it must be a text"),
        ({"custom_id": 5}, None, "invalid_custom_id", "custom_id is a number; it must be a text"),
        ({"custom_id": ""}, None, "invalid_custom_id", "custom_id is ''; it must be a text"),
        ({"custom_id": "a"}, "a", "missing_required_parameter", "method is missing; it must be 'POST'"),
        (completion("a") | {"method": "GET"}, "a", "invalid_method", "method is 'GET'; it must be 'POST'"),
        (completion("a") | {"method": 1.5}, "a", "invalid_method", "method is 1.5; it must be 'POST'"),
        (completion("a") | {"url": "/v1/embeddings"}, "a", "invalid_url", "'/v1/chat/completions' or"),
        (completion("a") | {"url": None}, "a", "missing_required_parameter", "url is missing; it must be"),
        (completion("a") | {"url": ["x"]}, "a", "invalid_url", "url is a list; it must be"),
        (completion("a") | {"body": []}, "a", "invalid_body", "body is a list; it must be an object"),
        (completion("a") | {"body": True}, "a", "invalid_body", "body is True; it must be an object"),
    ],
)
def test_what_is_no_request_says_why(line: Any, custom_id: str | None, code: str, message: str) -> None:
    found = read(line)
    assert isinstance(found, BadLine)
    assert (found.number, found.custom_id, found.code) == (7, custom_id, code)
    assert message in found.message
    assert len(found.message) < 500


def test_a_body_may_be_as_deep_as_over_http_and_no_deeper() -> None:
    limits = ServeLimits(max_body_depth=10)

    def nested(depth: int) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for _ in range(depth - 1):
            body = {"x": body}
        return completion("a") | {"body": body}

    assert isinstance(read(nested(10), limits), BatchRequest)
    found = read(nested(11), limits)
    assert isinstance(found, BadLine)
    assert found.code == "invalid_json_line"


def test_a_line_is_known_by_its_id_and_by_its_number_where_it_has_none_of_its_own() -> None:
    first, bad, second = read(completion("a")), read(completion("a") | {"url": "/x"}), duplicate(read(completion("a")))
    assert key_of(first) == key_of(bad) == key(3, "a", "invalid_url") == key(None, "a", None)
    assert key_of(second) == key_of(read(b"{")) == key_of(too_long(7, LIMITS)) == key(7, None, None)
    assert second.code == "duplicate_custom_id"
    assert "'a'" in second.message


@given(st.text(min_size=1), st.integers(1, 10**9))
def test_no_id_is_taken_for_the_number_of_a_line(custom_id: str, number: int) -> None:
    try:
        found = key(None, custom_id, None)
    except UnicodeEncodeError:  # half of a surrogate pair, which no line of JSON gives
        return
    assert found != key(number, None, None)
