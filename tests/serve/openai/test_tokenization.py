# SPDX-License-Identifier: MIT OR Apache-2.0
"""Texts become token ids within a bound of their own, and token ids texts, in parts."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError
from metrale_ray.serve.openai import decoded as decoded_module
from metrale_ray.serve.openai.decoded import decoded
from metrale_ray.serve.openai.tokenization import CHARACTERS_PER_TOKEN, LEAST_CHARACTERS, tokenize
from metrale_ray.serve.openai.tokenize_request import parse_tokenize
from tests.serve.openai.played import Played
from tests.serve.test_text import TOKENIZERS


async def tokenized(max_model_len: int, **body: Any) -> dict[str, Any]:
    call = Played(["a", "b"]).call()
    model = dataclasses.replace(call.model, max_model_len=max_model_len)
    return await tokenize(dataclasses.replace(call, model=model), parse_tokenize(body, call.settings))


@pytest.mark.parametrize(
    ("max_model_len", "most"), [(100, LEAST_CHARACTERS), (LEAST_CHARACTERS, LEAST_CHARACTERS * CHARACTERS_PER_TOKEN)]
)
def test_a_text_is_tokenized_up_to_a_bound_which_a_refusal_tells(max_model_len: int, most: int) -> None:
    assert asyncio.run(tokenized(max_model_len, prompt="a" * most))["count"] == 1
    with pytest.raises(RequestError, match=f"{most + 1} characters; at most {most} are tokenized here") as caught:
        asyncio.run(tokenized(max_model_len, prompt="a" * (most + 1)))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError, match=f"at most {most} are") as caught:
        asyncio.run(tokenized(max_model_len, messages=[{"role": "user", "content": "a" * most}]))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(data=st.data())
def test_ids_that_are_decoded_in_parts_have_the_text_that_they_have_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoded_module, "IDS_AT_ONCE", data.draw(st.integers(1, 30)))
        assert asyncio.run(decoded(ids, False, tokenizer)) == tokenizer.decode(ids, False)


def test_nothing_is_kept_of_ids_that_stand_for_no_token() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    size = len(tokenizer._known_ids), len(tokenizer._texts)
    assert [tokenizer.token_text(token_id) for token_id in range(10**6, 10**6 + 100)] == [""] * 100
    assert all(tokenizer.is_silent(token_id, False) for token_id in range(10**6, 10**6 + 100))
    assert (len(tokenizer._known_ids), len(tokenizer._texts)) == size
