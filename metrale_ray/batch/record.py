# SPDX-License-Identifier: MIT OR Apache-2.0
"""One line of OUTPUT, as OpenAI's batches have it.

    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
     "error": null}

Rules. A request that the engine or the service's checks refuse has its answer too: `response` with the status and the
body that a service would have sent. A line of INPUT that is no request has `response` null, and `error` with `code`,
`message` and `line`, its number. Whole lines only: strict JSON, no line break within.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import jiter
from pydantic_core import to_json

from metrale_ray.batch.line import DUPLICATE, BadLine, key

START = b'{"id":"batch_req_'
"""What each line begins with."""

OK = 200


@dataclass(frozen=True, slots=True)
class Record:
    """What a line of OUTPUT says: which line of INPUT it is for, and whether that failed."""

    key: bytes
    place: str
    is_error: bool


def answer_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The answer to one request. `body`: JSON."""
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, to_json(request_id), body)
    return _line(custom_id, response, b"null")


def error_line(line: BadLine) -> bytes:
    """What is wrong with a line of INPUT."""
    error = {"code": line.code, "message": line.message, "line": line.number}
    return _line(line.custom_id, b"null", to_json(error))


def _line(custom_id: str | None, response: bytes, error: bytes) -> bytes:
    own_id = uuid.uuid4().hex.encode()
    return b'%b%b","custom_id":%b,"response":%b,"error":%b}\n' % (START, own_id, to_json(custom_id), response, error)


def read_record(data: bytes) -> Record:
    """What a line says. Raises ValueError for one that is none."""
    value = jiter.from_json(data, cache_mode="none")
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        raise ValueError("it is no object with an id")
    custom_id, error, response = value.get("custom_id"), value.get("error") or {}, value.get("response") or {}
    if not (isinstance(custom_id, str | None) and isinstance(error, dict) and isinstance(response, dict)):
        raise ValueError("custom_id, response or error is of another kind")
    number, status = error.get("line"), response.get("status_code")
    by_number = custom_id is None or error.get("code") == DUPLICATE
    if not (error or response) or (by_number and type(number) is not int):
        raise ValueError("it answers nothing")
    place = f"line {number}" if by_number else repr(custom_id)
    return Record(key(number, custom_id, error.get("code")), place, bool(error) or status != OK)
