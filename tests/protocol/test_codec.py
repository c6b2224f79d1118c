# SPDX-License-Identifier: MIT OR Apache-2.0
"""Messages come back as they were, and what does not fit is refused before it is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import fallback

from metrale_ray.errors import CommandRefused, FrameError
from metrale_ray.protocol.codec import (
    decode_command,
    decode_hello,
    decode_reply,
    decode_welcome,
    encode_command,
    encode_hello,
    encode_reply,
    encode_welcome,
)
from metrale_ray.protocol.commands import (
    Cmd,
    Command,
    Decode,
    DecodeBatch,
    Envelope,
    FreeSlot,
    Hello,
    Load,
    MixedStep,
    Ping,
    PrefillChunk,
    Progress,
    Rank,
    Reply,
    ReplyError,
    Scrub,
    Settled,
    Slot,
    Status,
    Timing,
    Welcome,
)
from metrale_ray.protocol.limits import MAX_ERROR_CHARS, MAX_FRAME_BYTES, MAX_REFUSAL_CHARS, MAX_ROWS, MAX_TOKENS
from tests.protocol.samples import (
    DIGEST,
    EDGES,
    NO_INTEGERS,
    U32_MAX,
    any_reply,
    commands,
    envelope,
    envelopes,
    hello,
    hellos,
    reply,
    row,
    welcomes,
)


@given(st.sampled_from((1, 2)).flatmap(lambda v: st.tuples(envelopes(v), commands(v))))
def test_every_command_comes_back_as_it_was(pair: tuple[Envelope, Command]) -> None:
    data = encode_command(*pair)
    frame = decode_command(data)
    assert (frame.envelope, frame.command, frame.data) == (*pair, data)


@given(any_reply())
def test_every_reply_comes_back_as_it_was(sent: Reply) -> None:
    assert decode_reply(encode_reply(sent)) == sent


@given(hellos)
def test_every_hello_comes_back_as_it_was(sent: Hello) -> None:
    assert decode_hello(encode_hello(sent)) == sent


@given(welcomes)
def test_every_welcome_comes_back_as_it_was(sent: Welcome) -> None:
    assert decode_welcome(encode_welcome(sent)) == sent


@given(st.sampled_from((1, 2)).flatmap(lambda v: st.tuples(envelopes(v), commands(v))))
def test_the_plain_python_codec_packs_and_reads_the_same(pair: tuple[Envelope, Command]) -> None:
    data = encode_command(*pair)
    unpacker = fallback.Unpacker(None, raw=False, strict_map_key=True)
    unpacker.feed(data)
    values = unpacker.unpack()
    assert fallback.Packer(use_bin_type=True).pack(values) == data
    assert values == msgpack.unpackb(data)


def test_a_frame_is_one_map_with_the_keys_of_its_command() -> None:
    values = msgpack.unpackb(encode_command(envelope(2), Decode(row(7, 9, (4,), (1, 2)))))
    assert values == {
        "kind": "command",
        "v": 2,
        "epoch": 1,
        "seq": 2,
        "cmd": 2,
        "settled": [1, True],
        "seq_id": 7,
        "start": 9,
        "token": 4,
        "blocks": bytes.fromhex("0100000002000000"),
        "logits": 1,
    }


# Every integer field of a command: how to make one with the value, and how to read the value back.
Build = Callable[[Any], tuple[Envelope, Command]]
Read = Callable[[Envelope, Any], int]
U32_FIELDS: dict[str, tuple[Build, Read]] = {
    "epoch": (lambda n: (dataclasses.replace(envelope(2), epoch=n), Ping()), lambda e, c: e.epoch),
    "num_blocks": (lambda n: (envelope(2), Load(n)), lambda e, c: c.num_blocks),
    "seq_id": (lambda n: (envelope(2), FreeSlot(n)), lambda e, c: c.slot),
    "decode slot": (lambda n: (envelope(2), Decode(row(n))), lambda e, c: c.row.slot),
    "decode start": (lambda n: (envelope(2), Decode(row(start=n))), lambda e, c: c.row.start),
    "decode token": (lambda n: (envelope(2), Decode(row(tokens=(n,)))), lambda e, c: c.row.token_ids[0]),
    "v1 token": (lambda n: (envelope(1), Decode(row(tokens=(n,)))), lambda e, c: c.row.token_ids[0]),
    "prefill token": (lambda n: (envelope(2), PrefillChunk(row(tokens=(1, n)))), lambda e, c: c.row.token_ids[1]),
    "prefill block": (lambda n: (envelope(2), PrefillChunk(row(blocks=(n,)))), lambda e, c: c.row.new_blocks[0]),
    "batch slot": (lambda n: (envelope(2), DecodeBatch((row(1), row(n)))), lambda e, c: c.rows[1].slot),
    "batch start": (lambda n: (envelope(2), DecodeBatch((row(1), row(start=n)))), lambda e, c: c.rows[1].start),
    "batch token": (lambda n: (envelope(2), DecodeBatch((row(tokens=(n,)),))), lambda e, c: c.rows[0].token_ids[0]),
    "batch block": (lambda n: (envelope(2), DecodeBatch((row(blocks=(n,)),))), lambda e, c: c.rows[0].new_blocks[0]),
    "scrub slot": (lambda n: (envelope(2), Scrub(0, 1, n)), lambda e, c: c.slot),
    "mixed token": (lambda n: (envelope(2), MixedStep((row(tokens=(1, n)),))), lambda e, c: c.rows[0].token_ids[1]),
}
U64_FIELDS: dict[str, tuple[Build, Read]] = {
    "seq": (lambda n: (Envelope(2, 1, n, None), Ping()), lambda e, c: e.seq),
    "settled": (lambda n: (Envelope(2, 1, 1, Settled(n, True)), Ping()), lambda e, c: e.settled.seq),  # type: ignore[union-attr]
}
REPLY_U64_FIELDS: dict[str, tuple[Callable[[Any], Reply], Callable[[Any], int]]] = {
    "seq": (lambda n: reply(seq=n), lambda r: r.seq),
    "timing": (lambda n: reply(timing=Timing(1, n, 2)), lambda r: r.timing.computed_us),
    "progress": (
        lambda n: reply(cmd=Cmd.LOAD, status=Status.PROGRESS, progress=Progress(n, 2)),
        lambda r: r.progress.done_bytes,
    ),
}
REPLY_U32_FIELDS: dict[str, tuple[Callable[[Any], Reply], Callable[[Any], int]]] = {
    "rank": (lambda n: reply(rank=n), lambda r: r.rank),
    "blamed slot": (
        lambda n: reply(status=Status.FAILED, error=ReplyError("x", "y", (n,))),
        lambda r: r.error.slots[0],
    ),
}


@pytest.mark.parametrize("number", EDGES)
@pytest.mark.parametrize("field", [*U32_FIELDS, *U64_FIELDS])
def test_an_integer_of_a_command_arrives_exactly_or_is_refused_by_the_sender(field: str, number: int) -> None:
    build, read = (U32_FIELDS | U64_FIELDS)[field]
    if field in U32_FIELDS and number > U32_MAX:
        with pytest.raises(CommandRefused, match="integer from 0 to 4294967295"):
            encode_command(*build(number))
        return
    frame = decode_command(encode_command(*build(number)))
    assert read(frame.envelope, frame.command) == number


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize("field", [*U32_FIELDS, *U64_FIELDS])
def test_what_is_no_integer_in_range_is_refused_by_the_sender(field: str, value: object) -> None:
    build, _ = (U32_FIELDS | U64_FIELDS)[field]
    with pytest.raises(CommandRefused, match="must be an integer"):
        encode_command(*build(value))


@pytest.mark.parametrize("number", EDGES)
@pytest.mark.parametrize("field", [*REPLY_U64_FIELDS, *(f"u32 {name}" for name in REPLY_U32_FIELDS)])
def test_an_integer_of_a_reply_arrives_exactly_or_is_refused_by_the_sender(field: str, number: int) -> None:
    is_u32 = field.startswith("u32 ")
    build, read = (REPLY_U32_FIELDS if is_u32 else REPLY_U64_FIELDS)[field.removeprefix("u32 ")]
    if is_u32 and number > U32_MAX:
        with pytest.raises(FrameError, match="integer from 0 to 4294967295"):
            encode_reply(build(number))
        return
    assert read(decode_reply(encode_reply(build(number)))) == number


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize("build", [b for b, _ in [*REPLY_U32_FIELDS.values(), *REPLY_U64_FIELDS.values()]])
def test_a_reply_with_no_integer_in_range_is_refused(build: Callable[[Any], Reply], value: object) -> None:
    with pytest.raises(FrameError, match="must be an integer"):
        encode_reply(build(value))


COMMAND_INTEGER_KEYS = ("v", "epoch", "seq", "cmd", "seq_id", "start", "token", "logits")


@pytest.mark.parametrize("value", [-1, -(2**63), True, False, 1.0, None, "1", [1], {}, b"\x01\0\0\0"], ids=repr)
@pytest.mark.parametrize("key", COMMAND_INTEGER_KEYS)
def test_a_frame_with_no_integer_where_one_belongs_is_refused_by_the_reader(key: str, value: object) -> None:
    values = msgpack.unpackb(encode_command(envelope(2), Decode(row(7))))
    with pytest.raises(FrameError, match=f"{key} must be an integer") as caught:
        decode_command(msgpack.packb(values | {key: value}), rank=0)
    assert caught.value.rank == 0
    assert caught.value.num_bytes == len(msgpack.packb(values | {key: value}))


@pytest.mark.parametrize("number", [n for n in EDGES if n > U32_MAX])
@pytest.mark.parametrize("key", [k for k in COMMAND_INTEGER_KEYS if k != "seq"])
def test_a_frame_whose_u32_is_too_large_is_refused_by_the_reader(key: str, number: int) -> None:
    values = msgpack.unpackb(encode_command(envelope(2), Decode(row(7))))
    with pytest.raises(FrameError, match=f"{key} must be an integer from 0 to 4294967295"):
        decode_command(msgpack.packb(values | {key: number}))


def test_a_refusal_names_the_command_and_the_slot_of_the_row_at_fault() -> None:
    with pytest.raises(CommandRefused, match=r"DECODE_BATCH: tokens\[1\]") as caught:
        encode_command(envelope(2), DecodeBatch((row(4), row(6, tokens=(2**32,)), row(8))))
    assert caught.value.slots == [6]


def test_a_decode_row_has_exactly_one_token_and_a_span_at_least_one() -> None:
    for command in (Decode(row(3, tokens=(1, 2))), DecodeBatch((row(1), row(3, tokens=(1, 2))))):
        with pytest.raises(CommandRefused, match="exactly one token") as caught:
            encode_command(envelope(2), command)
        assert caught.value.slots == (3,)
    for command in (PrefillChunk(row(3, tokens=())), MixedStep((row(1), row(3, tokens=())))):
        with pytest.raises(CommandRefused, match="at least one token") as caught:
            encode_command(envelope(2), command)
        assert caught.value.slots == (3,)


def test_a_batch_of_no_rows_is_refused() -> None:
    for command in (DecodeBatch(()), MixedStep(())):
        with pytest.raises(CommandRefused, match="at least one"):
            encode_command(envelope(2), command)


def test_more_rows_or_tokens_than_the_limits_are_refused() -> None:
    with pytest.raises(CommandRefused, match=f"allowed are {MAX_ROWS}"):
        encode_command(envelope(2), DecodeBatch(tuple(row(slot) for slot in range(MAX_ROWS + 1))))
    with pytest.raises(CommandRefused, match=f"allowed are {MAX_TOKENS}"):
        encode_command(envelope(2), PrefillChunk(row(tokens=(1,) * (MAX_TOKENS + 1))))


def test_the_largest_command_that_the_limits_allow_fits_one_frame() -> None:
    command = PrefillChunk(row(tokens=(U32_MAX,) * MAX_TOKENS, blocks=(U32_MAX,) * MAX_TOKENS))
    data = encode_command(envelope(2), command)
    assert len(data) < MAX_FRAME_BYTES
    assert decode_command(data).command == command


@pytest.mark.parametrize("command", [DecodeBatch((row(),)), MixedStep((row(),)), Scrub(0, 1)])
def test_v1_refuses_the_commands_it_does_not_have_by_name(command: Command) -> None:
    with pytest.raises(CommandRefused, match=f"v1 has no command {command.code.name}"):
        encode_command(envelope(1), command)


@pytest.mark.parametrize("command", [Decode(row(1)), PrefillChunk(row(1)), FreeSlot(Slot(1))])
def test_v1_refuses_every_slot_but_0(command: Command) -> None:
    with pytest.raises(CommandRefused, match="only slot 0, not slot 1") as caught:
        encode_command(envelope(1), command)
    assert caught.value.slots == (1,)


def test_a_v1_frame_carries_no_slot_and_one_that_does_is_refused() -> None:
    values = msgpack.unpackb(encode_command(envelope(1), FreeSlot(Slot(0))))
    assert "seq_id" not in values
    with pytest.raises(FrameError, match="no seq_id"):
        decode_command(msgpack.packb(values | {"seq_id": 3}))


def test_a_v1_frame_with_a_command_of_v2_is_refused() -> None:
    values = msgpack.unpackb(encode_command(envelope(2), DecodeBatch((row(),))))
    with pytest.raises(FrameError, match="v1 has no command DECODE_BATCH"):
        decode_command(msgpack.packb(values | {"v": 1}))


def test_an_unknown_command_or_version_is_refused_by_number() -> None:
    values = msgpack.unpackb(encode_command(envelope(2), Ping()))
    with pytest.raises(FrameError, match="unknown command 99"):
        decode_command(msgpack.packb(values | {"cmd": 99}))
    with pytest.raises(FrameError, match="unknown protocol version 3"):
        decode_command(msgpack.packb(values | {"v": 3}))
    with pytest.raises(CommandRefused, match="version 3 is unknown"):
        encode_command(Envelope(3, 1, 1, None), Ping())
    with pytest.raises(FrameError, match="version 3 is unknown"):
        encode_reply(dataclasses.replace(reply(), version=3))


def test_keys_of_later_builds_are_tolerated() -> None:
    values = msgpack.unpackb(encode_command(envelope(2), Ping()))
    frame = decode_command(msgpack.packb(values | {"later": {"a": [1.5, None]}}))
    assert frame.command == Ping()


def test_a_witness_of_a_later_build_is_left_out() -> None:
    values = msgpack.unpackb(encode_reply(reply(witness={"tokens": DIGEST})))
    values["witness"] |= {"experts of 2031": [1, 2], "blocks": DIGEST}
    assert decode_reply(msgpack.packb(values)).witness == {"tokens": DIGEST, "blocks": DIGEST}


def test_a_reply_without_a_witness_has_no_such_key() -> None:
    values = msgpack.unpackb(encode_reply(reply()))
    assert "witness" not in values
    assert decode_reply(msgpack.packb(values | {"witness": None})).witness == {}


@pytest.mark.parametrize("value", [b"1234567", bytes(9), None, "12345678", 5])
def test_a_known_witness_has_8_bytes(value: Any) -> None:
    with pytest.raises(FrameError, match=r"witness\.kv must be 8 bytes"):
        encode_reply(reply(witness={"kv": value}))
    values = msgpack.unpackb(encode_reply(reply(witness={"kv": DIGEST})))
    with pytest.raises(FrameError, match="kv"):
        decode_reply(msgpack.packb(values | {"witness": {"kv": value}}))


def test_a_witness_that_is_not_in_the_table_is_not_sent() -> None:
    with pytest.raises(FrameError, match="a witness of 'moon' is unknown; known are command, tokens"):
        encode_reply(reply(witness={"kv": DIGEST, "moon": DIGEST}))


def test_a_scrub_reads_one_of_its_parts() -> None:
    with pytest.raises(CommandRefused, match="part 3 is not below num_parts 3"):
        encode_command(envelope(2), Scrub(3, 3))
    values = msgpack.unpackb(encode_command(envelope(2), Scrub(2, 3)))
    assert "seq_id" not in values
    with pytest.raises(FrameError, match="part 0 is not below num_parts 0"):
        decode_command(msgpack.packb(values | {"part": 0, "num_parts": 0}))
    no_u32: tuple[Any, ...] = (True, 1.0, -1, U32_MAX + 1)
    for value in no_u32:
        with pytest.raises(CommandRefused):
            encode_command(envelope(2), Scrub(0, value))
        with pytest.raises(CommandRefused):
            encode_command(envelope(2), Scrub(value, 9))
        with pytest.raises(FrameError):
            decode_command(msgpack.packb(values | {"num_parts": value}))


def test_a_missing_key_is_named() -> None:
    values = msgpack.unpackb(encode_command(envelope(2), Decode(row(7))))
    for key in values:
        rest = {name: value for name, value in values.items() if name != key}
        if key == "settled":
            assert decode_command(msgpack.packb(rest)).envelope.settled is None
            continue
        with pytest.raises(FrameError, match=f"{key} must be .*missing"):
            decode_command(msgpack.packb(rest))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("slots", b"", "at least one"),
        ("slots", b"\0\0\0", "whole number of u32"),
        ("starts", b"\0\0\0\0", "must have 2"),
        ("tokens", bytes(12), "must have 2"),
        ("block_counts", bytes(12), "must have 2"),
        ("blocks", b"", "must have 1"),
        ("blocks", bytes(8), "must have 1"),
        ("logits", b"\x03\0\0\0\0\0\0\0", "logits must be 0 to 2"),
        ("tokens", [1, 2], "must be bytes"),
        ("settled", [1], "exactly 2"),
        ("settled", [1, 1], "true or false"),
        ("settled", {"seq": 1}, "must be an array"),
        ("kind", "reply", "expected 'command'"),
    ],
)
def test_arrays_of_a_batch_that_do_not_match_are_refused(key: str, value: object, message: str) -> None:
    values = msgpack.unpackb(encode_command(envelope(2), DecodeBatch((row(1, blocks=(9,)), row(2)))))
    with pytest.raises(FrameError, match=message):
        decode_command(msgpack.packb(values | {key: value}))


def test_a_mixed_step_whose_counts_do_not_match_its_tokens_is_refused() -> None:
    values = msgpack.unpackb(encode_command(envelope(2), MixedStep((row(1, tokens=(1, 2)), row(2)))))
    for counts, message in ((b"\2\0\0\0\2\0\0\0", "must have 4"), (b"\3\0\0\0\0\0\0\0", "at least one token")):
        with pytest.raises(FrameError, match=message):
            decode_command(msgpack.packb(values | {"counts": counts}))
    huge = U32_MAX.to_bytes(4, "little") * 2
    with pytest.raises(FrameError, match="must have 8589934590"):
        decode_command(msgpack.packb(values | {"counts": huge}))


def test_an_errors_text_of_any_length_and_kind_can_be_sent() -> None:
    for text in ("x" * 10_000, "é" * 10_000, "a file named \udce9", ""):
        sent = reply(status=Status.FAILED, error=ReplyError("command_failed", text))
        error = decode_reply(encode_reply(sent)).error
        assert error is not None
        assert len(error.message) <= MAX_ERROR_CHARS
        assert error.message[:15] == text.encode("utf-8", "backslashreplace").decode()[:15]
    long = encode_welcome(Welcome(2, 1, "y" * (MAX_REFUSAL_CHARS + 1)))
    assert len(decode_welcome(long).refusal) == MAX_REFUSAL_CHARS


def test_error_and_progress_must_go_with_the_status() -> None:
    error, progress = ReplyError("x", "y"), Progress(1, 2)
    for status in Status:
        failed, partial = status in (Status.FAILED, Status.REFUSED, Status.POISONED), status is Status.PROGRESS
        right = Reply(
            2,
            1,
            1,
            Cmd.LOAD,
            Rank(1),
            status,
            DIGEST,
            error if failed else None,
            Timing(),
            progress if partial else None,
        )
        values = msgpack.unpackb(encode_reply(right))
        wrong = [
            dataclasses.replace(right, error=None if failed else error),
            dataclasses.replace(right, progress=None if partial else progress),
        ]
        for bad in wrong:
            with pytest.raises(FrameError, match=f"status {status.name} must come"):
                encode_reply(bad)
        swapped = {"error": None if failed else {"code": "x", "message": "y", "slots": None}}
        with pytest.raises(FrameError, match=f"status {status.name} must come"):
            decode_reply(msgpack.packb(values | swapped))


def test_a_digest_has_8_bytes() -> None:
    with pytest.raises(FrameError, match="8 bytes"):
        encode_reply(reply(digest=b"1234567"))
    values = msgpack.unpackb(encode_reply(reply()))
    with pytest.raises(FrameError, match="it must have 8"):
        decode_reply(msgpack.packb(values | {"digest": bytes(9)}))


def test_a_hello_carries_texts_only() -> None:
    with pytest.raises(FrameError, match="must be a text, not int"):
        encode_hello(dataclasses.replace(hello(2), told={"memory": 5}))  # type: ignore[dict-item]
    values = msgpack.unpackb(encode_hello(hello(2)))
    with pytest.raises(FrameError, match="must be a text"):
        decode_hello(msgpack.packb(values | {"told": {"memory": 5}}))
    with pytest.raises(FrameError, match="whose name is not a text"):
        decode_hello(msgpack.packb(values | {"told": {b"memory": "5"}}))
    with pytest.raises(FrameError, match="UTF-8"):
        encode_hello(dataclasses.replace(hello(2), told={"host": "\ud800"}))
