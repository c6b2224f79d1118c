# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which fronts' keys are good, and when they are forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.protocol.front.allowed_keys import MAX_FRONTS, MAX_KEYS, UNUSED_S, AllowedKeys

DRIVER, OLD, NEW = b"d" * 32, b"o" * 32, b"n" * 32


class Played:
    """Keys, and the time that a test sets."""

    def __init__(self, max_keys: int = 4) -> None:
        self.now_s = 0.0
        self.keys = AllowedKeys(max_keys=max_keys, unused_s=10.0, clock=lambda: self.now_s)

    def good(self, *keys: bytes) -> list[bytes]:
        return [key for key in keys if self.keys.is_allowed(key)]


def test_a_key_is_good_while_it_has_a_session_and_some_time_before_and_after() -> None:
    played = Played()
    assert played.good(OLD) == []
    played.keys.allow(OLD)
    played.now_s = 10
    assert played.good(OLD) == [OLD]
    for _ in range(2):
        played.keys.opened(OLD)
    played.now_s = 1000
    played.keys.ended(OLD)
    played.now_s = 2000
    assert played.good(OLD) == [OLD]  # its other session
    played.keys.ended(OLD)
    played.now_s = 2010
    assert played.good(OLD) == [OLD]
    played.now_s = 2011
    assert played.good(OLD) == []
    played.keys.allow(OLD)
    assert played.good(OLD) == [OLD]


def test_fronts_that_are_started_anew_leave_no_good_key_behind_and_the_drivers_own_stays() -> None:
    played = Played()
    played.keys.allow(DRIVER, is_lasting=True)
    fronts = [bytes([number]) * 32 for number in range(20)]
    for front in fronts:
        played.keys.allow(front)
        played.keys.opened(front)
        played.keys.ended(front)
        played.now_s += 11
    assert played.good(DRIVER, *fronts) == [DRIVER]
    played.keys.allow(DRIVER)  # asked for again like any other
    played.now_s += 11
    played.keys.allow(NEW)
    assert played.good(DRIVER, *fronts, NEW) == [DRIVER, NEW]
    assert len(played.keys) == 2


def test_the_key_that_was_unused_for_longest_makes_room_and_none_with_a_session_does() -> None:
    played = Played(max_keys=4)
    played.keys.allow(DRIVER, is_lasting=True)
    played.keys.allow(OLD)
    played.keys.opened(OLD)
    fronts = [bytes([number]) * 32 for number in range(5)]
    for front in fronts:
        played.now_s += 1
        played.keys.allow(front)
    assert played.good(DRIVER, OLD, *fronts) == [DRIVER, OLD, *fronts[-2:]]
    played.now_s += 1
    played.keys.allow(fronts[-2])  # again: the other one is the oldest now
    played.keys.allow(NEW)
    assert played.good(DRIVER, OLD, *fronts, NEW) == [DRIVER, OLD, fronts[-2], NEW]


def test_a_disallowed_key_is_good_no_longer_whatever_it_was_and_its_sessions_may_end_later() -> None:
    played = Played()
    played.keys.allow(DRIVER, is_lasting=True)
    played.keys.opened(DRIVER)
    played.keys.disallow(DRIVER)
    played.keys.disallow(NEW)
    assert played.good(DRIVER) == []
    played.keys.ended(DRIVER)
    played.keys.allow(DRIVER)
    played.now_s = 11
    assert played.good(DRIVER) == []


def test_a_key_that_was_just_allowed_has_room_beside_all_the_sessions_there_can_be() -> None:
    assert MAX_KEYS > MAX_FRONTS + 1
    assert UNUSED_S == 600


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["allow", "opened", "ended"]), st.integers(0, 6))))
def test_whatever_comes_there_are_no_more_keys_than_allowed_and_one_with_a_session_is_good(
    steps: list[tuple[int, str, int]],
) -> None:
    played, sessions = Played(), dict.fromkeys(range(7), 0)
    for pause_s, step, number in steps:
        played.now_s += pause_s
        key = bytes([number]) * 32
        if step == "allow":
            played.keys.allow(key)
            assert played.good(key) == [key]
        elif step == "opened" and played.good(key) and sum(sessions.values()) < 3:
            played.keys.opened(key)
            sessions[number] += 1
        elif step == "ended" and sessions[number]:
            played.keys.ended(key)
            sessions[number] -= 1
        assert len(played.keys) <= 4
        assert all(played.good(bytes([number]) * 32) for number, count in sessions.items() if count)
