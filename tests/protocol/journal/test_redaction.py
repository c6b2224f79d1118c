# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a redacted journal keeps and leaves out: nothing that a client sent or got is in its bytes."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from metrale_ray.protocol.journal.record_codec import decode_record, encode_record
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
from metrale_ray.protocol.journal.redaction import LEFT_OUT, Redaction
from metrale_ray.protocol.journal.writer import JournalWriter
from tests.protocol.journal import strategies
from tests.protocol.journal.samples import ADMITTED, ANSWER, ANSWERED, COMMANDED, LIFE, SNAPSHOT, STARTED

TOKENS = (0x0A1B2C3D, 0x1B2C3D4E, 0x2C3D4E5F)
TEXT = "my secret plan"
DIGEST, WITNESS = b"DIGESTED", b"WITNESSD"
LOGIT = 1234.56789
ERROR = ErrorNote("command_failed", TEXT, (0,))
SECRET_ANSWER = RankAnswer(1, 1, DIGEST, {"tokens": WITNESS}, 1, 2, 3, ERROR)
ADMITTED_SECRET = Admitted(
    1, (1,), 1, 1, TOKENS, 3, {"grammar": TEXT, "bad_token_ids": struct.pack("<I", TOKENS[0])}, 5, 0, None
)
LIVE_SECRET = LiveNote(1, 0, 3, (4,), TOKENS, 3)
SECRETS: tuple[Record, ...] = (
    STARTED,
    ADMITTED_SECRET,
    Refused(2, 1, 2, "bad_prompt", TEXT),
    Commanded(3, 1, 1, 5, (RowNote(1, 0, 0, 3, True),), b"frame " + struct.pack("<3I", *TOKENS)),
    Answered(4, 1, "failed", 1, TEXT, (SECRET_ANSWER,)),
    Sampled(5, 1, (TokenNote(1, TOKENS[1], (LOGIT,)),)),
    Ended(6, 1, "error", "command_failed", TEXT),
    Snapshot(7, 1, True, STARTED, (ADMITTED_SECRET,), (LIVE_SECRET,)),
    Closed(8, "failed", TEXT),
)
TRACES = (
    *(struct.pack(order, token) for token in TOKENS for order in ("<I", ">I")),
    *(str(token).encode() for token in TOKENS),
    TEXT.encode(),
    DIGEST,
    WITNESS,
    *(struct.pack(kind, LOGIT) for kind in ("<d", ">d", "<f", ">f")),
    b"frame ",
)

# Every field that may hold what a client sent or got, or what is computed from it. All others are kept as they are.
LEFT_OUT_FIELDS = {
    Admitted: {"prompt_token_ids", "params"},
    Refused: {"message"},
    Commanded: {"data"},
    Answered: {"message", "answers"},
    RankAnswer: {"digest", "witness", "error"},
    Sampled: {"tokens"},
    Ended: {"message"},
    LiveNote: {"tokens"},
    Snapshot: {"started", "admitted", "live"},
    Started: {"redacted"},
    Closed: {"failure"},
    Gap: set(),
}
KEPT_FIELDS = {
    Admitted: {"at_us", "request_ids", "front", "number", "num_prompt_tokens", "seed", "priority", "deadline_s"},
    Refused: {"at_us", "front", "number", "code"},
    Commanded: {"at_us", "epoch", "seq", "cmd", "rows"},
    Answered: {"at_us", "seq", "kind", "rank"},
    RankAnswer: {"rank", "status", "computed_us", "waited_us", "lag_us"},
    Sampled: {"at_us", "seq"},
    Ended: {"at_us", "request_id", "reason", "code"},
    LiveNote: {"request_id", "slot", "length", "block_table", "num_prompt_tokens"},
    Snapshot: {"at_us", "seq", "settled_ok"},
    Started: {field.name for field in dataclasses.fields(Started)} - {"redacted"},
    Closed: {"at_us", "reason"},
    Gap: {"at_us", "num_records"},
}


def written(folder: Path, *, redact: bool) -> bytes:
    """All bytes of a journal of SECRETS."""
    journal = JournalWriter(folder, max_bytes=2**20, max_age_s=1e6, redact=redact)
    for record in SECRETS:
        journal.note(record)
    journal.close("end", TEXT)
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def test_nothing_of_tokens_texts_frames_logits_and_digests_is_in_the_bytes_of_a_redacted_journal(
    tmp_path: Path,
) -> None:
    data = written(tmp_path / "redacted", redact=True)
    assert [trace for trace in TRACES if trace in data] == []


def test_the_same_search_finds_them_in_a_journal_that_is_not_redacted(tmp_path: Path) -> None:
    data = written(tmp_path / "whole", redact=False)
    found = {trace for trace in TRACES if trace in data}
    assert {TEXT.encode(), DIGEST, WITNESS, b"frame ", struct.pack(">d", LOGIT), struct.pack("<I", TOKENS[0])} <= found


@pytest.mark.parametrize("kind", KEPT_FIELDS, ids=lambda kind: kind.__name__)
def test_of_every_field_it_is_decided_whether_it_is_kept(kind: Any) -> None:
    names = {field.name for field in dataclasses.fields(kind)}
    assert KEPT_FIELDS[kind] | LEFT_OUT_FIELDS[kind] == names
    assert not KEPT_FIELDS[kind] & LEFT_OUT_FIELDS[kind]


def test_every_record_has_its_fields_in_the_tables_above() -> None:
    assert set(Record.__args__) | {RankAnswer, LiveNote} == set(KEPT_FIELDS)
    assert RowNote._fields == ("request_id", "slot", "start", "num_tokens", "samples")
    assert TokenNote._fields == ("request_id", "token_id", "values")


@given(strategies.records)
def test_what_is_kept_is_as_it_was_and_can_be_written(record: Record) -> None:
    redacted = Redaction().redact(record)
    for name in KEPT_FIELDS[type(record)]:
        assert getattr(redacted, name) == getattr(record, name)
    assert decode_record(encode_record(redacted)) == redacted


def test_each_kind_leaves_out_what_it_should() -> None:
    redacted = [Redaction().redact(record) for record in SECRETS]
    started, admitted, refused, commanded, answered, sampled, ended, snapshot, closed = redacted
    assert started == dataclasses.replace(STARTED, redacted=True)
    assert admitted == dataclasses.replace(ADMITTED_SECRET, prompt_token_ids=None, params={})
    assert isinstance(refused, Refused)
    assert refused.message == LEFT_OUT
    assert isinstance(commanded, Commanded)
    assert commanded.data is None
    assert isinstance(answered, Answered)
    assert (answered.message, answered.answers[0].error) == (LEFT_OUT, ErrorNote("command_failed", LEFT_OUT, (0,)))
    assert isinstance(sampled, Sampled)
    assert sampled.tokens == (TokenNote(1, None, ()),)
    assert ended == Ended(6, 1, "error", "command_failed", LEFT_OUT)
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.started, snapshot.admitted) == (started, (admitted,))
    assert snapshot.live == (dataclasses.replace(LIVE_SECRET, tokens=()),)
    assert closed == Closed(8, "failed", LEFT_OUT)


def test_texts_that_are_not_there_stay_absent() -> None:
    redaction = Redaction()
    assert redaction.redact(Closed(1, "end", None)) == Closed(1, "end", None)
    assert redaction.redact(Ended(1, 1, "stop", "", "")) == Ended(1, 1, "stop", "", "")


def test_equal_digests_stay_equal_in_one_journal_and_different_ones_different() -> None:
    redaction = Redaction()
    same = dataclasses.replace(ANSWER, rank=1)
    other = dataclasses.replace(ANSWER, rank=2, digest=b"other..!", witness={"tokens": b"differs!"})
    redacted = redaction.redact(dataclasses.replace(ANSWERED, answers=(ANSWER, same, other)))
    assert isinstance(redacted, Answered)
    first, second, third = redacted.answers
    assert (first.digest, first.witness) == (second.digest, second.witness)
    assert first.digest != third.digest
    assert first.witness["tokens"] != third.witness["tokens"]
    assert set(first.witness) == set(ANSWER.witness)
    assert first.digest != ANSWER.digest


def test_two_journals_have_nothing_in_common_that_could_be_compared() -> None:
    one, two = (Redaction().redact(ANSWERED) for _ in range(2))
    assert isinstance(one, Answered)
    assert isinstance(two, Answered)
    assert one.answers[0].digest != two.answers[0].digest


def test_what_was_redacted_is_not_changed_in_place() -> None:
    before = [encode_record(record) for record in LIFE]
    redaction = Redaction()
    assert all(redaction.redact(record) is not record for record in (ADMITTED, COMMANDED, SNAPSHOT))
    assert [encode_record(record) for record in LIFE] == before
