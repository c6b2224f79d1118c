# SPDX-License-Identifier: MIT OR Apache-2.0
"""Bytes that are no frame: each decoder gives FrameError, soon, with the rank and the number of bytes.

What a seed makes of valid frames, a hundred thousand for each reader, is in the other files of fuzzing.
"""

from __future__ import annotations

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
from tests.protocol.fuzzing import peak_bytes
from tests.protocol.samples import MANY_SLOTS, frame

DECODERS: tuple[Callable[..., Any], ...] = (decode_command, decode_reply, decode_hello, decode_welcome)
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


def nested(element: bytes, num_elements: int, max_bytes: int) -> bytes:
    """Arrays in arrays, each of `num_elements` times `element` and the next array, and none of them complete."""
    data = bytearray(b"\x81\xa1a")
    for _ in range(1020):
        level = b"\xdc" + (num_elements + 1).to_bytes(2, "big") + element * num_elements
        if len(data) + len(level) > max_bytes:
            break
        data += level
    return bytes(data)


COSTLY = {
    "an array of two billion": UNREADABLE["an array of two billion"],
    "nine maps of four billion": b"\xdf\xff\xff\xff\xff" * 9,
    "a thousand arrays of 4096, all empty": b"\x81\xa1a" + b"\xdc\x10\x00" * 1020,
    "a thousand maps of 4096, all empty": b"\x81\xa1a" + b"\xde\x10\x00\xa1a" * 1020,
    "short texts, none counted before the end": nested(b"\xa2ab", 4095, 2**20),
    "numbers, none counted before the end": nested(b"\xcd\x12\x34", 4095, 2**20),
    "empty arrays, counted": b"\xdc\x10\x00" + (b"\xdc\x10\x00" + b"\x90" * 4096) * 64,
}


@pytest.mark.parametrize("data", COSTLY.values(), ids=COSTLY)
def test_a_frame_costs_no_memory_that_its_headers_announce(data: bytes) -> None:
    def read() -> None:
        with pytest.raises(FrameError):
            decode_command(data)

    # 32 KiB for each of a thousand headers inside one another, and some ten times the bytes that did come.
    assert peak_bytes(read) < 40 * 2**20 + 20 * len(data)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_unreadable_is_refused_soon(name: str) -> None:
    before = time.thread_time()
    for decode in DECODERS:
        with pytest.raises(FrameError):
            decode(UNREADABLE[name])
    assert time.thread_time() - before < 2


def test_every_beginning_of_a_frame_and_every_single_byte_is_refused() -> None:
    for data in [*(WHOLE[:size] for size in range(len(WHOLE))), *(bytes([n]) for n in range(256))]:
        for decode in DECODERS:
            with pytest.raises(FrameError) as caught:
                decode(data, rank=0)
            assert (caught.value.rank, caught.value.num_bytes) == (0, len(data))
