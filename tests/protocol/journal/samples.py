# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records of every kind: one whole small life."""

from __future__ import annotations

from typing import Any

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
