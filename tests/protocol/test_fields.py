# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checked access to the fields of one map."""

from __future__ import annotations

import math

import pytest

from metrale_ray.errors import FrameError
from metrale_ray.protocol.fields import Bounds, Fields, check_text, cut_text, pack_frame, pack_u32s, unpack_frame
from metrale_ray.protocol.limits import MAX_BIN_BYTES, MAX_FRAME_BYTES


def test_numbers_are_whole_or_not_and_never_nan_or_bool() -> None:
    fields = Fields({"a": 0.5, "b": 2, "c": math.nan, "d": True, "e": None, "f": math.inf})
    assert (fields.number("a"), fields.number("b"), fields.number("f")) == (0.5, 2.0, math.inf)
    for key in ("c", "d", "e", "none"):
        with pytest.raises(FrameError, match="must be a number"):
            fields.number(key)


def test_nil_and_missing_are_absent_and_nothing_else_is() -> None:
    fields = Fields({"a": None, "b": 0, "c": ""})
    assert [fields.is_absent(key) for key in ("a", "b", "c", "d")] == [True, False, False, True]
    assert "a" in fields
    assert "d" not in fields


def test_maps_inside_maps_keep_the_rank_and_the_size() -> None:
    fields = unpack_frame(pack_frame({"a": {"b": 1}, "c": [{"d": -1}]}), rank=4)
    assert fields.fields("a").u32("b") == 1
    with pytest.raises(FrameError) as caught:
        fields.fields_list("c", 1)[0].u32("d")
    assert (caught.value.rank, caught.value.num_bytes) == (4, 14)
    with pytest.raises(FrameError, match="a must be an array"):
        fields.fields_list("a", 1)
    with pytest.raises(FrameError, match="at most 0"):
        fields.fields_list("c", 0)
    with pytest.raises(FrameError, match=r"x\[1\] must be a map"):
        Fields({"x": [{}, 3]}).fields_list("x", 2)


def test_texts_are_bounded_on_both_sides() -> None:
    assert check_text("x", "é" * 3, 3) == "ééé"
    with pytest.raises(FrameError, match="x has 4 characters; allowed are 3"):
        check_text("x", "abcd", 3)
    with pytest.raises(FrameError, match="x has 4 characters; allowed are 3"):
        Fields({"x": "abcd"}).text("x", 3)
    with pytest.raises(FrameError, match="must be a text, not bytes"):
        check_text("x", b"a", 3)  # type: ignore[arg-type]


def test_a_cut_text_says_so_and_fits() -> None:
    assert cut_text("abc", 3) == "abc"
    assert cut_text("abcd", 3) == "ab…"
    assert cut_text("\udce9", 9) == "\\udce9"


def test_u32s_are_little_endian() -> None:
    assert pack_u32s("x", [1, 2**32 - 1], 2) == b"\1\0\0\0\xff\xff\xff\xff"
    assert Fields({"x": b"\1\0\0\0\xff\xff\xff\xff"}).u32s("x", 2) == (1, 2**32 - 1)
    with pytest.raises(FrameError, match="x has 2 elements; allowed are 1"):
        Fields({"x": bytes(8)}).u32s("x", 1)


@pytest.mark.parametrize("value", [2**32, -1, True, 1.0, None, "1"], ids=repr)
def test_the_element_that_does_not_fit_is_named(value: object) -> None:
    with pytest.raises(FrameError, match=r"x\[2\] must be an integer from 0 to 4294967295"):
        pack_u32s("x", [0, 1, value], 3)  # type: ignore[list-item]


def test_a_huge_value_makes_no_huge_message() -> None:
    with pytest.raises(FrameError) as caught:
        pack_u32s("x", [10**4000], 1)
    assert len(str(caught.value)) < 100


def test_a_frame_that_is_too_large_or_cannot_be_packed_is_refused() -> None:
    with pytest.raises(FrameError, match=f"at most {MAX_FRAME_BYTES}"):
        pack_frame({str(n): bytes(MAX_BIN_BYTES) for n in range(5)})
    with pytest.raises(FrameError, match="cannot be packed"):
        pack_frame({"x": object()})
    with pytest.raises(FrameError, match="cannot be packed"):
        pack_frame({"x": 2**64})


def test_bytes_and_maps_of_anything_are_bounded() -> None:
    fields = Fields({"data": b"123", "map": {"a": 1, "b": [2]}, "numbers": {1: 2}})
    assert (fields.binary("data", 3), fields.entries("map", 2)) == (b"123", {"a": 1, "b": [2]})
    with pytest.raises(FrameError, match="3 bytes; allowed are 2"):
        fields.binary("data", 2)
    with pytest.raises(FrameError, match="2 entries; allowed are 1"):
        fields.entries("map", 1)
    with pytest.raises(FrameError, match="name is not a text"):
        fields.entries("numbers", 1)
    for wrong in (lambda: fields.binary("map", 9), lambda: fields.entries("data", 9)):
        with pytest.raises(FrameError, match="must be"):
            wrong()


def test_a_reader_may_have_bounds_of_its_own() -> None:
    bounds = Bounds(max_bytes=20, max_depth=2, max_elements=8, max_array_elements=4, max_bin_bytes=5)
    data = pack_frame({"a": [1, 2, 3, 4]})
    assert unpack_frame(data, bounds=bounds).array("a", 4) == [1, 2, 3, 4]
    for values in ({"a": [1] * 5}, {"a": bytes(6)}, {"a": [[1]]}, {"a": [1] * 4, "b": [1] * 3}, {"a": "x" * 20}):
        with pytest.raises(FrameError):
            unpack_frame(pack_frame(values), bounds=bounds)
