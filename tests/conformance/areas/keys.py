# SPDX-License-Identifier: MIT OR Apache-2.0
"""Keys: without the right one there is no answer."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance.target import Target

NEEDS = ("chat", "keys")
MESSAGES: Any = [{"role": "user", "content": "one"}]


def a_wrong_key_is_refused(target: Target) -> None:
    with target.client() as right:
        wrong = right.with_options(api_key="sk-wrong")
        with pytest.raises(openai.AuthenticationError) as caught:
            wrong.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=1)
        assert "sk-wrong" not in str(caught.value)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with pytest.raises(openai.AuthenticationError):
            wrong.get("/no/such/route", cast_to=object)
