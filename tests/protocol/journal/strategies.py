# SPDX-License-Identifier: MIT OR Apache-2.0
"""Strategies that draw any record."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Ended,
    ErrorNote,
    Gap,
    LiveNote,
    RankAnswer,
    Record,
    Refused,
    RowNote,
    Sampled,
    Snapshot,
    Started,
    TokenNote,
)
from metrale_ray.protocol.journal.step_records import OUTCOMES
from metrale_ray.protocol.limits import I32_MAX, I32_MIN, U32_MAX, U64_MAX

u32s = st.integers(0, U32_MAX)
u64s = st.integers(0, U64_MAX)
texts = st.text(max_size=30)
digests = st.binary(min_size=8, max_size=8)
floats = st.floats(allow_nan=False)
entries = st.dictionaries(texts, texts, max_size=3)


def tuples(each: st.SearchStrategy[Any], size: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    """Short tuples of `each`."""
    return st.lists(each, max_size=size).map(tuple)


values = (
    st.none()
    | st.booleans()
    | u64s
    | floats
    | texts
    | st.binary(max_size=20)
    | st.lists(st.lists(floats, max_size=2), max_size=2)
)
settings = st.none() | st.booleans() | st.integers(-(2**63), U64_MAX) | floats | texts
started = st.builds(
    Started, format=u32s, wall_time_s=floats, package=texts, epoch=u32s, version=u32s, redacted=st.booleans(),
    config=st.dictionaries(texts, settings, max_size=4),
    must_equal=entries, ranks=tuples(entries), num_blocks=u32s, seed=u64s, eos_token_ids=tuples(u32s),
)  # fmt: skip
admitted = st.builds(
    Admitted, at_us=u64s, request_ids=tuples(u64s), front=u64s, number=u64s, prompt_token_ids=st.none() | tuples(u32s),
    num_prompt_tokens=u32s, params=st.dictionaries(texts, values, max_size=4), seed=u64s,
    priority=st.integers(I32_MIN, I32_MAX), deadline_s=st.none() | floats,
)  # fmt: skip
rows = st.builds(RowNote, u64s, u32s, u32s, u32s, st.booleans())
errors = st.builds(ErrorNote, texts, texts, st.none() | tuples(u32s))
answers = st.builds(
    RankAnswer, u32s, u32s, digests, st.dictionaries(texts, digests, max_size=3), u64s, u64s, u64s, st.none() | errors
)
lives = st.builds(LiveNote, u64s, st.none() | u32s, u32s, tuples(u32s), tuples(u32s), u32s)
tokens = st.builds(TokenNote, u64s, st.none() | u32s, tuples(floats))
records: st.SearchStrategy[Record] = st.one_of(
    started,
    st.builds(Snapshot, u64s, u64s, st.booleans(), started, tuples(admitted, 2), tuples(lives, 2)),
    admitted,
    st.builds(Refused, u64s, u64s, u64s, texts, texts),
    st.builds(Commanded, u64s, u32s, u64s, u32s, tuples(rows), st.none() | st.binary(max_size=50)),
    st.builds(Answered, u64s, u64s, st.sampled_from(OUTCOMES), st.none() | u32s, texts, tuples(answers)),
    st.builds(Sampled, u64s, u64s, tuples(tokens)),
    st.builds(Ended, u64s, u64s, st.sampled_from(["stop", "length", "abort", "error"]), texts, texts),
    st.builds(Gap, u64s, u64s),
    st.builds(Closed, u64s, texts, st.none() | texts),
)
