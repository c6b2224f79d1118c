# SPDX-License-Identifier: MIT OR Apache-2.0
"""The bytes of server-sent events: one per chunk of an answer, one for a failure, and OpenAI's last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from metrale_ray.serve.failures import ApiError

DONE = b"data: [DONE]\n\n"


def event(document: Mapping[str, Any]) -> bytes:
    """One event with a JSON document, which holds no line break as bytes."""
    return b"data: " + to_json(document) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """What a stream ends with when it fails after its start; no DONE comes behind it."""
    return event(error.body())
