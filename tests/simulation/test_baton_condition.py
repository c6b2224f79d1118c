# SPDX-License-Identifier: MIT OR Apache-2.0
"""The condition of a baton's tasks: a lock, and waits that end when somebody notifies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.baton import Baton, Deadlock, Killed, Process
from tests.simulation.baton_condition import BatonCondition


@given(seed=st.integers(0, 2**32))
def test_one_task_at_a_time_is_inside_even_where_it_waits_for_something_else(seed: int) -> None:
    baton = Baton(seed)
    condition, inside, most = BatonCondition(baton), [0], [0]

    def task() -> None:
        for _ in range(5):
            with condition, condition:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                baton.hand_over()
                inside[0] -= 1

    assert baton.run(dict.fromkeys("abc", task)) == dict.fromkeys("abc")
    assert most == [1]


def waiter(baton: Baton, condition: BatonCondition, box: list[int], timeout_s: float | None) -> Callable[[], object]:
    def wait() -> object:
        with condition:
            return condition.wait_for(lambda: list(box), timeout_s)

    return wait


def test_a_wait_ends_when_it_is_notified_and_the_predicate_holds() -> None:
    baton, box = Baton(), list[int]()
    condition = BatonCondition(baton)

    def put() -> None:
        for value in (0, 1):
            baton.wait_until(lambda: False, 1.0)
            with condition:
                box.extend([value] * value)  # nothing the first time
                condition.notify_all()

    results = baton.run({"wait": waiter(baton, condition, box, None), "put": put})
    assert results == {"wait": [1], "put": None}
    assert baton.now == 2.0


def test_a_notification_that_is_forgotten_is_a_deadlock_though_the_predicate_holds() -> None:
    baton, box = Baton(), list[int]()
    condition = BatonCondition(baton)

    def forget() -> None:
        baton.wait_until(lambda: False, 1.0)
        with condition:
            box.append(1)

    results = baton.run({"wait": waiter(baton, condition, box, None), "forget": forget})
    assert isinstance(results["wait"], Deadlock)


def test_a_wait_has_a_limit_and_gives_the_predicate_s_last_value() -> None:
    baton = Baton()
    assert baton.run({"wait": waiter(baton, BatonCondition(baton), [], 2.5)}) == {"wait": []}
    assert baton.now == 2.5


def test_what_holds_is_not_waited_for() -> None:
    baton = Baton()
    assert baton.run({"wait": waiter(baton, BatonCondition(baton), [7], 0.0)}) == {"wait": [7]}
    assert baton.now == 0.0


def test_waiting_and_notifying_without_the_lock_is_refused() -> None:
    baton = Baton()
    condition = BatonCondition(baton)
    results = baton.run({"a": condition.notify_all, "b": lambda: condition.wait_for(lambda: True)})
    assert ["has not entered" in str(error) for error in results.values()] == [True, True]


def test_a_killed_task_leaves_the_lock() -> None:
    baton, process = Baton(), Process("p")
    condition = BatonCondition(baton)

    def conductor() -> object:
        task = baton.start("wait", waiter(baton, condition, [], None), process)
        baton.wait_until(lambda: False, 1.0)
        process.kill()
        baton.wait_until(lambda: task.has_ended)
        with condition:
            return task.result

    with pytest.raises(Killed):
        raise baton.run({"conductor": conductor})["conductor"]
