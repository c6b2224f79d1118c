# SPDX-License-Identifier: MIT OR Apache-2.0
"""The baton: one task at a time, in an order that the seed gives, in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.baton import Baton, Deadlock, Killed, Overrun, Process, Task


def takes_turns(baton: Baton, trail: list[str], name: str, turns: int) -> Callable[[], None]:
    """A task that writes its name down once per turn."""

    def task() -> None:
        for _ in range(turns):
            trail.append(name)
            baton.wait_until(lambda: True)

    return task


def trail_of(seed: int, turns: int = 8, names: str = "abcd") -> str:
    baton, trail = Baton(seed), list[str]()
    baton.run({name: takes_turns(baton, trail, name, turns) for name in names})
    return "".join(trail)


def test_results_are_given_by_name_in_the_order_of_the_tasks() -> None:
    results = Baton(3).run({"b": lambda: 1, "a": lambda: None, "c": lambda: "x"})
    assert list(results.items()) == [("b", 1), ("a", None), ("c", "x")]


def test_no_tasks_give_no_results() -> None:
    assert Baton().run({}) == {}


def test_exactly_one_task_runs_at_a_time() -> None:
    baton, inside, most = Baton(1), [0], [0]

    def task() -> None:
        for _ in range(50):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            assert sum(range(500)) == 124_750  # some work, so that two tasks would meet
            inside[0] -= 1
            baton.wait_until(lambda: True)

    assert set(baton.run({str(n): task for n in range(6)}).values()) == {None}
    assert most == [1]


def test_a_seed_gives_the_same_order_each_time() -> None:
    assert len({trail_of(seed=7) for _ in range(30)}) == 1


def test_seeds_give_different_orders_and_every_task_all_its_turns() -> None:
    trails = {trail_of(seed) for seed in range(20)}
    assert len(trails) > 15
    assert {"".join(sorted(trail)) for trail in trails} == {"a" * 8 + "b" * 8 + "c" * 8 + "d" * 8}


def test_every_order_of_two_tasks_is_reached_by_some_seed() -> None:
    orders = {trail_of(seed, turns=2, names="ab") for seed in range(200)}
    assert orders == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}


def test_a_wait_ends_when_another_task_makes_it_hold() -> None:
    baton, box = Baton(), list[int]()

    def taker() -> int:
        assert baton.wait_until(lambda: bool(box))
        return box.pop()

    assert baton.run({"taker": taker, "giver": lambda: box.append(5)}) == {"taker": 5, "giver": None}
    assert baton.now == 0.0


def test_time_moves_to_the_nearest_deadline_when_all_wait() -> None:
    baton, ends = Baton(), list[tuple[str, float, bool]]()

    def waits(name: str, timeout_s: float) -> None:
        came = baton.wait_until(lambda: False, timeout_s)
        ends.append((name, baton.now, came))

    baton.run(
        {"slow": lambda: waits("slow", 30.0), "fast": lambda: waits("fast", 0.5), "mid": lambda: waits("mid", 2.0)}
    )
    assert ends == [("fast", 0.5, False), ("mid", 2.0, False), ("slow", 30.0, False)]


def test_time_stands_still_while_a_task_can_run() -> None:
    baton = Baton()

    def busy() -> float:
        for _ in range(20):
            baton.wait_until(lambda: True, 1.0)
        return baton.now

    results = baton.run({"busy": busy, "waits": lambda: baton.wait_until(lambda: False, 1.0)})
    assert results == {"busy": 0.0, "waits": False}
    assert baton.now == 1.0


def test_a_task_whose_deadline_has_passed_is_not_starved_by_one_that_can_run() -> None:
    baton, over = Baton(), list[bool]()

    def busy() -> int:
        baton.wait_until(lambda: False, 1.0)
        turns = 0
        while not over and turns < 10_000:
            turns += 1
            baton.wait_until(lambda: True)
        return turns

    def waits() -> None:
        baton.wait_until(lambda: False, 1.0)
        over.append(True)

    assert baton.run({"busy": busy, "waits": waits})["busy"] < 100


def test_a_timeout_of_nothing_gives_the_others_a_chance_and_returns() -> None:
    baton = Baton()
    assert baton.run({"a": lambda: baton.wait_until(lambda: False, 0.0)}) == {"a": False}
    assert baton.now == 0.0


def test_what_holds_at_the_deadline_counts_as_held() -> None:
    baton = Baton()
    assert baton.run({"a": lambda: baton.wait_until(lambda: baton.now >= 2.0, 2.0)}) == {"a": True}


def test_a_deadlock_is_told_to_every_task_with_what_each_waits_for() -> None:
    baton = Baton()
    tasks = {
        "head": lambda: baton.wait_until(lambda: False, what="a reply"),
        "worker": lambda: baton.wait_until(lambda: False, what="a command"),
        "idle": lambda: baton.wait_until(lambda: False),
    }
    results = baton.run(tasks)
    assert [type(error) for error in results.values()] == [Deadlock] * 3
    expected = "everybody waits: head for a reply; worker for a command; idle for something"
    assert {str(error) for error in results.values()} == {expected}


def test_a_task_that_waits_again_after_a_deadlock_gets_it_again() -> None:
    baton = Baton()

    def stubborn() -> str:
        with pytest.raises(Deadlock):
            baton.wait_until(lambda: False)
        with pytest.raises(Deadlock):
            baton.wait_until(lambda: True)
        return "left"

    assert baton.run({"a": stubborn, "b": stubborn}) == {"a": "left", "b": "left"}


def test_a_task_that_ends_may_leave_the_others_in_a_deadlock() -> None:
    baton = Baton()
    results = baton.run({"gone": lambda: 1, "left": lambda: baton.wait_until(lambda: False, what="gone")})
    assert results["gone"] == 1
    assert isinstance(results["left"], Deadlock)


def test_a_deadline_anywhere_is_no_deadlock() -> None:
    baton, box = Baton(), list[int]()

    def late() -> None:
        baton.wait_until(lambda: False, 9.0)
        box.append(1)

    assert baton.run({"waits": lambda: baton.wait_until(lambda: bool(box)), "late": late})["waits"] is True


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_ends_its_task_alone_and_is_returned(error: BaseException) -> None:
    baton = Baton()

    def fails() -> None:
        baton.wait_until(lambda: True)
        raise error

    results = baton.run({"fails": fails, "goes on": lambda: baton.wait_until(lambda: False, 1.0)})
    assert results == {"fails": error, "goes on": False}


def test_an_error_in_ready_goes_to_the_task_that_waits_on_it() -> None:
    baton = Baton()

    def ready() -> bool:
        raise LookupError("broken")

    results = baton.run({"a": lambda: baton.wait_until(ready), "b": lambda: baton.wait_until(lambda: True)})
    assert isinstance(results["a"], LookupError)
    assert results["b"] is True


def test_a_baton_can_run_again_after_a_deadlock_and_time_goes_on() -> None:
    baton = Baton()
    baton.run({"a": lambda: baton.wait_until(lambda: False, 4.0)})
    assert isinstance(baton.run({"a": lambda: baton.wait_until(lambda: False)})["a"], Deadlock)
    assert baton.run({"a": lambda: baton.wait_until(lambda: False, 1.0)}) == {"a": False}
    assert baton.now == 5.0


def test_waiting_outside_of_a_task_is_refused() -> None:
    with pytest.raises(RuntimeError, match="outside of this baton's tasks"):
        Baton().wait_until(lambda: True)


def test_waiting_on_the_baton_of_others_is_refused() -> None:
    other = Baton()
    results = Baton().run({"a": lambda: other.wait_until(lambda: True)})
    assert "outside of this baton's tasks" in str(results["a"])


def test_running_tasks_inside_a_task_of_the_same_baton_is_refused() -> None:
    baton = Baton()
    results = baton.run({"a": lambda: baton.run({"b": lambda: 1})})
    assert "running tasks already" in str(results["a"])


def test_tasks_inside_a_task_of_another_baton_run() -> None:
    assert Baton().run({"a": lambda: Baton().run({"b": lambda: 1})}) == {"a": {"b": 1}}


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    trail_of(0)
    assert threading.active_count() == before


@given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_messages_between_tasks_arrive_once_and_in_order(seed: int, sizes: list[int]) -> None:
    baton = Baton(seed)
    boxes: list[list[int]] = [[] for _ in sizes]

    def send(n: int) -> None:
        for number in range(sizes[n]):
            boxes[n].append(number)
            baton.wait_until(lambda: True)

    def receive(n: int) -> list[int]:
        got = list[int]()
        while len(got) < sizes[n]:
            baton.wait_until(lambda: bool(boxes[n]), 100.0)
            got.append(boxes[n].pop(0))
        return got

    tasks: dict[str, Callable[[], Any]] = {}
    for n in range(len(sizes)):
        tasks[f"send {n}"] = lambda n=n: send(n)  # type: ignore[misc]
        tasks[f"receive {n}"] = lambda n=n: receive(n)  # type: ignore[misc]
    results = baton.run(tasks)
    assert [results[f"receive {n}"] for n in range(len(sizes))] == [list(range(size)) for size in sizes]


def marks(baton: Baton, trail: list[float]) -> Callable[[], None]:
    """A task that writes down the time once per virtual second, for ever."""

    def task() -> None:
        while True:
            trail.append(baton.now)
            baton.wait_until(lambda: False, 1.0)

    return task


def test_a_task_may_start_others_whose_ends_are_waited_for() -> None:
    baton, started = Baton(2), list[Task]()

    def child() -> str:
        baton.wait_until(lambda: False, 5.0)
        return "done"

    def parent() -> None:
        started.append(baton.start("child", child))

    assert baton.run({"parent": parent}) == {"parent": None}
    assert (started[0].has_ended, started[0].result, baton.now) == (True, "done", 5.0)


def test_starting_a_task_when_nothing_runs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="runs no tasks"):
        Baton().start("late", lambda: None)


def test_timers_move_time_and_are_called_in_order() -> None:
    baton, called = Baton(), list[tuple[str, float]]()

    def task() -> float:
        for name, delay_s in (("b", 2.0), ("a", 1.0), ("c", 2.0), ("at once", -1.0)):
            baton.call_in(delay_s, lambda name=name: called.append((name, baton.now)))  # type: ignore[misc]
        baton.wait_until(lambda: len(called) == 4)
        return baton.now

    assert baton.run({"task": task}) == {"task": 2.0}
    assert called == [("at once", 0.0), ("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_a_stopped_process_takes_no_turn_until_it_is_resumed_and_is_late_then() -> None:
    baton, process, trail = Baton(), Process("stopped"), list[float]()

    def conductor() -> None:
        baton.start("marks", marks(baton, trail), process)
        for _ in range(3):
            baton.wait_until(lambda: False, 2.25)
            (process.resume if process.is_stopped else process.stop)()
        baton.wait_until(lambda: False, 0.5)
        process.kill()

    baton.run({"conductor": conductor})
    assert trail == [0.0, 1.0, 2.0, 4.5, 5.5, 6.5]


def test_a_dead_process_gets_killed_at_every_wait() -> None:
    baton, process, said = Baton(), Process("p"), list[str]()

    def stubborn() -> None:
        try:
            baton.wait_until(lambda: False)
        finally:
            with pytest.raises(Killed, match="stubborn is killed"):
                baton.wait_until(lambda: True)
            said.append("tried again")

    def conductor() -> Task:
        task = baton.start("stubborn", stubborn, process)
        baton.wait_until(lambda: False, 1.0)
        process.kill()
        return task

    task = baton.run({"conductor": conductor})["conductor"]
    assert said == ["tried again"]
    assert isinstance(task.result, Killed)


def test_a_task_whose_process_died_before_its_first_turn_never_begins() -> None:
    baton, process, began = Baton(), Process("p"), list[int]()

    def conductor() -> Task:
        task = baton.start("late", lambda: began.append(1), process)
        process.kill()
        return task

    assert isinstance(baton.run({"conductor": conductor})["conductor"].result, Killed)
    assert began == []


def test_a_stopped_process_may_be_killed_and_a_dead_one_is_not_stopped() -> None:
    process, changes = Process("p"), list[tuple[bool, bool]]()
    process.at_change.append(lambda: changes.append((process.is_stopped, process.is_dead)))
    for change in (process.stop, process.stop, process.kill, process.kill, process.stop, process.resume):
        change()
    assert changes == [(True, False), (False, True)]


def test_everybody_stopped_is_a_deadlock_that_says_so() -> None:
    baton, process = Baton(), Process("p")

    def conductor() -> None:
        baton.start("stopped", lambda: baton.wait_until(lambda: True), process)
        process.stop()
        baton.wait_until(lambda: False, what="news")

    error = baton.run({"conductor": conductor})["conductor"]
    assert isinstance(error, Deadlock)
    assert str(error) == "everybody waits: conductor for news; stopped is stopped"


def test_too_many_turns_and_too_much_time_end_every_task() -> None:
    busy = Baton(max_turns=100)

    def spin() -> None:
        while True:
            busy.hand_over()

    results = busy.run({"a": spin, "b": spin})
    assert {type(error) for error in results.values()} == {Overrun}
    assert busy.turns < 110
    slow = Baton(max_s=10.0)
    error = slow.run({"marks": marks(slow, [])})["marks"]
    assert isinstance(error, Overrun)
    assert slow.now == 10.0


def test_a_process_may_be_killed_at_a_turn_that_is_counted() -> None:
    def killed_at(turn: int) -> int:
        baton, process, steps = Baton(5), Process("p"), list[int]()
        baton.at_turn = lambda: process.kill() if baton.turns == turn else None

        def spin() -> None:
            while len(steps) < 50:
                steps.append(1)
                baton.hand_over()

        baton.run({"conductor": lambda: baton.start("spin", spin, process)})
        return len(steps)

    counts = [killed_at(turn) for turn in range(1, 40)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 37)


def test_what_a_hook_raises_ends_everybody_and_reaches_the_caller() -> None:
    baton, left = Baton(), list[str]()

    def hook() -> None:
        if baton.turns == 5:
            raise LookupError("a broken rule")

    def task() -> None:
        try:
            while True:
                baton.hand_over()
        except RuntimeError as error:
            left.append(str(error))

    baton.at_turn = hook
    with pytest.raises(LookupError, match="a broken rule"):
        baton.run({"a": task, "b": task})
    assert left == ["a hook or a timer failed: LookupError: a broken rule"] * 2


def test_the_history_of_two_runs_is_the_same_under_one_seed_alone() -> None:
    def history(seed: int) -> tuple[int, int]:
        baton = Baton(seed)
        baton.run({name: takes_turns(baton, [], name, 8) for name in "abc"})
        return baton.history, baton.turns

    assert history(1) == history(1)
    assert len({history(seed)[0] for seed in range(20)}) == 20
