# SPDX-License-Identifier: MIT OR Apache-2.0
"""The watch: it tells one death with its reason, nothing once it was stopped, and never ends without a word."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.serve import watch as module
from metrale_ray.serve.watch import Watch
from tests.llm_rig import SOON_S

Ending = Callable[[], EngineDead | None]


class Played:
    """A watch, what it is told of the ranks (`says`), and the deaths it told."""

    def __init__(self) -> None:
        self.says: queue.Queue[Ending] = queue.Queue()
        self.deaths: queue.Queue[EngineDead] = queue.Queue()
        self.watch = Watch(lambda timeout_s: self.says.get(timeout=SOON_S)(), self.deaths.put, join_timeout_s=0.2)

    def explain(self, seen: EngineDead) -> tuple[str, int | None]:
        told = asyncio.run(self.watch.explain(seen))
        return told.message, told.rank


@pytest.fixture
def played() -> Played:
    played = Played()
    played.watch.start()
    return played


def nothing() -> None:
    return None


def rank_1() -> EngineDead:
    return EngineDead("rank 1: a tooth broke", rank=1)


def fail() -> EngineDead:
    raise ValueError("something new")


def end_thread() -> EngineDead:
    raise SystemExit


def test_a_death_is_told_once_and_explains_what_others_saw(played: Played) -> None:
    played.says.put(nothing)
    played.says.put(rank_1)
    assert played.deaths.get(timeout=SOON_S).message == "rank 1: a tooth broke"
    played.watch.join()
    assert played.watch.death is not None
    assert played.explain(EngineDead("gone", rank=1)) == ("rank 1: a tooth broke", 1)
    assert played.explain(EngineDead("gone")) == ("rank 1: a tooth broke", 1)
    assert played.explain(EngineDead("another one has gone", rank=2)) == ("another one has gone", 2)
    assert played.deaths.empty()


def test_without_a_reason_what_was_seen_is_told(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHY_S", 0.01)
    assert played.explain(EngineDead("gone", rank=1)) == ("gone", 1)
    played.watch.stop()
    played.says.put(nothing)
    played.watch.join()


def test_many_callers_wait_for_one_reason_and_hold_no_thread(played: Played) -> None:
    others: list[str] = []

    async def fail_all() -> list[EngineDead]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        callers = [asyncio.ensure_future(played.watch.explain(EngineDead("gone", rank=1))) for _ in range(32)]
        _, waiting = await asyncio.wait(callers, timeout=0)
        assert len(waiting) == 32
        others.append(await asyncio.to_thread(lambda: "done"))
        played.says.put(rank_1)
        return await asyncio.gather(*callers)

    began_s = time.monotonic()
    told = asyncio.run(fail_all())
    assert {(death.message, death.rank) for death in told} == {("rank 1: a tooth broke", 1)}
    assert len({id(death) for death in told}) == 32  # raising one changes its traceback
    assert others == ["done"]
    assert time.monotonic() - began_s < module.WHY_S


def test_a_stop_wakes_who_waits_and_a_loop_that_was_closed_meanwhile_is_passed_by(played: Played) -> None:
    closed = asyncio.new_event_loop()
    left = closed.create_task(played.watch.explain(EngineDead("left")))
    closed.run_until_complete(asyncio.wait([left], timeout=0))
    closed.close()

    async def stop() -> EngineDead:
        caller = asyncio.ensure_future(played.watch.explain(EngineDead("gone")))
        await asyncio.wait([caller], timeout=0)
        played.watch.stop()
        return await caller

    began_s = time.monotonic()
    assert asyncio.run(stop()).message == "gone"
    assert time.monotonic() - began_s < module.WHY_S
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # that it was left is what is tested
    played.says.put(nothing)
    played.watch.join()


@pytest.mark.parametrize(
    ("ending", "message"),
    [(fail, "the ranks cannot be watched any more: ValueError: something new"), (end_thread, "SystemExit")],
)
def test_what_goes_wrong_in_the_watch_is_logged_and_is_the_engines_death(
    played: Played, caplog: pytest.LogCaptureFixture, ending: Ending, message: str
) -> None:
    with caplog.at_level(logging.ERROR):
        played.says.put(ending)
        death = played.deaths.get(timeout=SOON_S)
    assert message in death.message
    assert "the watch over the ranks failed" in caplog.text


@pytest.mark.parametrize("ending", [nothing, rank_1, fail])
def test_a_watch_that_was_stopped_tells_nothing_more(
    played: Played, caplog: pytest.LogCaptureFixture, ending: Ending
) -> None:
    played.watch.stop()
    played.says.put(ending)
    played.watch.join()
    assert played.deaths.empty()
    assert played.watch.death is None
    assert caplog.text == ""
    assert played.explain(EngineDead("closed")) == ("closed", None)


def test_a_watch_that_does_not_end_is_left_behind_and_told(played: Played, caplog: pytest.LogCaptureFixture) -> None:
    played.watch.stop()
    with caplog.at_level(logging.WARNING):
        played.watch.join()
    assert "the thread llm-watch has not ended within 0.2 s" in caplog.text
    played.says.put(nothing)


def test_a_watch_that_was_never_started_has_ended() -> None:
    played = Played()
    played.watch.stop()
    played.watch.join()
