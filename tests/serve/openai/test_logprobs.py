# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log probabilities in OpenAI's shapes, over tokenizers whose tokens are parts of characters too."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.serve.logprobs import logprob_entry
from metrale_ray.serve.openai.logprobs import (
    CompletionLogprobs,
    Entry,
    chat_logprobs,
    prompt_logprobs,
    text_offsets,
)
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.token_bytes import token_bytes
from metrale_ray.serve.text import Tokenizer
from tests.serve.openai.turns import turns_of
from tests.serve.test_text import TOKENIZERS

TEXT = "aé漢🙂 ok"


def chat(entries: list[Entry], count: int, tokenizer: Tokenizer | None, pace: Pace | None = None) -> list[Any]:
    return asyncio.run(chat_logprobs(entries, count, tokenizer, pace or Pace()))


def completion(*given: Any) -> dict[str, list[Any]]:
    told = CompletionLogprobs()
    asyncio.run(told.add(*given, Pace()))
    return told.behind(CompletionLogprobs())


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_the_bytes_of_a_texts_tokens_joined_are_its_bytes_also_where_a_token_is_part_of_a_character() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = ids_of(tokenizer, TEXT)
    assert any("\ufffd" in tokenizer.token_text(token_id) for token_id in ids)
    assert b"".join(token_bytes(tokenizer, token_id) for token_id in ids) == TEXT.encode()


def test_each_byte_has_a_token_of_its_own_bytes() -> None:
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        found = {token_bytes(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)}
        assert {bytes([value]) for value in range(0x80, 0x100)} <= found


def test_an_id_that_stands_for_no_token_has_no_bytes_and_a_replacement_character_its_own() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert token_bytes(tokenizer, 5000) == b""
    (entry,) = chat([logprob_entry(TokenLogprobs(5000, -1.0, 1), tokenizer)], 0, tokenizer)
    assert entry == {"token": "", "logprob": -1.0, "bytes": [], "top_logprobs": []}


def test_parts_of_a_character_are_told_apart_in_completions() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, second = (
        next(i for i in range(tokenizer.vocab_size) if token_bytes(tokenizer, i) == bytes([value]))
        for value in (0xE2, 0x80)
    )
    entry = logprob_entry(TokenLogprobs(first, -1.0, 1, (first, second), (-1.0, -2.0)), tokenizer)
    told = completion([first], [entry], [0], 2, tokenizer)
    assert told["tokens"] == ["bytes:\\xe2"]
    assert told["top_logprobs"] == [{"bytes:\\xe2": -1.0, "bytes:\\x80": -2.0}]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_likely_tokens_are_told_as_were_asked_for(count: int) -> None:
    entry = logprob_entry(TokenLogprobs(9, -5.0, 7, (1, 2, 3), (-1.0, -1.0, -2.0)), None)
    (told_chat,) = chat([entry], count, None)
    names = ["token_id:1", "token_id:2", "token_id:3"][:count]
    assert [one["token"] for one in told_chat["top_logprobs"]] == names
    assert (told_chat["token"], told_chat["bytes"]) == ("token_id:9", None)
    told = completion([9], [entry], [0], count, None)
    assert list(told["top_logprobs"][0]) == [*names, "token_id:9"]
    assert (
        list(asyncio.run(prompt_logprobs([None, entry], count, Pace()))[1] or ()) == ["9", "1", "2", "3"][: count + 1]
    )


def test_a_place_in_the_text_is_that_of_the_character_a_token_belongs_to() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = ids_of(tokenizer, TEXT)
    offsets = asyncio.run(text_offsets(ids, True, tokenizer, Pace()))
    assert len(offsets) == len(ids)
    for offset, token_id in zip(offsets, ids, strict=True):
        text = tokenizer.token_text(token_id)
        if "\ufffd" not in text:
            assert TEXT[offset:].startswith(text)
    assert asyncio.run(text_offsets(ids, True, None, Pace())) == [0] * len(ids)


@pytest.mark.parametrize("kind", ["chat", "completion", "prompt"])
def test_the_loop_turns_while_many_places_are_told(kind: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tuple(range(20, 40))
    entries = [logprob_entry(TokenLogprobs(20, -1.0, 1, ids, (-1.0,) * 20), tokenizer)] * 2000

    async def told() -> Any:
        if kind == "chat":
            return await chat_logprobs(entries, 20, tokenizer, Pace())
        if kind == "prompt":
            return await prompt_logprobs(entries, 20, Pace())
        made = CompletionLogprobs()
        await made.add([20] * len(entries), entries, [0] * len(entries), 20, tokenizer, Pace())
        return made.top_logprobs

    found, num_turns = asyncio.run(turns_of(told()))
    assert len(found) == len(entries)
    assert num_turns >= len(entries) // 150


def test_the_bytes_and_the_name_of_a_token_are_looked_up_once() -> None:
    tokenizer = Tokenizer(TOKENIZERS["byte_level"].inner, [])
    part = next(i for i in range(tokenizer.vocab_size) if token_bytes(tokenizer, i) == b"\xe2")
    num_asked = 0

    def convert(token_id: int) -> Any:
        nonlocal num_asked
        num_asked += 1
        return TOKENIZERS["byte_level"].inner.convert_ids_to_tokens(token_id)

    tokenizer.inner = SimpleNamespace(convert_ids_to_tokens=convert)
    entries = [logprob_entry(TokenLogprobs(part, -1.0, 1), tokenizer)] * 10
    assert {tuple(entry["bytes"]) for entry in chat(entries, 0, tokenizer)} == {(0xE2,)}
    assert set(completion([part] * 10, entries, [0] * 10, 0, tokenizer)["tokens"]) == {"bytes:\\xe2"}
    assert num_asked == 2  # for the bytes, and for the name
