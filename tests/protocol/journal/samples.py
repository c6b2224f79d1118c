# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records of every kind: one whole small life, and strategies that draw any record."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from metrale_ray.protocol.journal.records import (
    JOURNAL_FORMAT,
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

STARTED = Started(
    format=JOURNAL_FORMAT,
    wall_time_s=1_785_000_000.5,
    package="0.5.0",
    epoch=1,
    version=2,
    redacted=False,
    config={"model": "/models/tiny", "ep_size": 2, "watermark": 0.01, "scrub": False, "revision": None},
    must_equal={"dtype": "bfloat16", "kernels": "x86 avx512"},
    ranks=({"host": "a"}, {"host": "b"}),
    num_blocks=64,
    seed=7,
    eos_token_ids=(2, 3),
)
PARAMS: dict[str, Any] = {
    "n": 1,
    "temperature": 0.5,
    "grammar": "start: 'x'",
    "bad_token_ids": b"\x05\0\0\0",
    "biases": [[1, 0.5]],
}
ADMITTED = Admitted(10, (1, 2), 3, 4, (101, 102, 103), 3, PARAMS, 99, -5, 2.5)
REFUSED = Refused(11, 3, 5, "too_long", "the prompt has 999 tokens")
COMMANDED = Commanded(12, 1, 1, 5, (RowNote(1, 0, 0, 3, True), RowNote(2, 1, 0, 3, False)), b"\x81\xa1v\x02")
ANSWER = RankAnswer(0, 0, b"12345678", {"tokens": b"abcdefgh", "blocks": b"ijklmnop"}, 100, 20, 3, None)
FAILED = RankAnswer(1, 1, b"12345678", {}, 100, 20, 3, ErrorNote("command_failed", "token 101 is bad", (0,)))
ANSWERED = Answered(13, 1, "ok", None, "", (ANSWER, ANSWER))
SAMPLED = Sampled(14, 1, (TokenNote(1, 104, (1.5, -0.25, 0.0, 3.0, 2.0)),))
ENDED = Ended(15, 1, "stop", "", "")
SNAPSHOT = Snapshot(
    16,
    1,
    True,
    STARTED,
    (ADMITTED,),
    (LiveNote(2, None, 0, (), (101, 102, 103), 3), LiveNote(1, 0, 3, (7,), (101, 102, 103, 104), 3)),
)
GAP = Gap(17, 12)
CLOSED = Closed(18, "failed", "rank 1: token 101 is bad")
LIFE: tuple[Record, ...] = (
    STARTED, ADMITTED, REFUSED, COMMANDED, ANSWERED, SAMPLED, ENDED,
    Commanded(20, 1, 2, 5, (RowNote(2, 1, 0, 3, True),), b"\x81\xa1v\x03"),
    Answered(21, 2, "failed", 1, "rank 1: token 101 is bad", (ANSWER, FAILED)),
    SNAPSHOT, GAP, CLOSED,
)  # fmt: skip


def commanded(seq: int, num_bytes: int = 100) -> Commanded:
    """A command number `seq` of so many bytes."""
    return Commanded(seq * 1000, 1, seq, 3, (RowNote(1, 0, seq, 1, True),), bytes(num_bytes))


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
