# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts become token ids within their limits, and long ones beside the loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.serve.prompts import CHARACTERS_PER_TOKEN
from metrale_ray.serve.templates.tokens import SHORT_CHARACTERS, chat_token_ids, text_token_ids
from metrale_ray.serve.text import Tokenizer
from tests.serve.pieces import Pieces


class Letters(Pieces):
    """A token for each letter; the first is added in front. Remembers which thread it was asked on."""

    def __init__(self) -> None:
        super().__init__([chr(32 + index) for index in range(95)])
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, *, add_special_tokens: bool, **more: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return [0] * add_special_tokens + [ord(letter) - 32 for letter in text]


def test_only_what_is_no_conversation_gets_the_tokenizers_own_tokens() -> None:
    tokenizer = Tokenizer(Letters(), [])
    assert asyncio.run(chat_token_ids(tokenizer, "ab", 100)) == [65, 66]
    assert asyncio.run(text_token_ids(tokenizer, "ab", 100)) == [0, 65, 66]


def test_a_long_text_is_encoded_beside_the_loop_and_gives_the_same() -> None:
    letters = Letters()
    short, long = "a" * SHORT_CHARACTERS, "a" * (SHORT_CHARACTERS + 1)
    for text in (short, long):
        assert asyncio.run(chat_token_ids(Tokenizer(letters, []), text, 10**6)) == [65] * len(text)
    assert letters.threads[0] is threading.current_thread()
    assert letters.threads[1] is not threading.current_thread()


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    letters = Letters()
    with pytest.raises(RequestError, match="2561 characters; a prompt has at most 9 tokens") as caught:
        asyncio.run(chat_token_ids(Tokenizer(letters, []), "a" * (10 * CHARACTERS_PER_TOKEN + 1), 10))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert letters.threads == []


@pytest.mark.parametrize("length", [1, SHORT_CHARACTERS + 1])
def test_a_text_that_is_no_unicode_is_refused_under_its_field(length: int) -> None:
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        asyncio.run(chat_token_ids(Tokenizer(Letters(), []), "\ud800" * length, 10**4))
    assert caught.value.param == "messages"
