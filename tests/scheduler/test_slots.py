# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/slots.py`."""

from __future__ import annotations

import pytest

from metrale_ray.protocol.commands import Slot
from metrale_ray.scheduler.slots import SlotPool


def test_the_lowest_free_slot_is_taken_first() -> None:
    pool = SlotPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    for slot in (2, 0):
        pool.give_back(Slot(slot))
    assert pool.num_free == 2
    assert [pool.take(), pool.take()] == [0, 2]
    with pytest.raises(IndexError):
        pool.take()


def test_only_slots_that_the_ranks_hold_are_freed_and_each_once() -> None:
    pool = SlotPool(3)
    for _ in range(3):
        pool.take()
    pool.hold([Slot(0), Slot(2)])
    for slot in (2, 1):
        pool.give_back(Slot(slot))
    assert pool.frees() == (2,)
    assert pool.frees() == ()
    assert pool.take() == 1
    pool.give_back(Slot(1))
    assert pool.frees() == ()


def test_a_slot_that_is_settled_after_its_sequence_left_is_freed() -> None:
    pool = SlotPool(1)
    pool.give_back(pool.take())
    pool.hold([Slot(0)])
    assert pool.frees() == (0,)
