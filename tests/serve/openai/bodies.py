# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the tests of requests share: small right bodies, and how a wrong one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.openai.call import ApiSettings
from metrale_ray.serve.openai.chat_request import parse_chat
from metrale_ray.serve.openai.completion_request import parse_completion

SETTINGS = ApiSettings()
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hello"}
BOTH = pytest.mark.parametrize(("read", "body"), [(parse_chat, CHAT), (parse_completion, COMPLETION)])
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

Read = Callable[[object, ApiSettings], Any]


def refused(read: Read, body: object, settings: ApiSettings = SETTINGS) -> ApiError:
    """The error of a body that is refused with 400, whose own answer is short and strict JSON."""
    with pytest.raises(ApiError) as caught:
        read(body, settings)
    assert caught.value.status == 400
    assert len(json.dumps(caught.value.body(), allow_nan=False)) < 2000
    return caught.value
