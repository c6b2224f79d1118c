# SPDX-License-Identifier: MIT OR Apache-2.0
"""Segments: whole, torn at any byte, damaged at any byte, and files that are none."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

import pytest

from metrale_ray.errors import JournalError
from metrale_ray.protocol.journal.record_codec import MAX_RECORD_BYTES
from metrale_ray.protocol.journal.segments import (
    MAGIC,
    SegmentReader,
    pack_record,
    segment_name,
    segment_number,
)

PAYLOADS = [b"first", b"the second one", b"\0" * 5, b"last"]
WHOLE = MAGIC + b"".join(map(pack_record, PAYLOADS))
ENDS = [len(MAGIC) + sum(12 + len(payload) for payload in PAYLOADS[:count]) for count in range(len(PAYLOADS) + 1)]


def read(path: Path, data: bytes) -> tuple[list[bytes], SegmentReader]:
    """The payloads of a file of `data`, and its reader."""
    path.write_bytes(data)
    segment = SegmentReader(path)
    return list(segment), segment


def head(length: int, checksum: int) -> bytes:
    """A record's head whose own checksum is right."""
    lengths = struct.pack("<II", length, checksum)
    return lengths + struct.pack("<I", crc32(lengths))


def test_payloads_come_back_in_order(tmp_path: Path) -> None:
    payloads, segment = read(tmp_path / "a", WHOLE)
    assert (payloads, segment.torn, segment.offset) == (PAYLOADS, False, len(WHOLE))


def test_a_file_cut_at_any_byte_gives_its_whole_records_and_is_torn_unless_cut_between_two(tmp_path: Path) -> None:
    for length in range(len(WHOLE)):
        payloads, segment = read(tmp_path / "a", WHOLE[:length])
        num_whole = sum(end <= length for end in ENDS[1:])
        assert payloads == PAYLOADS[:num_whole], length
        assert segment.torn == (length not in ENDS), length


def test_a_changed_byte_never_gives_another_payload_and_only_the_last_record_can_be_torn(tmp_path: Path) -> None:
    for index in range(len(WHOLE)):
        for mask in (0x01, 0x80, 0xFF):
            data = WHOLE[:index] + bytes([WHOLE[index] ^ mask]) + WHOLE[index + 1 :]
            (tmp_path / "a").write_bytes(data)
            segment = SegmentReader(tmp_path / "a")
            found: list[bytes] = []
            try:
                found.extend(segment)
            except JournalError:
                assert not segment.torn, index
            else:
                assert segment.torn, index
                assert index >= ENDS[-2] + 12, "only the payload at the very end may be taken for torn"
            assert found == PAYLOADS[: max(0, sum(end <= index for end in ENDS) - 1)], index


def test_damage_in_the_middle_names_the_file_and_the_byte(tmp_path: Path) -> None:
    place = ENDS[1] + 12
    with pytest.raises(JournalError, match=f"seg is damaged at byte {ENDS[1]}: .*checksum"):
        read(tmp_path / "seg", WHOLE[:place] + b"X" + WHOLE[place + 1 :])


@pytest.mark.parametrize("length", [MAX_RECORD_BYTES + 1, 2**31, 2**32 - 1, 0])
def test_a_length_that_no_record_has_is_damage_even_where_its_checksum_is_right(tmp_path: Path, length: int) -> None:
    with pytest.raises(JournalError, match="it has 1 to"):
        read(tmp_path / "a", MAGIC + head(length, 0))


def test_a_length_beyond_the_end_is_a_torn_record_and_takes_no_memory(tmp_path: Path) -> None:
    payloads, segment = read(tmp_path / "a", WHOLE + head(MAX_RECORD_BYTES, 1) + b"some")
    assert (payloads, segment.torn, segment.offset) == (PAYLOADS, True, len(WHOLE))


@pytest.mark.parametrize("num_zeros", [1, 12, 13, 4096, 600_000])
def test_zeros_at_the_end_as_after_a_loss_of_power_are_a_torn_end(tmp_path: Path, num_zeros: int) -> None:
    payloads, segment = read(tmp_path / "a", WHOLE + bytes(num_zeros))
    assert (payloads, segment.torn) == (PAYLOADS, True)


def test_a_last_record_whose_end_is_zeros_is_torn_with_zeros_behind_it_too(tmp_path: Path) -> None:
    record = pack_record(b"x" * 100)
    payloads, segment = read(tmp_path / "a", WHOLE + record[:50] + bytes(len(record) - 50 + 300))
    assert (payloads, segment.torn) == (PAYLOADS, True)


def test_zeros_before_something_else_are_damage(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=f"at byte {len(WHOLE)}"):
        read(tmp_path / "a", WHOLE + bytes(600_000) + b"x")


@pytest.mark.parametrize("data", [b"", MAGIC[:3], bytes(8), bytes(3)])
def test_a_file_without_its_first_bytes_yet_is_torn_and_holds_nothing(tmp_path: Path, data: bytes) -> None:
    payloads, segment = read(tmp_path / "a", data)
    assert (payloads, segment.torn) == ([], len(data) < 8 or data == bytes(8))


def test_a_file_of_something_else_is_no_segment(tmp_path: Path) -> None:
    for data in (b"PK\x03\x04 and so on", b"x", b"MRJRNL something"):
        with pytest.raises(JournalError, match=r"no segment|format"):
            read(tmp_path / "a", data)


def test_a_file_of_a_later_format_says_so(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="format 2, and this build reads format 1"):
        read(tmp_path / "a", b"MRJRNL\x02\n")


def test_a_path_that_is_missing_or_no_file_is_an_error_and_never_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, what in (("gone", "does not exist"), ("pipe", "not a file"), (".", "directory|not a file")):
        with pytest.raises(JournalError, match=what):
            list(SegmentReader(tmp_path / name))


def test_names_and_numbers_of_segments_belong_together() -> None:
    assert [segment_number(segment_name(number)) for number in (1, 42, 1_234_567)] == [1, 42, 1_234_567]
    assert [segment_number(name) for name in ("1.journal", "lock", "000001.dump", "000001.journal.gz")] == [None] * 4
