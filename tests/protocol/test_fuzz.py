# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whatever bytes come, a decoder gives a message or FrameError, soon, with the rank and the number of bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from msgpack import fallback

from metrale_ray.errors import FrameError
from metrale_ray.protocol import fields
from metrale_ray.protocol.codec import decode_command, decode_hello, decode_reply, decode_welcome
from metrale_ray.protocol.commands import Ping
from metrale_ray.protocol.limits import MAX_ARRAY_ELEMENTS, MAX_DEPTH, MAX_ELEMENTS, MAX_FRAME_BYTES, MAX_MAP_ENTRIES
from tests.protocol.samples import MANY_SLOTS, frame, golden_messages, to_bytes

NUM_FRAMES = 20_000
DECODERS: tuple[Callable[..., Any], ...] = (decode_command, decode_reply, decode_hello, decode_welcome)
FRAMES = [to_bytes(message, version) for version in (1, 2) for message in golden_messages(version).values()]
WHOLE = frame(2, MANY_SLOTS["mixed_step"]).data

UNREADABLE = {
    "cut short": WHOLE[:-1],
    "two frames": WHOLE + WHOLE,
    "the first third": WHOLE[: len(WHOLE) // 3],
    "the second third": WHOLE[len(WHOLE) // 3 : 2 * len(WHOLE) // 3],
    "the last third": WHOLE[2 * len(WHOLE) // 3 :],
    "empty": b"",
    "one byte more": WHOLE + b"\0",
    "an array of two billion": bytes.fromhex("dd74fffdbd"),
    "a bin of four billion": bytes.fromhex("c6ffffffff"),
    "a text of four billion": bytes.fromhex("dbffffffff"),
    "a map of four billion": bytes.fromhex("dfffffffff"),
    "an ext of four billion": bytes.fromhex("c9ffffffff01"),
    "nested 600 deep": b"\x91" * 600 + b"\xc0",
    "nested 1100 deep": b"\x91" * 1100 + b"\xc0",
    "nested 100000 deep": b"\x91" * 100_000 + b"\xc0",
    "maps nested 600 deep": b"\x81\xa1a" * 600 + b"\xc0",
    "the byte that means nothing": b"\xc1",
    "no map": b"\x01",
    "an array": msgpack.packb([1, 2]),
    "an ext value": msgpack.packb({"kind": "command", "x": msgpack.ExtType(5, b"abc")}),
    "an empty ext value": msgpack.packb({"kind": "command", "x": msgpack.ExtType(5, b"")}),
    "a timestamp": msgpack.packb({"kind": "command", "x": msgpack.Timestamp(1, 2)}),
    "a key twice": b"\x82\xa4kind\xa7command\xa4kind\xa7command",
    "a number for a key": b"\x81\x01\x02",
    "a text that is no UTF-8": b"\x81\xa4kind\xa2\xff\xff",
    "too large": bytes(MAX_FRAME_BYTES + 1),
    "a map of too many entries": msgpack.packb({str(n): n for n in range(MAX_MAP_ENTRIES + 1)}),
    "an array of too many elements": msgpack.packb({"x": [0] * (MAX_ARRAY_ELEMENTS + 1)}),
    "too many elements": msgpack.packb({str(n): [0] * MAX_ARRAY_ELEMENTS for n in range(MAX_ELEMENTS // 4096 + 1)}),
    "nested one too deep": b"\x81\xa1a" * MAX_DEPTH + b"\x80",
}


@pytest.mark.parametrize("codec", ["compiled", "plain Python"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_one_map_within_the_limits_is_a_frame_error(
    name: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if codec == "plain Python":
        monkeypatch.setattr(fields.msgpack, "unpackb", fallback.unpackb)
    data = UNREADABLE[name]
    for decode in DECODERS:
        with pytest.raises(FrameError) as caught:
            decode(data, rank=3)
        assert (caught.value.rank, caught.value.num_bytes) == (3, len(data))
        assert f"from rank 3 ({len(data)} bytes)" in str(caught.value)


def test_a_frame_of_200_mb_is_refused_without_reading_it() -> None:
    data = bytes(200_000_000)
    before = time.process_time()
    with pytest.raises(FrameError, match="at most 16777216"):
        decode_command(data)
    assert time.process_time() - before < 0.05


def test_a_nest_as_deep_as_allowed_is_read() -> None:
    extra = b"\x81\xa1a" * (MAX_DEPTH - 2) + b"\x80"
    data = frame(2, Ping()).data
    assert decode_command(bytes([data[0] + 1]) + data[1:] + b"\xa5later" + extra).command == Ping()


def test_a_small_frame_costs_no_memory_that_its_headers_announce() -> None:
    tracemalloc = pytest.importorskip("tracemalloc")
    tracemalloc.start()
    for data in (UNREADABLE["an array of two billion"], b"\xdd\x00\x00\x10\x00" * 100, b"\xdf\xff\xff\xff\xff" * 9):
        with pytest.raises(FrameError):
            decode_command(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 * 2**20


def test_20000_random_and_damaged_frames_give_a_message_or_a_frame_error(scale: int) -> None:
    chance = random.Random(20260)
    num_read = 0
    for _ in range(NUM_FRAMES * scale):
        data = damaged(chance)
        for decode in DECODERS:
            num_read += outcome(decode, data) is None
    assert num_read > 0  # some damage is harmless, so both outcomes were seen


def outcome(decode: Callable[..., Any], data: bytes) -> FrameError | None:
    """The FrameError that these bytes give, or None when they are a message. Anything else is the test's failure."""
    try:
        decode(data, rank=1)
    except FrameError as error:
        if (error.rank, error.num_bytes) != (1, len(data)):
            raise AssertionError("the error does not name the rank and the number of bytes") from error
        return error
    return None


def damaged(chance: random.Random) -> bytes:
    """A frame that was cut, doubled, overwritten, re-valued or made up."""
    data = bytearray(chance.choice(FRAMES))
    match chance.randrange(6):
        case 0:
            return chance.randbytes(chance.randrange(64))
        case 1:
            return bytes(data[: chance.randrange(len(data))])
        case 2:
            return bytes(data) + chance.randbytes(chance.randrange(1, 9))
        case 3:
            return revalued(bytes(data), chance)
        case _:
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            return bytes(data)


def revalued(data: bytes, chance: random.Random) -> bytes:
    """The same map with one value of another kind, so that the damage is behind the unpacker."""
    values = msgpack.unpackb(data)
    others = [
        None,
        True,
        -1,
        2**64 - 1,
        1.5,
        "",
        "x" * 70,
        b"",
        b"\0" * 7,
        b"\0" * 8,
        [],
        [1, 2],
        {},
        {"a": 1},
        {"b": []},
    ]
    values[chance.choice(list(values))] = chance.choice(others)
    packed: bytes = msgpack.packb(values)
    return packed
