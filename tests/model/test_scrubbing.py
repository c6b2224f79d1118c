# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which part of the weights, and which rows of which slot, a scrub reads next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.model.contract.agreement import MAX_SCRUB_ROWS
from metrale_ray.model.scrubbing import Scrubbing
from metrale_ray.protocol.commands import Scrub, Slot


@given(st.integers(1, 40), st.integers(1, 3))
def test_a_pass_names_every_part_once(num_parts: int, num_passes: int) -> None:
    scrubbing = Scrubbing(num_parts)
    scrubs = [scrubbing.next({}) for _ in range(num_parts * num_passes)]
    assert scrubs == [Scrub(part, num_parts) for part in range(num_parts)] * num_passes
    assert scrubbing.num_passes == num_passes


def test_slots_take_turns_and_each_goes_on_where_it_was_left() -> None:
    scrubbing, lengths = Scrubbing(3), {Slot(4): MAX_SCRUB_ROWS + 1, Slot(0): 5}
    named = [scrubbing.next(lengths) for _ in range(6)]
    assert [(scrub.slot, scrub.start) for scrub in named] == [
        (0, 0),
        (4, 0),
        (0, 0),
        (4, MAX_SCRUB_ROWS),
        (0, 0),
        (4, 0),
    ]


def test_another_sequence_in_the_slot_is_read_from_within_its_length() -> None:
    scrubbing = Scrubbing(1)
    scrubbing.next({Slot(1): 5 * MAX_SCRUB_ROWS})
    assert scrubbing.next({Slot(1): 3}).start == 0
    assert scrubbing.next({}).slot is None


@given(st.integers(1, 5 * MAX_SCRUB_ROWS))
def test_all_of_a_slot_is_read_and_no_row_twice(length: int) -> None:
    scrubbing = Scrubbing(4)
    scrubs = list(scrubbing.all_of(Slot(7), length))
    assert {scrub.slot for scrub in scrubs} == {7}
    rows = [row for scrub in scrubs for row in range(scrub.start, min(length, scrub.start + MAX_SCRUB_ROWS))]
    assert rows == list(range(length))


def test_parts_of_scrubs_that_nobody_took_are_not_passed_over() -> None:
    scrubbing = Scrubbing(3)
    assert next(scrubbing.all_of(Slot(0), 5 * MAX_SCRUB_ROWS)).part == 0
    assert [scrubbing.next({}).part for _ in range(2)] == [1, 2]
    assert scrubbing.num_passes == 1
