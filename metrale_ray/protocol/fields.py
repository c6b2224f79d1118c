# SPDX-License-Identifier: MIT OR Apache-2.0
"""One frame's fields: a map of checked values, packed into bytes and read back.

Rules: one msgpack map per frame. Integers are checked per field, before packing and after unpacking; bool is no
integer and a float never stands for one; no ext types and no timestamps. Long lists of numbers are `bin` of
little-endian u32. Keys that a reader does not ask for are tolerated, so that journals of other builds can be read.
Whatever is wrong raises FrameError with the sender's rank and the number of bytes.

What is left out: which fields a message has (`codec`, `front`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from metrale_ray.errors import FrameError
from metrale_ray.protocol.limits import (
    I32_MAX,
    I32_MIN,
    MAX_ARRAY_ELEMENTS,
    MAX_BIN_BYTES,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_FRAME_BYTES,
    MAX_MAP_ENTRIES,
    MAX_STRING_BYTES,
    U32_MAX,
    U64_MAX,
)

_INTEGERS_ONLY = {int}


@dataclass(frozen=True, slots=True)
class Packed:
    """A value as it stands in a frame, packed once for many frames."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one map may hold at the most; see `limits` for what each one is of."""

    max_bytes: int
    max_depth: int
    max_elements: int
    max_array_elements: int
    max_bin_bytes: int


FRAME_BOUNDS = Bounds(MAX_FRAME_BYTES, MAX_DEPTH, MAX_ELEMENTS, MAX_ARRAY_ELEMENTS, MAX_BIN_BYTES)


def pack_value(value: Any) -> Packed:
    """`value`, whose integers, texts and lists have been checked, for `pack_frame`. Raises FrameError."""
    try:
        return Packed(msgpack.packb(value, use_bin_type=True))
    except (OverflowError, TypeError, ValueError) as error:
        raise FrameError(f"cannot be packed: {error}") from error


def pack_frame(values: Mapping[str, Any], ready: Mapping[str, Packed] | None = None) -> bytes:
    """One frame of `values`, whose integers, texts and lists have been checked. Raises FrameError if too large.

    `ready`: values for keys of `values`, which are put in as they are.
    """
    data = pack_value(values).data if not ready else _packed_map(values, ready)
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame has at most {MAX_FRAME_BYTES} bytes", num_bytes=len(data))
    return data


def unpack_frame(data: bytes, rank: int | None = None, bounds: Bounds = FRAME_BOUNDS) -> Fields:
    """The fields of one whole frame that `rank` sent. Raises FrameError for anything but one map within the bounds."""
    if len(data) > bounds.max_bytes:
        raise FrameError(f"a frame has at most {bounds.max_bytes} bytes", num_bytes=len(data), rank=rank)
    try:
        values = _unpack(data, bounds)
    except FrameError as error:
        raise FrameError(error.message, num_bytes=len(data), rank=rank) from error
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        text = str(error) or type(error).__name__
        raise FrameError(f"not one msgpack map: {text}", num_bytes=len(data), rank=rank) from error
    if type(values) is not dict:
        raise FrameError(f"not a map but {type(values).__name__}", num_bytes=len(data), rank=rank)
    if not _within_depth(values, bounds.max_depth):
        raise FrameError(f"nested deeper than {bounds.max_depth}", num_bytes=len(data), rank=rank)
    return Fields(values, len(data), rank)


def check_u32(name: str, value: int) -> int:
    """`value` if it is an integer of 0..2**32-1. Raises FrameError."""
    return _check_integer(name, value, U32_MAX)


def check_u64(name: str, value: int) -> int:
    """`value` if it is an integer of 0..2**64-1. Raises FrameError."""
    return _check_integer(name, value, U64_MAX)


def check_i32(name: str, value: int) -> int:
    """`value` if it is an integer of -2**31..2**31-1. Raises FrameError."""
    return _check_integer(name, value, I32_MAX, I32_MIN)


def check_text(name: str, value: str, max_chars: int) -> str:
    """`value` if it is a text of valid Unicode with at most `max_chars` characters. Raises FrameError."""
    if type(value) is not str:
        raise FrameError(f"{name} must be a text, not {type(value).__name__}")
    if len(value) > max_chars:
        raise FrameError(f"{name} has {len(value)} characters; allowed are {max_chars}")
    if not value.isascii() and cut_text(value, max_chars) != value:
        raise FrameError(f"{name} holds characters that UTF-8 cannot carry")
    return value


def cut_text(value: str, max_chars: int) -> str:
    """`value` made fit to send: what UTF-8 cannot carry is escaped, what is longer than `max_chars` is cut."""
    text = value.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def pack_u32s(name: str, values: Sequence[int], max_count: int) -> bytes:
    """`values` as little-endian u32, 4 bytes each. Raises FrameError naming the first element that does not fit."""
    count = len(values)
    if count > max_count:
        raise FrameError(f"{name} has {count} elements; allowed are {max_count}")
    if count and set(map(type, values)) != _INTEGERS_ONLY:
        values = [_check_integer(f"{name}[{index}]", value, U32_MAX) for index, value in enumerate(values)]
    try:
        return struct.pack(f"<{count}I", *values)
    except struct.error:
        for index, value in enumerate(values):
            _check_integer(f"{name}[{index}]", value, U32_MAX)
        raise


def pack_f64s(name: str, values: Sequence[float], max_count: int) -> bytes:
    """`values` as little-endian f64, 8 bytes each. Raises FrameError for one that is no finite number."""
    count = len(values)
    if count > max_count:
        raise FrameError(f"{name} has {count} elements; allowed are {max_count}")
    for index, value in enumerate(values):
        if type(value) is not float or not math.isfinite(value):
            raise FrameError(f"{name}[{index}] must be a finite float, not {_shown(value)}")
    return struct.pack(f"<{count}d", *values)


class Fields:
    """The fields of one map that came over the wire, each read with its check.

    Every method raises FrameError when the field is missing, of another type or out of range.
    """

    __slots__ = ("_num_bytes", "_rank", "_values")

    def __init__(self, values: Mapping[Any, Any], num_bytes: int | None = None, rank: int | None = None) -> None:
        self._values = values
        self._num_bytes = num_bytes
        self._rank = rank

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, message: str) -> FrameError:
        """A FrameError about this frame, to be raised by the caller."""
        return FrameError(message, num_bytes=self._num_bytes, rank=self._rank)

    def packed(self) -> bytes:
        """This map as it came: the same bytes exactly for the same keys in the same order with the same values."""
        return pack_value(self._values).data

    def is_absent(self, key: str) -> bool:
        """Whether the field is missing or nil, for fields that have a default."""
        return self._values.get(key) is None

    def u32(self, key: str) -> int:
        """An integer of 0..2**32-1."""
        return self._integer(key, U32_MAX)

    def u64(self, key: str) -> int:
        """An integer of 0..2**64-1."""
        return self._integer(key, U64_MAX)

    def i32(self, key: str) -> int:
        """An integer of -2**31..2**31-1."""
        return self._integer(key, I32_MAX, I32_MIN)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._typed(key, bool)
        return bool(value)

    def number(self, key: str) -> float:
        """A finite or infinite number that need not be whole; NaN is refused."""
        value = self._values.get(key)
        if value is None or type(value) not in (int, float) or value != value:
            raise self.error(f"{key} must be a number, not {_shown(value)}")
        return float(value)

    def text(self, key: str, max_chars: int) -> str:
        """A text of at most `max_chars` characters."""
        value: str = self._typed(key, str)
        if len(value) > max_chars:
            raise self.error(f"{key} has {len(value)} characters; allowed are {max_chars}")
        return value

    def raw(self, key: str, size_bytes: int) -> bytes:
        """Exactly `size_bytes` bytes."""
        value: bytes = self._typed(key, bytes)
        if len(value) != size_bytes:
            raise self.error(f"{key} has {len(value)} bytes; it must have {size_bytes}")
        return value

    def binary(self, key: str, max_bytes: int) -> bytes:
        """At most `max_bytes` bytes."""
        value: bytes = self._typed(key, bytes)
        if len(value) > max_bytes:
            raise self.error(f"{key} has {len(value)} bytes; allowed are {max_bytes}")
        return value

    def u32s(self, key: str, max_count: int, count: int | None = None) -> tuple[int, ...]:
        """Little-endian u32 of a `bin`: at most `max_count`, exactly `count` where that is given."""
        value: bytes = self._typed(key, bytes)
        found, rest = divmod(len(value), 4)
        if rest:
            raise self.error(f"{key} has {len(value)} bytes, which is not a whole number of u32")
        if found > max_count:
            raise self.error(f"{key} has {found} elements; allowed are {max_count}")
        if count is not None and found != count:
            raise self.error(f"{key} has {found} elements; it must have {count}")
        return struct.unpack(f"<{found}I", value)

    def f64s(self, key: str, max_count: int, count: int | None = None) -> tuple[float, ...]:
        """Little-endian f64 of a `bin`, all finite: at most `max_count`, exactly `count` where that is given."""
        value: bytes = self._typed(key, bytes)
        found, rest = divmod(len(value), 8)
        if rest:
            raise self.error(f"{key} has {len(value)} bytes, which is not a whole number of f64")
        if found > max_count:
            raise self.error(f"{key} has {found} elements; allowed are {max_count}")
        if count is not None and found != count:
            raise self.error(f"{key} has {found} elements; it must have {count}")
        values: tuple[float, ...] = struct.unpack(f"<{found}d", value)
        if not all(map(math.isfinite, values)):
            raise self.error(f"{key} holds a number that is not finite")
        return values

    def array(self, key: str, max_count: int, count: int | None = None) -> list[Any]:
        """An array of at most `max_count` elements of any type, which the caller must check (`item`, `fields`)."""
        value: list[Any] = self._typed(key, list)
        if len(value) > max_count or (count is not None and len(value) != count):
            allowed = f"at most {max_count}" if count is None else f"exactly {count}"
            raise self.error(f"{key} has {len(value)} elements; it must have {allowed}")
        return value

    def items(self, key: str, names: tuple[str, ...]) -> Fields:
        """An array of exactly `len(names)` elements, as fields of those names."""
        return Fields(
            dict(zip(names, self.array(key, len(names), len(names)), strict=True)), self._num_bytes, self._rank
        )

    def fields(self, key: str) -> Fields:
        """A map inside this one."""
        return Fields(self._typed(key, dict), self._num_bytes, self._rank)

    def entries(self, key: str, max_entries: int) -> dict[str, Any]:
        """A map of texts to values of any type, which the caller must check."""
        values: dict[Any, Any] = self._typed(key, dict)
        if len(values) > max_entries:
            raise self.error(f"{key} has {len(values)} entries; allowed are {max_entries}")
        if any(type(name) is not str for name in values):
            raise self.error(f"{key} has an entry whose name is not a text")
        return values

    def fields_list(self, key: str, max_count: int) -> list[Fields]:
        """An array of maps."""
        maps = self.array(key, max_count)
        for index, value in enumerate(maps):
            if type(value) is not dict:
                raise self.error(f"{key}[{index}] must be a map, not {_shown(value)}")
        return [Fields(value, self._num_bytes, self._rank) for value in maps]

    def texts(self, key: str, max_entries: int, max_key_chars: int, max_value_chars: int) -> dict[str, str]:
        """A map of texts to texts."""
        entries: dict[Any, Any] = self._typed(key, dict)
        if len(entries) > max_entries:
            raise self.error(f"{key} has {len(entries)} entries; allowed are {max_entries}")
        for name, value in entries.items():
            if type(name) is not str or len(name) > max_key_chars:
                raise self.error(f"{key} has an entry whose name is not a text of at most {max_key_chars} characters")
            if type(value) is not str or len(value) > max_value_chars:
                raise self.error(f"{key}[{name!r}] must be a text of at most {max_value_chars} characters")
        return entries

    def _integer(self, key: str, largest: int, least: int = 0) -> int:
        value = self._values.get(key)
        if type(value) is not int or not least <= value <= largest:
            raise self.error(f"{key} must be an integer from {least} to {largest}, not {_shown(value)}")
        return value

    def _typed(self, key: str, kind: type) -> Any:
        value = self._values.get(key)
        if type(value) is not kind:
            raise self.error(f"{key} must be {_KIND_NAMES[kind]}, not {_shown(value)}")
        return value


_KIND_NAMES = {bool: "true or false", str: "a text", bytes: "bytes", list: "an array", dict: "a map"}


def _check_integer(name: str, value: int, largest: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
        raise FrameError(f"{name} must be an integer from {least} to {largest}, not {_shown(value)}")
    return int(value)


def _shown(value: object) -> str:
    """A short description: a number by its value, anything else by its type, so that an error's text stays short."""
    if value is None:
        return "missing"
    if isinstance(value, int | float) and len(text := repr(value)) <= 32:
        return text
    return type(value).__name__


def _packed_map(values: Mapping[str, Any], ready: Mapping[str, Packed]) -> bytes:
    parts = [msgpack.Packer().pack_map_header(len(values))]
    for key, value in values.items():
        parts.append(pack_value(key).data)
        parts.append((ready.get(key) or pack_value(value)).data)
    return b"".join(parts)


def _unpack(data: bytes, bounds: Bounds) -> Any:
    map_hook, list_hook = _counting_hooks(bounds.max_elements)
    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=map_hook,
        list_hook=list_hook,
        ext_hook=_refuse_ext,
        max_str_len=MAX_STRING_BYTES,
        max_bin_len=bounds.max_bin_bytes,
        max_array_len=bounds.max_array_elements,
        max_map_len=MAX_MAP_ENTRIES,
        max_ext_len=0,
    )


def _counting_hooks(
    max_elements: int,
) -> tuple[Callable[[list[tuple[Any, Any]]], dict[Any, Any]], Callable[[list[Any]], list[Any]]]:
    """Hooks that the unpacker calls for each map and array, and that stop it past `max_elements`."""
    total = 0

    def count(num_elements: int) -> None:
        nonlocal total
        total += num_elements
        if total > max_elements:
            raise FrameError(f"has more than {max_elements} elements")

    def on_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        count(len(pairs) + 1)
        values = dict(pairs)
        if len(values) != len(pairs):
            raise FrameError("has a map that names a key twice")
        return values

    def on_list(elements: list[Any]) -> list[Any]:
        count(len(elements) + 1)
        return elements

    return on_map, on_list


def _refuse_ext(code: int, data: bytes) -> Any:
    raise FrameError(f"holds an ext value of type {code}; ext types and timestamps are not allowed")


def _within_depth(value: dict[Any, Any] | list[Any], depth: int) -> bool:
    """Whether `value` nests at most `depth` containers, itself included. Recurses at most MAX_DEPTH times."""
    if depth == 0:
        return False
    children = value.values() if type(value) is dict else value
    return all(_within_depth(child, depth - 1) for child in children if type(child) in (dict, list))
