# SPDX-License-Identifier: MIT OR Apache-2.0
"""Records as bytes: the round trip, other builds, and bytes that are no record."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrale_ray.errors import FrameError
from metrale_ray.protocol.journal.record_codec import (
    MAX_RECORD_BYTES,
    MAX_RECORD_ELEMENTS,
    decode_record,
    encode_record,
)
from metrale_ray.protocol.journal.records import (
    Answered,
    Closed,
    Commanded,
    Ended,
    Record,
    Refused,
    Sampled,
    Started,
    TokenNote,
    Unknown,
)
from metrale_ray.protocol.limits import MAX_CODE_CHARS, MAX_FRAME_BYTES, MAX_REFUSAL_CHARS
from tests.protocol.journal import samples, strategies
from tests.protocol.journal.samples import ANSWERED, COMMANDED, LIFE, SAMPLED, SNAPSHOT, STARTED


def changed(record: Record, **values: Any) -> bytes:
    """The bytes of `record` with other values in its map."""
    return cast(bytes, msgpack.packb({**msgpack.unpackb(encode_record(record)), **values}))


@given(strategies.records)
def test_every_record_comes_back_as_it_was(record: Record) -> None:
    assert decode_record(encode_record(record)) == record


def test_every_kind_of_record_is_in_the_sample_life() -> None:
    kinds = {type(record) for record in LIFE}
    assert kinds == set(Record.__args__)
    assert tuple(decode_record(encode_record(record)) for record in LIFE) == LIFE


def test_a_record_begins_with_its_kind() -> None:
    for record in LIFE:
        assert next(iter(msgpack.unpackb(encode_record(record)))) == "kind"


def test_logits_that_are_no_numbers_are_kept_since_they_are_what_one_looks_for() -> None:
    record = Sampled(1, 1, (TokenNote(1, 5, (math.inf, -math.inf, math.nan)),))
    found = decode_record(encode_record(record))
    assert isinstance(found, Sampled)
    assert found.tokens[0].values[:2] == (math.inf, -math.inf)
    assert math.isnan(found.tokens[0].values[2])


def test_a_record_of_a_kind_that_this_build_does_not_know_is_unknown() -> None:
    assert decode_record(msgpack.packb({"kind": "migrated", "slots": [1, 2]})) == Unknown("migrated")


@pytest.mark.parametrize("record", LIFE, ids=lambda record: type(record).__name__)
def test_a_field_that_this_build_does_not_know_is_passed_over(record: Record) -> None:
    assert decode_record(changed(record, later={"a": [1, 2, b"3"]})) == record


def test_rows_tokens_and_answers_may_have_more_fields_in_a_later_build() -> None:
    rows = [[*row, "later"] for row in COMMANDED.rows]
    tokens = [[*token, 5] for token in SAMPLED.tokens]
    answers = [[*answer, None] for answer in msgpack.unpackb(encode_record(ANSWERED))["answers"]]
    assert decode_record(changed(COMMANDED, rows=rows)) == COMMANDED
    assert decode_record(changed(SAMPLED, tokens=tokens)) == SAMPLED
    assert decode_record(changed(ANSWERED, answers=answers)) == ANSWERED


@pytest.mark.parametrize(
    ("record", "values"),
    [
        (COMMANDED, {"seq": -1}),
        (COMMANDED, {"seq": True}),
        (COMMANDED, {"cmd": 2**32}),
        (COMMANDED, {"rows": [[1, 0, 0, 3]]}),
        (COMMANDED, {"rows": [[1, 0, 0, 3, 1]]}),
        (COMMANDED, {"rows": [[1, 0, -1, 3, True]]}),
        (COMMANDED, {"rows": [7]}),
        (COMMANDED, {"data": "text"}),
        (ANSWERED, {"outcome": "fine"}),
        (ANSWERED, {"answers": [[0, 0, b"short", {}, 1, 2, 3, None]]}),
        (ANSWERED, {"answers": [[0, 0, b"12345678", {"tokens": b"1"}, 1, 2, 3, None]]}),
        (ANSWERED, {"answers": [[0, 0, b"12345678", {}, 1, 2, 3, ["code"]]]}),
        (ANSWERED, {"answers": [[0, 0, b"12345678", {}, 1, 2, 3, ["code", "text", [-1]]]]}),
        (SAMPLED, {"tokens": [[1, 5, [1]]]}),
        (SAMPLED, {"tokens": [[1, -5, []]]}),
        (SNAPSHOT, {"live": [7]}),
        (SNAPSHOT, {"started": None}),
        (STARTED, {"config": {"a": [1]}}),
        (STARTED, {"ranks": [{"host": 7}]}),
        (STARTED, {"eos_token_ids": [1.0]}),
        (STARTED, {"wall_time_s": math.nan}),
        (samples.ADMITTED, {"prompt_token_ids": b"123"}),
        (samples.ADMITTED, {"deadline_s": "soon"}),
        (samples.ADMITTED, {"params": {"a": msgpack.ExtType(1, b"")}}),
        (samples.ENDED, {"reason": "bored"}),
        (samples.GAP, {"num_records": None}),
        (samples.CLOSED, {"failure": 7}),
        (samples.CLOSED, {"kind": None}),
    ],
)
def test_a_field_of_another_kind_or_out_of_range_is_refused(record: Record, values: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        decode_record(changed(record, **values))


@pytest.mark.parametrize("record", LIFE, ids=lambda record: type(record).__name__)
def test_a_record_that_is_cut_anywhere_is_refused(record: Record) -> None:
    data = encode_record(record)
    for length in range(len(data)):
        with pytest.raises(FrameError):
            decode_record(data[:length])


@pytest.mark.parametrize("record", LIFE, ids=lambda record: type(record).__name__)
def test_any_changed_byte_gives_a_record_or_a_frame_error(record: Record) -> None:
    data = encode_record(record)
    num_refused = 0
    for index in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            try:
                decode_record(data[:index] + bytes([data[index] ^ mask]) + data[index + 1 :])
            except FrameError:
                num_refused += 1
    assert num_refused > len(data) / 2


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_give_a_record_or_a_frame_error(data: bytes) -> None:
    try:
        decode_record(data)
    except FrameError:
        return
    assert msgpack.unpackb(data)["kind"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xdf\xff\xff\xff\xff",  # a map of 2**32 - 1 entries
        b"\x81\xa4kind\xdd\xff\xff\xff\xff",  # an array of as many
        b"\x81\xa4kind\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x81" * 100_000,  # deep
        b"\x91" * 100_000,
        b"\x82\xa4kind\xa1x\xa1a" + b"\x91" * 20 + b"\x90",
        b"\xc0",
        b"\x90",
        b"",
        b"\x80\x80",
    ],
)
def test_hostile_bytes_are_refused_at_once(data: bytes) -> None:
    started_s = time.thread_time()
    with pytest.raises(FrameError):
        decode_record(data)
    assert time.thread_time() - started_s < 1


def test_a_small_record_cannot_become_very_many_objects() -> None:
    full = b"\xdc\xff\xff" + b"\x90" * 65_535
    data = b"\x82\xa4kind\xa1x\xa1a\xdc\x00\x20" + full * 32
    assert MAX_RECORD_ELEMENTS < 32 * 65_535
    with pytest.raises(FrameError, match="elements"):
        decode_record(data)


def test_the_largest_frame_fits_into_a_record_and_what_is_larger_than_a_record_is_refused() -> None:
    record = Commanded(1, 1, 1, 3, (), bytes(MAX_FRAME_BYTES))
    assert decode_record(encode_record(record)) == record
    with pytest.raises(FrameError, match="at most"):
        encode_record(dataclasses.replace(record, data=bytes(MAX_RECORD_BYTES)))


def test_a_long_or_odd_text_is_cut_so_that_it_can_be_read() -> None:
    long = "x" * (MAX_REFUSAL_CHARS + 1)
    refused = decode_record(encode_record(Refused(1, 0, 0, "c" * 100, long)))
    closed = decode_record(encode_record(Closed(1, "\ud800", long)))
    assert isinstance(refused, Refused)
    assert (len(refused.code), len(refused.message)) == (MAX_CODE_CHARS, MAX_REFUSAL_CHARS)
    assert isinstance(closed, Closed)
    assert (closed.reason, len(closed.failure or "")) == ("\\ud800", MAX_REFUSAL_CHARS)


@pytest.mark.parametrize(
    "record",
    [
        object(),
        Unknown("x"),
        Commanded(2**64, 1, 1, 3, (), None),
        Ended(1, 1, object(), "", ""),  # type: ignore[arg-type]
        dataclasses.replace(STARTED, config={"a": {1, 2}}),  # type: ignore[dict-item]
        dataclasses.replace(samples.ADMITTED, prompt_token_ids=(-1,)),
    ],
    ids=["object", "unknown", "large", "reason", "config", "token"],
)
def test_what_no_record_may_hold_is_refused_when_it_is_written(record: Any) -> None:
    with pytest.raises(FrameError):
        encode_record(record)


def test_a_snapshot_of_ten_thousand_requests_that_wait_can_be_written_and_read() -> None:
    admitted = tuple(dataclasses.replace(samples.ADMITTED, number=number) for number in range(10_000))
    live = tuple(dataclasses.replace(SNAPSHOT.live[0], request_id=number) for number in range(10_000))
    snapshot = dataclasses.replace(SNAPSHOT, admitted=admitted, live=live)
    assert decode_record(encode_record(snapshot)) == snapshot


def test_answers_keep_their_order_and_started_its_ranks() -> None:
    found = decode_record(encode_record(Answered(1, 1, "desync", 1, "", (samples.FAILED, samples.ANSWER))))
    assert isinstance(found, Answered)
    assert [answer.rank for answer in found.answers] == [1, 0]
    again = decode_record(encode_record(STARTED))
    assert isinstance(again, Started)
    assert again.ranks == STARTED.ranks
