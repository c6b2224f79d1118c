# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every bound of the wire, from both sides: what is exactly at it passes, one more is refused by sender and reader.

A row of CASES for each name in `limits`; a bound without one fails a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

from metrale_ray.errors import CommandRefused, FrameError
from metrale_ray.protocol import limits
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
    Command,
    DecodeBatch,
    Envelope,
    Load,
    MixedStep,
    Ping,
    PrefillChunk,
    Rank,
    Reply,
    ReplyError,
    Slot,
    Span,
    Status,
    Welcome,
)
from metrale_ray.protocol.fields import check_i32, pack_frame, unpack_frame
from metrale_ray.protocol.front.frames import decode_from_front, encode
from metrale_ray.protocol.front.messages import Submit
from metrale_ray.sampling.token_params import TokenParams
from tests.protocol.samples import envelope, hello, reply, row

Packer = Callable[[int], bytes]


@dataclass(frozen=True)
class Case:
    """One bound: `sent` packs a message of that size with our own encoder, `foreign` without any check of ours.

    `read` is the reader. `sent` is None where no message of ours can reach the bound: then only the reader has it, and
    `pack_frame` the size of a whole frame. `is_cut` says that the sender cuts instead of refusing. `less` is for bounds
    from below, which one less breaks.
    """

    read: Callable[[bytes], Any]
    foreign: Packer
    sent: Packer | None = None
    is_cut: bool = False
    less: bool = False


def command(build: Callable[[int], Command]) -> Packer:
    return lambda size: encode_command(envelope(2), build(size))


def changed(packed: bytes, **changes: Any) -> bytes:
    """The same map with some entries replaced, packed by msgpack alone."""
    return bytes(msgpack.packb(msgpack.unpackb(packed) | changes))


PING = encode_command(envelope(2), Ping())
PREFILL = encode_command(envelope(2), PrefillChunk(row()))
HELLO = encode_hello(hello(2))
FAILED = encode_reply(reply(status=Status.FAILED, error=ReplyError("code", "text", ())))
SUBMIT = encode(Submit(1, (5,), TokenParams()))


def later(value: Any) -> bytes:
    """A command with one more key, which a reader does not know and must tolerate if the frame is within its bounds."""
    return changed(PING, later=value)


def failed(**error: Any) -> Reply:
    return reply(status=Status.FAILED, error=dataclasses.replace(ReplyError("code", "text"), **error))


def with_error(**error: Any) -> bytes:
    return changed(FAILED, error={"code": "code", "message": "text", "slots": None} | error)


def greeting(**changes: Any) -> bytes:
    return encode_hello(dataclasses.replace(hello(2), **changes))


def nested(depth: int) -> bytes:
    """A frame that nests `depth` containers, itself included."""
    value: Any = []
    for _ in range(depth - 2):
        value = [value]
    return later(value)


def filled(num_bytes: int) -> bytes:
    """A command of exactly so many bytes: its unknown keys hold `bin`s of the largest size, and a rest."""
    values = msgpack.unpackb(PING)
    left = num_bytes - len(PING)
    for number in range(4):
        key = f"later {number}"
        overhead = len(key) + 1 + 5
        size = min(limits.MAX_BIN_BYTES, left - overhead) if number < 3 else left - overhead
        values[key] = bytes(size)
        left -= overhead + size
    return bytes(msgpack.packb(values))


def of_elements(total: int) -> bytes:
    """A frame whose maps and arrays have `total` elements together, each of them counted with its container."""
    values = msgpack.unpackb(PING)
    left = total - (len(values) + 1) - (len(values["settled"]) + 1)
    number = 0
    while left:
        size = min(left - 2, limits.MAX_ARRAY_ELEMENTS - 2)  # one more for the key, one for the array
        values[f"later {number}"] = [0] * size
        number, left = number + 1, left - 2 - size
    return bytes(msgpack.packb(values))


def rows(number: int) -> tuple[Span, ...]:
    return tuple(row(slot) for slot in range(number))


def u32s(number: int) -> bytes:
    return bytes(4 * number)


def batch_arrays(number: int) -> bytes:
    ones = b"\1\0\0\0" * number
    return changed(
        encode_command(envelope(2), DecodeBatch(rows(1))),
        **dict.fromkeys(("slots", "starts", "tokens", "logits"), ones),
        block_counts=u32s(number),
        blocks=b"",
    )


CASES: dict[str, list[Case]] = {
    "U32_MAX": [
        Case(
            decode_command, lambda n: changed(PING, epoch=n), lambda n: encode_command(Envelope(2, n, 1, None), Ping())
        ),
        Case(decode_command, lambda n: changed(PREFILL, start=n), command(lambda n: PrefillChunk(row(start=n)))),
        Case(decode_command, lambda n: changed(encode_command(envelope(2), Load(1)), num_blocks=n), command(Load)),
        Case(decode_reply, lambda n: changed(FAILED, rank=n), lambda n: encode_reply(reply(rank=n))),
        Case(decode_hello, lambda n: changed(HELLO, num_blocks=n), lambda n: greeting(num_blocks=n)),
    ],
    "U64_MAX": [
        Case(
            decode_command, lambda n: beyond(PING, "seq", n), lambda n: encode_command(Envelope(2, 1, n, None), Ping())
        ),
        Case(decode_reply, lambda n: beyond(FAILED, "seq", n), lambda n: encode_reply(reply(seq=n))),
        Case(
            decode_from_front,
            lambda n: beyond(SUBMIT, "request_id", n),
            lambda n: encode(Submit(n, (5,), TokenParams())),
        ),
    ],
    "I32_MAX": [
        Case(
            decode_from_front,
            lambda n: changed(SUBMIT, priority=n),
            lambda n: encode(Submit(1, (5,), TokenParams(), n)),
        ),
    ],
    "I32_MIN": [
        Case(
            decode_from_front,
            lambda n: changed(SUBMIT, priority=n),
            lambda n: encode(Submit(1, (5,), TokenParams(), n)),
            less=True,
        ),
    ],
    "MAX_FRAME_BYTES": [Case(decode_command, filled)],
    "MAX_DEPTH": [Case(decode_command, nested)],
    "MAX_ELEMENTS": [Case(decode_command, of_elements)],
    "MAX_ARRAY_ELEMENTS": [Case(decode_command, lambda n: later([0] * n))],
    "MAX_MAP_ENTRIES": [
        Case(decode_command, lambda n: later({str(i): 0 for i in range(n)})),
        Case(
            decode_hello,
            lambda n: changed(HELLO, told={str(i): "" for i in range(n)}),
            lambda n: greeting(told={str(i): "" for i in range(n)}),
        ),
    ],
    "MAX_STRING_BYTES": [Case(decode_command, lambda n: later("x" * n))],
    "MAX_BIN_BYTES": [Case(decode_command, lambda n: later(bytes(n)))],
    "MAX_ROWS": [
        Case(decode_command, batch_arrays, command(lambda n: DecodeBatch(rows(n)))),
        Case(
            decode_command,
            lambda n: changed(batch_arrays(n), cmd=5, counts=b"\1\0\0\0" * n),
            command(lambda n: MixedStep(rows(n))),
        ),
        Case(
            decode_reply,
            lambda n: with_error(slots=u32s(n)),
            lambda n: encode_reply(failed(slots=(Slot(1),) * n)),
        ),
    ],
    "MAX_TOKENS": [
        Case(
            decode_command,
            lambda n: changed(PREFILL, tokens=u32s(n)),
            command(lambda n: PrefillChunk(row(tokens=(1,) * n))),
        ),
        Case(
            decode_command,
            lambda n: changed(
                encode_command(envelope(2), MixedStep(rows(1))), tokens=u32s(n), counts=n.to_bytes(4, "little")
            ),
            command(lambda n: MixedStep((row(tokens=(1,) * n),))),
        ),
    ],
    "MAX_BLOCKS": [
        Case(
            decode_command,
            lambda n: changed(PREFILL, blocks=u32s(n)),
            command(lambda n: PrefillChunk(row(blocks=(1,) * n))),
        ),
    ],
    "MAX_CODE_CHARS": [
        Case(decode_reply, lambda n: with_error(code="x" * n), lambda n: encode_reply(failed(code="x" * n))),
        Case(decode_reply, lambda n: with_error(code="é" * n), lambda n: encode_reply(failed(code="é" * n))),
    ],
    "MAX_ERROR_CHARS": [
        Case(
            decode_reply,
            lambda n: with_error(message="é" * n),
            lambda n: encode_reply(failed(message="é" * n)),
            is_cut=True,
        ),
    ],
    "MAX_REFUSAL_CHARS": [
        Case(
            decode_welcome,
            lambda n: changed(encode_welcome(Welcome(2, 1, "")), refusal="é" * n),
            lambda n: encode_welcome(Welcome(2, 1, "é" * n)),
            is_cut=True,
        ),
    ],
    "MAX_KEY_CHARS": [
        Case(decode_hello, lambda n: changed(HELLO, told={"é" * n: ""}), lambda n: greeting(told={"é" * n: ""})),
        Case(
            decode_hello,
            lambda n: changed(HELLO, must_equal={"k" * n: ""}),
            lambda n: greeting(must_equal={"k" * n: ""}),
        ),
    ],
    "MAX_VALUE_CHARS": [
        Case(decode_hello, lambda n: changed(HELLO, told={"k": "é" * n}), lambda n: greeting(told={"k": "é" * n})),
    ],
    "DIGEST_BYTES": [
        Case(decode_reply, lambda n: changed(FAILED, digest=bytes(n)), lambda n: encode_reply(reply(digest=bytes(n)))),
        Case(
            decode_reply,
            lambda n: changed(FAILED, digest=bytes(n)),
            lambda n: encode_reply(reply(digest=bytes(n))),
            less=True,
        ),
    ],
}


def beyond(packed: bytes, key: str, number: int) -> bytes:
    """As `changed`, for a number that msgpack itself may not hold: then a float, which stands for no integer."""
    return changed(packed, **{key: number if number <= limits.U64_MAX else float(number)})


EACH = [pytest.param(name, case, id=f"{name} {i}") for name, cases in CASES.items() for i, case in enumerate(cases)]


def test_every_bound_has_a_case() -> None:
    assert set(CASES) == {name for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)}


@pytest.mark.parametrize(("name", "case"), EACH)
def test_what_is_exactly_at_a_bound_is_packed_and_read(name: str, case: Case) -> None:
    bound = getattr(limits, name)
    case.read(case.foreign(bound))
    if case.sent is not None:
        case.read(case.sent(bound))


@pytest.mark.parametrize(("name", "case"), EACH)
def test_one_above_a_bound_is_refused_by_the_reader(name: str, case: Case) -> None:
    data = case.foreign(getattr(limits, name) + (-1 if case.less else 1))
    with pytest.raises(FrameError) as caught:
        case.read(data)
    assert caught.value.num_bytes == len(data)


@pytest.mark.parametrize(("name", "case"), [p for p in EACH if p.values[1].sent is not None])  # type: ignore[union-attr]
def test_one_above_a_bound_is_refused_or_cut_by_the_sender(name: str, case: Case) -> None:
    assert case.sent is not None
    above = getattr(limits, name) + (-1 if case.less else 1)
    if case.is_cut:
        case.read(case.sent(above))
        return
    with pytest.raises((FrameError, CommandRefused)):
        case.sent(above)


def test_the_sizes_of_the_frames_above_are_what_they_say() -> None:
    assert len(filled(limits.MAX_FRAME_BYTES)) == limits.MAX_FRAME_BYTES
    total = 0

    def count(value: Any) -> None:
        nonlocal total
        if isinstance(value, dict | list):
            total += len(value) + 1
            for inner in value.values() if isinstance(value, dict) else value:
                count(inner)

    count(msgpack.unpackb(of_elements(limits.MAX_ELEMENTS)))
    assert total == limits.MAX_ELEMENTS


def test_a_whole_frame_at_its_bound_is_packed_and_one_byte_more_is_not() -> None:
    for extra in (0, 1):
        values = msgpack.unpackb(filled(limits.MAX_FRAME_BYTES + extra))
        if extra:
            with pytest.raises(FrameError, match=f"at most {limits.MAX_FRAME_BYTES}"):
                pack_frame(values)
        else:
            assert len(pack_frame(values)) == limits.MAX_FRAME_BYTES
    with pytest.raises(FrameError, match="from -2147483648 to 2147483647"):
        check_i32("priority", 2**31)
    assert unpack_frame(pack_frame({"a": Rank(1)})).u32("a") == 1
