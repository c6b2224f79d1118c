# SPDX-License-Identifier: MIT OR Apache-2.0
"""Frames for fuzzing: valid ones, changed by a seed. Bytes in, bytes out; nothing is packed anew, so it is quick.

Two kinds of change. Those of bytes (bits, cuts, insertions, doubled and joined frames) mostly break the frame. Those of
values (numbers at their bounds, other types, other lengths, nests, keys twice, missing or new) leave it one that can
be unpacked, and so they reach the checks behind the unpacker.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from metrale_ray.protocol.limits import MAX_DEPTH
from tests.protocol.msgpack_items import Item, Kind, items_of

EDGES = (0, 1, 2, 3, 4, 5, 7, 8, 31, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**20, 2**31 - 1, 2**31)
EDGES += (4026531840, 2**32 - 1, 2**32, 72057594051091511, 2**63 - 1, 2**63, 2**64 - 1)
BELOW_ZERO = (-1, -32, -33, -128, -129, -(2**15), -(2**31), -(2**31) - 1, -(2**63))

HUGE = tuple(map(bytes.fromhex, ("dd74fffdbd", "ddffffffff", "dfffffffff", "dbffffffff", "c6ffffffff", "c9ffffffff01")))
"""Headers that announce far more than any frame holds."""


def _integers() -> tuple[bytes, ...]:
    """Each edge in its shortest form and in every longer one, which a reader must take as the same number."""
    packed = []
    for number in EDGES:
        packed += [bytes([number])] if number < 128 else []
        for first, form in ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q")):
            if number < 256 ** struct.calcsize(form):
                packed.append(bytes([first]) + struct.pack(form, number))
        packed += [b"\xd3" + struct.pack(">q", number)] if number < 2**63 else []
    return (*packed, *(b"\xd3" + struct.pack(">q", number) for number in BELOW_ZERO), b"\xff", b"\xe0")


INTEGERS = _integers()
NESTS = tuple(
    opening * depth + b"\xc0"
    for opening in (b"\x91", b"\x81\xa1a", b"\xdc\x00\x01")
    for depth in (*range(1, MAX_DEPTH + 2), 40, 600, 1100)
)
OTHERS = (
    *(b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\x90", b"\x80", b"\xa0", b"\xc4\0", b"\xd9\0"),
    *(b"\xcb" + struct.pack(">d", x) for x in (0.0, 1.0, -1.5, 1e300, float("inf"), float("nan"))),
    *(b"\xca\x3f\x80\0\0", b"\xa1x", b"\xa2\xff\xff", b"\xa3\xed\xa0\x80", b"\xd9\x46" + b"y" * 70, b"\xa3stu"),
    *(b"\xc4" + bytes([size]) + bytes(size) for size in (1, 3, 4, 7, 8, 9, 12, 255)),
    *(b"\x91\x01", b"\x92\x01\xc3", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", b"\x81\xa1a\xa1b", b"\x81\xc4\x01a\x90"),
    *(b"\x82\xa1a\x01\xa1a\x02", b"\x81\x01\x02", b"\x81\xc0\xc0", b"\x81\x90\xc0"),
    *(b"\xd4\x05a", b"\xc7\0\x05", b"\xd6\xff\0\0\0\1", b"\xc7\x0c\xff" + bytes(12)),
)
"""Values of every type, legal and not: what stands where something else belongs."""


class Frame:
    """A valid frame and where its values lie."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        top, *inner = items_of(data)
        self.top: Item = top
        self.inner: list[Item] = inner
        self.values = [item for item in inner if not item.is_key]
        self.integers = [item for item in self.values if item.kind is Kind.INTEGER]
        self.bins = [item for item in self.values if item.kind is Kind.BIN and item.end - item.body >= 4]
        self.sized = [item for item in [top, *inner] if item.kind not in (Kind.INTEGER, Kind.PLAIN)]


class Mutator:
    """An endless stream of frames made of `valid` ones; the same seed gives the same stream.

    `foreign` are valid frames of other kinds: a tenth of the stream is made of them, and pieces of them go everywhere.
    """

    def __init__(self, seed: int, valid: Sequence[bytes], foreign: Sequence[bytes] = ()) -> None:
        self._chance = random.Random(seed)
        self._valid = [Frame(data) for data in valid]
        self._foreign = [Frame(data) for data in foreign]

    def next(self) -> bytes:
        """One frame. Most are changed once, some again, and a few come from nowhere."""
        chance = self._chance
        frames = self._foreign if self._foreign and chance.random() < 0.1 else self._valid
        data = self.of(chance.choice(frames))
        if chance.random() < 0.15:
            data = chance.choice(_ON_ANY_BYTES)(chance, data)
        return data

    def of(self, frame: Frame) -> bytes:
        """One change of `frame`."""
        pool = self._foreign if self._foreign and self._chance.random() < 0.1 else self._valid
        return self._chance.choice(_CHANGES)(self._chance, frame, pool)


def _flipped(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 4) if data else 0):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _overwritten(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    new = chance.randbytes(chance.randrange(1, 9))
    return data[:at] + new + data[at + len(new) :]


def _cut(chance: random.Random, data: bytes) -> bytes:
    first, last = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    return (data[:first], data[last:], data[:first] + data[last:], data[:-1])[chance.randrange(4)]


def _inserted(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data) + 1)
    return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]


def _lengthened(chance: random.Random, data: bytes) -> bytes:
    return data + chance.choice((b"\0", b"\xc0", b"\xc1", data, data[: chance.randrange(len(data) + 1)]))


def _repeated(chance: random.Random, data: bytes) -> bytes:
    first, last = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
    return data[:last] + data[first:]


_ON_ANY_BYTES = (_flipped, _overwritten, _cut, _inserted, _lengthened, _repeated)
Change = Callable[[random.Random, Frame, Sequence[Frame]], bytes]


def _on_bytes(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    return chance.choice(_ON_ANY_BYTES)(chance, frame.data)


def _made_up(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    return chance.randbytes(chance.randrange(64)) if chance.random() < 0.8 else chance.choice(OTHERS + NESTS + HUGE)


def _joined(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    """The beginning of one frame and the end of another, cut between values or anywhere."""
    other = chance.choice(frames)
    if chance.random() < 0.5:
        return frame.data[: chance.choice(frame.inner).start] + other.data[chance.choice(other.inner).start :]
    return frame.data[: chance.randrange(len(frame.data))] + other.data[chance.randrange(len(other.data)) :]


def _transplanted(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    """A value of another frame in the place of one of this."""
    other = chance.choice(frames)
    given = chance.choice(other.values)
    return _replaced(frame, chance.choice(frame.values), other.data[given.start : given.end])


def _number(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    if not frame.integers:
        return _element(chance, frame, frames)
    return _replaced(frame, chance.choice(frame.integers), chance.choice(INTEGERS))


def _element(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    """One number of a long list, at a bound."""
    if not frame.bins:
        return _on_bytes(chance, frame, frames)
    item = chance.choice(frame.bins)
    at = item.body + 4 * chance.randrange((item.end - item.body) // 4)
    number = chance.choice(EDGES) & 0xFFFFFFFF
    return frame.data[:at] + number.to_bytes(4, "little") + frame.data[at + 4 :]


def _other_type(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    return _replaced(frame, chance.choice(frame.values), chance.choice(OTHERS))


def _nested(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    return _replaced(frame, chance.choice(frame.values), chance.choice(NESTS))


def _other_length(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    """A header that announces more, less, or far more than there is."""
    item = chance.choice(frame.sized)
    header = bytearray(frame.data[item.start : item.body])
    if chance.random() < 0.3:
        header = bytearray(chance.choice(HUGE))
    else:
        header[-1] = (header[-1] + chance.choice((-4, -1, 1, 4))) & 0xFF
    return frame.data[: item.start] + header + frame.data[item.body :]


def _missing_pair(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    first, last = chance.choice(frame.top.pairs)
    return _with_pairs(frame, len(frame.top.pairs) - 1, frame.data[frame.top.body : first] + frame.data[last:])


def _more_pairs(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    """One more key: a new one, which is tolerated, or one of this or another frame, which may be there already."""
    other = chance.choice((frame, chance.choice(frames)))
    first, last = chance.choice(other.top.pairs)
    new = chance.choice((other.data[first:last], b"\xa5later" + chance.choice(OTHERS), b"\xa4more\x01"))
    return _with_pairs(frame, len(frame.top.pairs) + 1, frame.data[frame.top.body :] + new)


def _reordered(chance: random.Random, frame: Frame, frames: Sequence[Frame]) -> bytes:
    pairs = [frame.data[first:last] for first, last in frame.top.pairs]
    chance.shuffle(pairs)
    return frame.data[: frame.top.body] + b"".join(pairs)


def _with_pairs(frame: Frame, number: int, pairs: bytes) -> bytes:
    return (bytes([0x80 | number]) if number < 16 else b"\xde" + number.to_bytes(2, "big")) + pairs


def _replaced(frame: Frame, item: Item, value: bytes) -> bytes:
    return frame.data[: item.start] + value + frame.data[item.end :]


_CHANGES: tuple[Change, ...] = (
    *(_on_bytes,) * 6,
    _made_up,
    _joined,
    *(_transplanted,) * 2,
    *(_number,) * 4,
    *(_element,) * 3,
    *(_other_type,) * 2,
    _nested,
    _other_length,
    _missing_pair,
    *(_more_pairs,) * 2,
    _reordered,
)
