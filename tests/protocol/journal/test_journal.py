# SPDX-License-Identifier: MIT OR Apache-2.0
"""The journal that keeps nothing, and the one in memory."""

from __future__ import annotations

import dataclasses

import pytest

from metrale_ray.protocol.journal.journal import Journal, MemoryJournal, NoJournal, at_us_of
from metrale_ray.protocol.journal.records import Closed, Commanded, Gap, probes
from tests.protocol.journal.samples import CLOSED, LIFE, SNAPSHOT, STARTED, commanded


def test_no_journal_is_off_and_takes_everything() -> None:
    journal: Journal = NoJournal()
    journal.note(STARTED)
    journal.close("end", None)
    assert (journal.is_on, journal.wants_snapshot()) == (False, False)


def test_memory_keeps_records_in_order_and_notes_the_end_once() -> None:
    journal = MemoryJournal()
    for record in LIFE[:-1]:
        journal.note(record)
    journal.close("end", "why")
    journal.close("again", None)
    journal.note(CLOSED)
    assert not journal.is_on
    assert journal.records == [*LIFE[:-1], Closed(at_us_of(LIFE[-2]), "end", "why")]
    assert journal.kept() == tuple(journal.records)


def test_what_is_noted_for_later_is_made_at_once_in_memory_and_never_where_nothing_is_kept() -> None:
    made: list[int] = []

    def make() -> Commanded:
        made.append(1)
        return commanded(1)

    for journal in (NoJournal(), memory := MemoryJournal()):
        journal.note_later(make, 10)
    assert (memory.records, len(made)) == ([commanded(1)], 1)
    memory.close("end", None)
    memory.note_later(make, 10)
    assert len(made) == 1


def test_memory_closed_before_anything_came_holds_the_end_alone() -> None:
    journal = MemoryJournal()
    journal.close("end", None)
    assert journal.records == [Closed(0, "end", None)]


def test_memory_asks_for_a_snapshot_until_it_gets_one() -> None:
    journal = MemoryJournal()
    journal.is_snapshot_due = True
    journal.note(commanded(1))
    assert journal.wants_snapshot()
    journal.note(SNAPSHOT)
    assert not journal.wants_snapshot()


@pytest.mark.parametrize("num_records", [0, 1, 5, 10, 11, 57, 500])
def test_memory_with_a_bound_keeps_the_last_records_and_counts_those_that_went(num_records: int) -> None:
    journal = MemoryJournal(max_records=5)
    journal.note(STARTED)
    notes = [commanded(seq) for seq in range(1, num_records + 1)]
    for record in notes:
        journal.note(record)
        assert len(journal.records) <= 10
    kept = journal.kept()
    num_let_go = sum(record.num_records for record in kept if isinstance(record, Gap))
    assert kept[0] == STARTED
    assert [record for record in kept if not isinstance(record, Gap)][1:] == notes[num_let_go:]
    assert len(kept) >= min(5, num_records)


def test_memory_whose_start_is_still_among_the_last_tells_it_once() -> None:
    journal = MemoryJournal(max_records=3)
    for record in [*map(commanded, range(1, 5)), STARTED, commanded(5), commanded(6)]:
        journal.note(record)
    assert journal.kept() == (Gap(0, 4), STARTED, commanded(5), commanded(6))


def test_the_probes_are_four_ids_spread_over_the_vocabulary() -> None:
    assert list(probes(151_936)) == [0, 37_984, 75_968, 113_952]
    assert list(probes(10)) == [0, 2, 4, 6]
    assert list(probes(3)) == [0, 1, 2]


def test_started_is_at_the_beginning_of_time() -> None:
    assert (at_us_of(STARTED), at_us_of(dataclasses.replace(SNAPSHOT, at_us=7))) == (0, 7)
