# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where each value of a msgpack frame lies, so that a mutation can replace one without packing the rest anew.

Only valid frames are looked at, and only the forms that our packer writes; an ext value is not among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a value is."""

    PLAIN = "plain"  # nil, true, false, a float
    INTEGER = "integer"
    TEXT = "text"
    BIN = "bin"
    ARRAY = "array"
    MAP = "map"


@dataclass(frozen=True, slots=True)
class Item:
    """One value: its header is `start`..`body`, its content `body`..`end`. `pairs` are a map's, each key to value."""

    kind: Kind
    start: int
    body: int
    end: int
    depth: int
    is_key: bool = False
    pairs: tuple[tuple[int, int], ...] = ()


# First byte: kind, and the number of bytes behind it that hold the length (text, bin, array, map) or the value.
_SIZED = {0xD9: (Kind.TEXT, 1), 0xDA: (Kind.TEXT, 2), 0xDB: (Kind.TEXT, 4)}
_SIZED |= {0xC4: (Kind.BIN, 1), 0xC5: (Kind.BIN, 2), 0xC6: (Kind.BIN, 4)}
_SIZED |= {0xDC: (Kind.ARRAY, 2), 0xDD: (Kind.ARRAY, 4), 0xDE: (Kind.MAP, 2), 0xDF: (Kind.MAP, 4)}
_FIXED = {0xC0: (Kind.PLAIN, 0), 0xC2: (Kind.PLAIN, 0), 0xC3: (Kind.PLAIN, 0), 0xCA: (Kind.PLAIN, 4)}
_FIXED |= {0xCB: (Kind.PLAIN, 8)}
_FIXED |= {0xCC + n: (Kind.INTEGER, 2**n) for n in range(4)} | {0xD0 + n: (Kind.INTEGER, 2**n) for n in range(4)}


def items_of(data: bytes) -> list[Item]:
    """Every value of the one frame `data`, outer before inner, in order of their first bytes. The first is the map."""
    items = list(_walk(data, 0, 1, False))
    if items[0].end != len(data):
        raise ValueError(f"{len(data) - items[0].end} bytes are left behind the frame")
    return items


def _walk(data: bytes, start: int, depth: int, is_key: bool) -> Iterator[Item]:
    kind, body, length = _header(data, start)
    if kind not in (Kind.ARRAY, Kind.MAP):
        yield Item(kind, start, body, body + length, depth, is_key)
        return
    inner: list[Item] = []
    ends = [body]
    for number in range(length if kind is Kind.ARRAY else 2 * length):
        children = list(_walk(data, ends[-1], depth + 1, kind is Kind.MAP and number % 2 == 0))
        inner += children
        ends.append(children[0].end)
    pairs = tuple(zip(ends[:-1:2], ends[2::2], strict=True)) if kind is Kind.MAP else ()
    yield Item(kind, start, body, ends[-1], depth, is_key, pairs)
    yield from inner


def _header(data: bytes, start: int) -> tuple[Kind, int, int]:
    """The kind of the value at `start`, where its content begins, and how much there is: bytes, or elements."""
    first = data[start]
    if first < 0x80 or first >= 0xE0:
        return Kind.INTEGER, start + 1, 0
    if first < 0x90:
        return Kind.MAP, start + 1, first & 15
    if first < 0xA0:
        return Kind.ARRAY, start + 1, first & 15
    if first < 0xC0:
        return Kind.TEXT, start + 1, first & 31
    if first in _FIXED:
        kind, size = _FIXED[first]
        return kind, start + 1, size
    kind, width = _SIZED[first]
    body = start + 1 + width
    return kind, body, int.from_bytes(data[start + 1 : body], "big")
