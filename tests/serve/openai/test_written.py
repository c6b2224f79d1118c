# SPDX-License-Identifier: MIT OR Apache-2.0
"""An answer that is written in parts is what the serializer makes of the whole, and the loop turns meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from metrale_ray.serve.openai.events import event
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.written import SLICE_ITEMS, written, written_event
from tests.serve.openai.turns import turns_of

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e-300) | st.text(max_size=4)
OBJECTS = st.dictionaries(st.text(max_size=3), SCALARS, max_size=3)
LISTS = st.lists(SCALARS | OBJECTS, max_size=3).flatmap(
    lambda items: st.sampled_from([1, SLICE_ITEMS, SLICE_ITEMS + 1]).map(lambda count: items * count)
)
LOGPROBS = st.none() | st.dictionaries(st.sampled_from(["content", "tokens", "refusal"]), LISTS | st.none())
NAMES = st.sampled_from(["index", "message", "token_ids", "prompt_logprobs"])
CHOICES = st.builds(
    lambda fields, logprobs: {**fields, "logprobs": logprobs},
    st.dictionaries(NAMES, SCALARS | OBJECTS | LISTS),
    LOGPROBS,
)
DOCUMENTS = st.builds(
    lambda fields, choices: {**fields, "choices": choices},
    st.dictionaries(st.text(max_size=3), SCALARS | OBJECTS | LISTS, max_size=4),
    st.lists(CHOICES | st.just({}), max_size=3),
)


@given(DOCUMENTS | st.just({}))
def test_what_is_written_in_parts_is_the_same_as_at_once(document: dict[str, Any]) -> None:
    async def both() -> tuple[bytes, bytes]:
        return await written(document, Pace()), await written_event(document, Pace())

    assert asyncio.run(both()) == (to_json(document), event(document))


def test_the_loop_turns_while_a_large_answer_is_written_wherever_it_is_large() -> None:
    text = "x" * 100
    large = [{"a": text}] * 10_000
    for document in (
        {"tokens": large},
        {"choices": [{"index": 0, "logprobs": {"content": large}}]},
        {"choices": [{"index": index, "message": {"content": text}} for index in range(10_000)]},
    ):
        data, num_turns = asyncio.run(turns_of(written(document, Pace())))
        assert data == to_json(document)
        assert num_turns >= 5
    assert asyncio.run(turns_of(written({"choices": [{"index": 0}]}, Pace())))[1] == 0
