# SPDX-License-Identifier: MIT OR Apache-2.0
"""`written`: an answer as the bytes of its JSON, a large one in parts, between which the event loop turns.

Rules. The bytes are those that the serializer gives for the whole. It holds the interpreter's lock while it runs, so a
thread would not help: long lists are cut, and the objects that hold long lists are taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from metrale_ray.serve.openai.pace import Pace

SLICE_ITEMS = 64
"""Entries of a list that are written at once. Each may hold a hundred numbers and texts of its own."""

BYTES_PER_ITEM = 64
"""What is written in about the time of one item of a `Pace`."""


async def written(document: Mapping[str, Any], pace: Pace) -> bytes:
    """The JSON of an answer."""
    parts: list[bytes] = []
    await _write_object(document, parts, pace)
    return b"".join(parts)


async def written_event(document: Mapping[str, Any], pace: Pace) -> bytes:
    """The server-sent event with this document, as `event` makes it."""
    return b"".join((b"data: ", await written(document, pace), b"\n\n"))


async def _write_object(value: Mapping[str, Any], parts: list[bytes], pace: Pace) -> None:
    start = b"{"
    for name, inner in value.items():
        parts.append(start + to_json(name) + b":")
        start = b","
        if name == "choices":
            await _write_choices(inner, parts, pace)
        elif isinstance(inner, dict) and name == "logprobs":
            await _write_object(inner, parts, pace)
        elif isinstance(inner, list) and len(inner) > SLICE_ITEMS:
            await _write_list(inner, parts, pace)
        else:
            await _write(to_json(inner), parts, pace)
    parts.append(b"}" if value else b"{}")


async def _write_choices(choices: list[dict[str, Any]], parts: list[bytes], pace: Pace) -> None:
    start = b"["
    for choice in choices:
        parts.append(start)
        start = b","
        await _write_object(choice, parts, pace)
    parts.append(b"]" if choices else b"[]")


async def _write_list(items: list[Any], parts: list[bytes], pace: Pace) -> None:
    """A list with entries."""
    start = b"["
    for place in range(0, len(items), SLICE_ITEMS):
        data = to_json(items[place : place + SLICE_ITEMS])
        parts.append(start)
        start = b","
        await _write(data[1:-1], parts, pace)
    parts.append(b"]")


async def _write(data: bytes, parts: list[bytes], pace: Pace) -> None:
    parts.append(data)
    await pace.did(1 + len(data) // BYTES_PER_ITEM)
