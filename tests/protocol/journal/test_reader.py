# SPDX-License-Identifier: MIT OR Apache-2.0
"""Journals as they are found: whole, without their oldest segments, with holes, torn, damaged, several, none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgpack
import pytest

from metrale_ray.errors import JournalError, UserError
from metrale_ray.protocol.journal.reader import open_journal
from metrale_ray.protocol.journal.record_codec import encode_record
from metrale_ray.protocol.journal.records import Gap, ReadRecord, Record, Unknown
from metrale_ray.protocol.journal.segments import MAGIC, pack_record, segment_name
from tests.protocol.journal.samples import CLOSED, LIFE, SNAPSHOT, STARTED, commanded

FIRST: list[Record] = [STARTED, commanded(1), commanded(2)]
SECOND: list[Record] = [SNAPSHOT, commanded(3)]
THIRD: list[Record] = [SNAPSHOT, commanded(4), CLOSED]


def segment_of(records: Sequence[Record]) -> bytes:
    """A segment's bytes."""
    return MAGIC + b"".join(pack_record(encode_record(record)) for record in records)


def life(folder: Path, segments: dict[int, bytes]) -> Path:
    """A life's folder with these segments."""
    folder.mkdir(parents=True)
    for number, data in segments.items():
        (folder / segment_name(number)).write_bytes(data)
    return folder


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return life(tmp_path / "j" / "20260801T000000Z-1", dict(enumerate(map(segment_of, (FIRST, SECOND, THIRD)), 1)))


def test_a_journal_is_found_by_its_segment_by_its_life_and_by_the_folder_that_holds_one_life(three: Path) -> None:
    assert list(open_journal(three.parent)) == list(open_journal(str(three))) == [*FIRST, *SECOND, *THIRD]
    assert list(open_journal(three / segment_name(2))) == SECOND


def test_a_journal_can_be_read_again(three: Path) -> None:
    journal = open_journal(three)
    assert list(journal) == list(journal)
    assert (journal.torn, journal.missing, journal.first_seq) == (False, (), 1)


def test_a_journal_without_its_oldest_segments_begins_with_a_snapshot(three: Path) -> None:
    (three / segment_name(1)).unlink()
    journal = open_journal(three)
    assert list(journal) == [*SECOND, *THIRD]
    assert (journal.missing, journal.first_seq) == ((), SNAPSHOT.seq + 1)


def test_segments_that_are_missing_in_between_are_told_and_give_a_gap(three: Path) -> None:
    (three / segment_name(2)).unlink()
    journal = open_journal(three)
    assert journal.missing == (range(2, 3),)
    assert list(journal) == [*FIRST, Gap(commanded(2).at_us, 0), *THIRD]


def test_a_hole_of_very_many_segments_takes_no_memory(three: Path) -> None:
    (three / "999999999999.journal").write_bytes(segment_of(THIRD))
    journal = open_journal(three)
    assert journal.missing == (range(4, 999_999_999_999),)
    assert list(journal)[-1] == CLOSED


def test_a_journal_whose_end_is_cut_gives_what_is_whole_and_says_that_it_is_torn(three: Path) -> None:
    last, whole = three / segment_name(3), segment_of(THIRD)
    ends = {len(segment_of(THIRD[:count])) for count in range(len(THIRD) + 1)}
    for length in sorted({*range(0, len(whole), 17), *ends} - {len(whole)}):  # every byte: test_segments
        last.write_bytes(whole[:length])
        journal = open_journal(three)
        records = list(journal)
        assert records == [*FIRST, *SECOND, *THIRD][: len(records)]
        assert len(records) >= len(FIRST) + len(SECOND)
        assert journal.torn == (length not in ends)


def test_a_torn_segment_with_another_behind_it_is_damage(three: Path) -> None:
    broken = three / segment_name(2)
    broken.write_bytes(segment_of(SECOND)[:-1])
    with pytest.raises(JournalError, match=f"{segment_name(2)} is damaged .*though another segment follows"):
        list(open_journal(three))
    broken.write_bytes(b"")
    with pytest.raises(JournalError, match="another segment follows"):
        list(open_journal(three))


def test_a_payload_that_is_no_record_is_damage_at_its_byte(three: Path) -> None:
    data = segment_of(FIRST)
    (three / segment_name(1)).write_bytes(data + pack_record(b"\x81\x01\x02"))
    journal = open_journal(three)
    with pytest.raises(JournalError, match=f"{segment_name(1)} is damaged at byte {len(data)}"):
        list(journal)


def test_records_of_another_build_are_read_past(three: Path) -> None:
    later = pack_record(msgpack.packb({"kind": "moved_expert", "expert": 4}))
    (three / segment_name(1)).write_bytes(segment_of(FIRST) + later)
    assert list(open_journal(three)) == [*FIRST, Unknown("moved_expert"), *SECOND, *THIRD]


def test_a_journal_damaged_anywhere_gives_what_came_before_or_an_error_that_names_the_file(
    three: Path, scale: int
) -> None:
    draw, whole = Random(5), segment_of(SECOND)
    for _ in range(100 * scale):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        (three / segment_name(2)).write_bytes(data)
        found: list[ReadRecord] = []
        try:
            found.extend(open_journal(three))
        except JournalError as error:
            names_the_file = segment_name(2) in error.message
            found_whole = False
        else:
            names_the_file, found_whole = True, True
        assert names_the_file
        assert found == [*FIRST, *SECOND, *THIRD][: len(found)]
        assert not found_whole or bytes(data) == whole


def test_several_lives_are_listed_with_their_times(three: Path) -> None:
    other = life(three.parent / "20260802T000000Z-9", {1: segment_of(FIRST)})
    os.utime(other / segment_name(1), (1_785_672_000, 1_785_672_000))
    with pytest.raises(JournalError, match="holds 2 journals") as caught:
        open_journal(three.parent)
    assert str(three) in str(caught.value)
    assert f"{other}  0.0 MiB, written last at 20260802T120000Z" in str(caught.value)


def test_of_very_many_lives_the_newest_are_listed(tmp_path: Path) -> None:
    for second in range(30):
        life(tmp_path / f"20260801T0000{second:02d}Z-1", {1: segment_of(FIRST)})
    with pytest.raises(JournalError, match="10 older ones") as caught:
        open_journal(tmp_path)
    assert "20260801T000029Z" in str(caught.value)
    assert "20260801T000009Z" not in str(caught.value)


def test_lives_without_segments_and_other_files_do_not_count(three: Path) -> None:
    (three.parent / "20260803T000000Z-1").mkdir()
    (three.parent / "20260803T000000Z-desync.dump").write_bytes(segment_of(LIFE))
    (three / "lock").touch()
    assert list(open_journal(three.parent)) == [*FIRST, *SECOND, *THIRD]


def test_where_there_is_no_journal_the_error_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal at"):
        open_journal(tmp_path / "gone")
    with pytest.raises(JournalError, match=r"holds no journal: neither segments such as 000001\.journal"):
        open_journal(tmp_path)
    assert issubclass(JournalError, UserError)


def test_a_segment_that_goes_while_it_is_read_says_why_it_may_have_gone(three: Path) -> None:
    records = iter(open_journal(three))
    next(records)
    (three / segment_name(2)).unlink()
    with pytest.raises(JournalError, match=r"does not exist; where an engine is writing"):
        list(records)


def test_the_first_command_of_a_journal_without_commands_is_unknown(tmp_path: Path) -> None:
    assert open_journal(life(tmp_path / "a", {1: segment_of([STARTED, CLOSED])})).first_seq is None
    assert open_journal(life(tmp_path / "b", {1: b""})).first_seq is None


def test_how_far_the_reading_is_grows_to_the_size_of_all_segments(three: Path) -> None:
    journal = open_journal(three)
    places = [journal.num_bytes_read for _ in journal]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    assert (
        0 < places[0] < places[-1] < journal.num_bytes == sum(path.stat().st_size for path in three.glob("*.journal"))
    )
    assert [journal.num_bytes_read for _ in journal] == places
