# SPDX-License-Identifier: MIT OR Apache-2.0
"""`read_body`: a request's body as one JSON object, within limits of size, time and form, and what a route makes of it.

Rules: what the headers say is judged before a byte is read; a body without a length is counted as it comes. Plain
UTF-8 JSON only: no other type, so that no web page can send one unasked; no compression, so that what is counted is
what is held. A body that is refused is not read to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from email.message import Message
from typing import Any, TypeVar

from starlette.requests import Request

from metrale_ray.serve.failures import ApiError, bad_request
from metrale_ray.serve.http.json_text import parse_object
from metrale_ray.serve.limits import ServeLimits

Parsed = TypeVar("Parsed")

PARSED_APART_BYTES = 64 * 1024
"""A larger body is parsed and looked at in a thread: that may take a while."""


async def read_body(request: Request, limits: ServeLimits, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """What `parse` makes of the body. Raises ApiError 400, 408, 413 or 415, what `parse` does, and ClientDisconnect."""
    _check_form(request)
    _check_length(request, limits.max_body_bytes)
    data = await _read_in_time(request, limits)

    def parsed() -> Parsed:
        return parse(parse_object(data, limits.max_body_depth))

    return await asyncio.to_thread(parsed) if len(data) > PARSED_APART_BYTES else parsed()


def _check_form(request: Request) -> None:
    kinds = request.headers.getlist("content-type")
    if len(kinds) != 1:
        given = "no Content-Type was given" if not kinds else f"{len(kinds)} Content-Types were given"
        raise _unsupported(f"{given}; send Content-Type: application/json")
    header = Message()
    header["Content-Type"] = kinds[0]
    if header.get_content_type() != "application/json" or not kinds[0].strip().lower().startswith("application/json"):
        raise _unsupported(f"the Content-Type is {kinds[0][:100]!r}; send application/json")
    charset = header.get_param("charset", "utf-8")
    if not isinstance(charset, str) or charset.lower() not in ("utf-8", "utf8"):
        raise _unsupported(f"the charset is {charset!r}; JSON is sent as utf-8")
    coding = ", ".join(request.headers.getlist("content-encoding"))
    if coding.strip().lower() not in ("", "identity"):
        raise _unsupported(f"the Content-Encoding is {coding[:100]!r}; send the body as it is")


def _check_length(request: Request, max_bytes: int) -> None:
    given = request.headers.get("content-length")
    if given is None:
        return
    if not (given.isascii() and given.isdigit()):
        raise bad_request(f"the Content-Length is {given[:100]!r}, which is no number", code="invalid_header")
    if len(given) > 20 or int(given) > max_bytes:
        raise _too_large(f"{given[:24]} bytes", max_bytes)


async def _read_in_time(request: Request, limits: ServeLimits) -> bytes:
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read(request, limits.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_s:g} s (body_timeout_s)"
        # The rest would be taken for another request.
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise _too_large("it has not ended yet", max_bytes)
    return bytes(data)


def _too_large(given: str, max_bytes: int) -> ApiError:
    message = f"the body is too large: {given}; at most {max_bytes} bytes are allowed (max_body_bytes)"
    return ApiError(413, message, code="body_too_large")


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, code="unsupported_media_type")
