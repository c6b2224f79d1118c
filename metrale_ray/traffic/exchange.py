# SPDX-License-Identifier: MIT OR Apache-2.0
"""One request and its streamed answer: what arrived when, written into a `Sample`.

Rules: whatever goes wrong is a code in the sample, and nothing is raised but the cancellation of the whole run. A
stream is whole when it ends with [DONE]. The connection is read to its end, so that it can be used again.

The codes: the server's own where it sent an error object, else `http_<status>`; `connect_error`, `timeout`,
`connection_lost`, `bad_event` (no JSON, or of a wrong form) and `cut_off` (an end without [DONE]).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import aiohttp

from metrale_ray.traffic.events import EventReader, EventTooLong
from metrale_ray.traffic.sample import Sample

MAX_ERROR_BYTES = 64 * 1024
DONE = b"[DONE]"
# The fields of a chat's delta that are output; the role, which comes first, is none.
DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


async def exchange(
    client: aiohttp.ClientSession, url: str, body: bytes, sample: Sample, tell_piece: Callable[[], None]
) -> None:
    """Send `body`, and note in `sample` what comes; `tell_piece` is called for each piece with output."""
    try:
        async with client.post(url, data=body) as response:
            if response.status == 200:
                await _read_stream(response, sample, tell_piece)
            else:
                sample.fail(*await read_refusal(response))
    except (aiohttp.ClientError, TimeoutError, EventTooLong, OSError) as error:
        sample.fail(*describe_failure(error))
    sample.ended_s = perf_counter()


def describe_failure(error: Exception) -> tuple[str, str]:
    """Code and message of what the network, or a server's bytes, raised."""
    if isinstance(error, EventTooLong):
        return "bad_event", str(error)
    if isinstance(error, TimeoutError):  # before the rest: aiohttp's own timeouts are connection errors, too
        return "timeout", "nothing came for too long"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect_error", str(error)
    return "connection_lost", f"{type(error).__name__}: {error}"


async def read_refusal(response: aiohttp.ClientResponse) -> tuple[str, str]:
    """Code and message of an answer that is an error."""
    content = await response.content.read(MAX_ERROR_BYTES)
    try:
        error = json.loads(content)
    except (ValueError, RecursionError):
        error = None
    found = _error_of(error) if isinstance(error, dict) else None
    code, message = found or (None, content.decode("utf-8", "replace"))
    return code or f"http_{response.status}", message


async def _read_stream(response: aiohttp.ClientResponse, sample: Sample, tell_piece: Callable[[], None]) -> None:
    reader, is_done = EventReader(), False
    async for piece in response.content.iter_any():
        now_s = perf_counter()
        for data in reader.feed(piece):
            if data == DONE:
                is_done = True
            elif _note_event(data, now_s, sample):
                tell_piece()
    if not is_done:
        sample.fail("cut_off", "the stream ended without [DONE]")


def _note_event(data: bytes, now_s: float, sample: Sample) -> bool:
    """Note one event. Whether it has output."""
    try:
        event = json.loads(data)
        if not isinstance(event, dict):
            raise TypeError(f"an event is {data[:80]!r}")
        if event.get("error") is not None:
            code, message = _error_of(event) or (None, "")
            sample.fail(code or "stream_error", message)
            return False
        _note_usage(event.get("usage"), sample)
        choices = event.get("choices")
        if not choices:
            return False
        choice = choices[0]
        sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
        if not _has_output(choice):
            return False
    except (ValueError, RecursionError, TypeError, AttributeError, LookupError) as error:
        sample.fail("bad_event", f"{type(error).__name__}: {error}")
        return False
    sample.note_piece(now_s)
    return True


def _has_output(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text") or choice.get("token_ids"))
    return any(delta.get(name) for name in DELTA_FIELDS)


def _note_usage(usage: Mapping[str, Any] | None, sample: Sample) -> None:
    if usage:
        sample.num_input = int(usage["prompt_tokens"])
        sample.num_output = int(usage.get("completion_tokens") or 0)


def _error_of(body: Mapping[str, Any]) -> tuple[str | None, str] | None:
    """Code and message in an error object, or in the plain text that some servers put there."""
    error = body.get("error")
    if isinstance(error, dict):
        code = error.get("code") or error.get("type")
        return (str(code) if code else None), str(error.get("message", ""))
    return None if error is None else (None, str(error))
