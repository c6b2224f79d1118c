# SPDX-License-Identifier: MIT OR Apache-2.0
"""One line of OUTPUT: what is written is one line, and reads back as what it is for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.batch.line import BadLine, key, too_long
from metrale_ray.batch.record import START, answer_line, error_line, read_record
from metrale_ray.serve.limits import ServeLimits

IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(IDS, st.sampled_from([200, 400, 404, 500]))
def test_an_answer_is_one_line_of_openais_format(custom_id: str, status: int) -> None:
    line = answer_line(custom_id, status, "r1", b'{"x":1}')
    assert line.startswith(START)
    assert line.count(b"\n") == 1
    value = json.loads(line)
    response = {"status_code": status, "request_id": "r1", "body": {"x": 1}}
    assert value == {"id": value["id"], "custom_id": custom_id, "response": response, "error": None}
    record = read_record(line)
    assert (record.key, record.is_error) == (key(None, custom_id, None), status != 200)


@given(st.none() | IDS, st.sampled_from(["invalid_url", "duplicate_custom_id"]))
def test_an_error_names_its_line(custom_id: str | None, code: str) -> None:
    bad = BadLine(7, custom_id, code, "it is\nwrong")
    line = error_line(bad)
    assert line.count(b"\n") == 1
    value = json.loads(line)
    error = {"code": code, "message": "it is\nwrong", "line": 7}
    assert value == {"id": value["id"], "custom_id": custom_id, "response": None, "error": error}
    record = read_record(line)
    assert record.is_error
    assert record.key == key(7, custom_id, code)


def test_lines_have_ids_of_their_own() -> None:
    lines = [error_line(too_long(1, ServeLimits())) for _ in range(20)]
    assert len(set(lines)) == 20


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"{}",
        b'{"id": 1, "custom_id": "a", "response": {"status_code": 200}}',
        b'{"id": "x", "custom_id": "a"}',
        b'{"id": "x", "custom_id": "a", "error": {"code": "duplicate_custom_id"}}',
        b'{"id": "x", "custom_id": "a", "error": {"code": "duplicate_custom_id", "line": "7"}}',
        b'{"id": "x", "custom_id": "a", "response": null, "error": null}',
        b'{"id": "x", "custom_id": null, "response": {"status_code": 200}}',
        b'{"id": "x", "custom_id": null, "error": {"code": "x"}}',
        b'{"id": "x", "custom_id": 3, "response": {"status_code": 200}}',
        b'{"id": "x", "custom_id": "a", "response": [1]}',
        b'{"id": "x", "custom_id": "a", "error": "x"}',
        b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}',
    ],
)
def test_what_is_no_line_of_an_output_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_record(data)


@pytest.mark.parametrize("data", [b'{"id": "x", "custom_id": "a", "response": {"body": {}}, "error": null}'])
def test_an_answer_without_status_200_is_an_error(data: bytes) -> None:
    assert read_record(data).is_error
