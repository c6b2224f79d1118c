# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import asyncio
import gzip
import json
import threading
from typing import Any

import pytest
from starlette.requests import Request

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.body import PARSED_APART_BYTES, read_body
from metrale_ray.serve.limits import ServeLimits
from tests.serve.http.asgi import JSON, Client, Header, ask, asked, plain_app, scope_of

SMALL = ServeLimits(max_body_bytes=1000, body_timeout_s=0.01)


def read(headers: list[Header], *parts: bytes, whole: bool = True, limits: ServeLimits = SMALL) -> tuple[object, int]:
    """What came of it, and how many parts were read."""

    async def go() -> tuple[object, int]:
        client = Client(parts, whole=whole)
        request = Request(scope_of("POST", "/", headers), client.receive)
        try:
            return await read_body(request, limits, lambda body: body), client.num_read
        except ApiError as error:
            return (error.status, error.code), client.num_read

    return asyncio.run(go())


@pytest.mark.parametrize(
    "kind",
    [
        *(
            "application/json",
            "Application/JSON",
            "application/json; charset=utf-8",
            'application/json;charset="UTF-8"',
        ),
        *("application/json; charset=utf8", "application/json; other=1", " application/json "),
    ],
)
def test_json_in_utf8_is_read_however_its_type_is_written(kind: str) -> None:
    assert read([("content-type", kind)], b'{"a": ', b'"\xc3\xa9"}')[0] == {"a": "é"}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("content-type", "")],
        [("content-type", "text/plain")],
        [("content-type", "application/x-www-form-urlencoded")],
        [("content-type", "multipart/form-data; boundary=x")],
        [("content-type", "application/jsonx")],
        [("content-type", "application")],
        [("content-type", "text/plain; application/json")],
        [("content-type", "x, application/json")],
        [("content-type", "application/json; charset=latin-1")],
        [("content-type", "application/json; charset=utf-16")],
        [("content-type", "application/json; charset*=utf-8''utf-16")],
        [JSON, ("content-type", "text/plain")],
        [JSON, ("content-encoding", "gzip")],
        [JSON, ("content-encoding", "br")],
        [JSON, ("content-encoding", "identity"), ("content-encoding", "gzip")],
    ],
)
def test_other_forms_are_refused_before_a_byte_is_read(headers: list[Header]) -> None:
    assert read(headers, gzip.compress(b'{"a": 1}')) == ((415, "unsupported_media_type"), 0)


def test_a_declared_length_above_the_limit_is_refused_before_a_byte_is_read() -> None:
    assert read([JSON, ("content-length", "1001")], b"{}") == ((413, "body_too_large"), 0)
    assert read([JSON, ("content-length", "9" * 5000)], b"{}") == ((413, "body_too_large"), 0)
    assert read([JSON, ("content-length", "1000")], b"{}")[0] == {}


@pytest.mark.parametrize("length", ["x", "-1", "1.5", "", "\xb2"])
def test_a_length_that_is_no_number_is_refused(length: str) -> None:
    assert read([JSON, ("content-length", length)], b"{}") == ((400, "invalid_header"), 0)


def test_a_body_without_a_length_is_counted_as_it_comes_and_left_at_the_limit() -> None:
    assert read([JSON], b'{"a": "', b"x" * 984, b'"}', b" " * 7)[0] == {"a": "x" * 984}
    assert read([JSON], *[b" " * 100] * 50) == ((413, "body_too_large"), 11)
    assert read([JSON, ("content-length", "10")], *[b" " * 100] * 50) == ((413, "body_too_large"), 11)


def test_a_body_that_does_not_end_in_time_is_refused() -> None:
    assert read([JSON], b'{"a": ', whole=False)[0] == (408, "body_timeout")


def test_a_large_body_is_parsed_like_a_small_one() -> None:
    value = {"a": ["é" * 10] * (PARSED_APART_BYTES // 10)}
    assert read([JSON], json.dumps(value).encode(), limits=ServeLimits())[0] == value
    assert read([JSON], b" " * PARSED_APART_BYTES + b"{", limits=ServeLimits())[0] == (400, "invalid_json")


@pytest.mark.parametrize(("size", "is_apart"), [(10, False), (PARSED_APART_BYTES, True)])
def test_what_a_route_makes_of_a_large_body_is_made_in_a_thread_too(size: int, is_apart: bool) -> None:
    threads: list[threading.Thread] = []

    def note(body: dict[str, Any]) -> int:
        threads.append(threading.current_thread())
        return len(body)

    async def go() -> int:
        client = Client([b'{"a": "' + b"x" * size + b'"}'])
        return await read_body(Request(scope_of("POST", "/", [JSON]), client.receive), ServeLimits(), note)

    assert asyncio.run(go()) == 1
    assert [thread is not threading.current_thread() for thread in threads] == [is_apart]


def test_a_client_that_leaves_within_its_body_ends_the_request() -> None:
    async def go() -> int | None:
        client = Client([b'{"a": '], whole=False)
        client.left.set()
        return (await asked(plain_app(), "POST", "/tokenize", [JSON], client)).status

    assert asyncio.run(go()) == 499


def test_a_refusal_over_http_has_openais_shape_and_says_what_is_allowed() -> None:
    answer = ask(plain_app(), "POST", "/v1/completions", [("content-type", "text/plain")], b"{}")
    assert (answer.status, answer.code) == (415, "unsupported_media_type")
    assert "application/json" in answer.json["error"]["message"]
    assert answer.header("content-type") == "application/json"
