# SPDX-License-Identifier: MIT OR Apache-2.0
"""The event loop whose waits are a baton's."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pytest

from metrale_ray.baton import Baton, Deadlock, Killed, Process
from tests.simulation.baton_loop import BatonLoop


def run(baton: Baton, main: Coroutine[Any, Any, Any]) -> Any:
    loop = BatonLoop(baton)
    return baton.run({"loop": lambda: loop.run(main)})["loop"]


def test_sleeping_takes_virtual_time_and_timers_come_in_order() -> None:
    baton, trail = Baton(), list[tuple[str, float]]()

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        trail.append((name, asyncio.get_running_loop().time()))

    async def main() -> str:
        await asyncio.gather(nap("long", 3600.0), nap("short", 0.5), nap("none", 0))
        return "done"

    assert run(baton, main()) == "done"
    assert trail == [("none", 0.0), ("short", 0.5), ("long", 3600.0)]


def test_time_limits_of_asyncio_are_virtual() -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.Event().wait(), 60.0)

    baton = Baton()
    assert isinstance(run(baton, main()), TimeoutError)
    assert baton.now == 60.0


def test_another_task_wakes_the_loop() -> None:
    baton = Baton()
    loop, got = BatonLoop(baton), list[float]()

    async def main() -> None:
        event = asyncio.Event()
        baton.call_in(1.0, lambda: loop.call_soon_threadsafe(event.set))
        await event.wait()
        got.append(loop.time())

    baton.run({"loop": lambda: loop.run(main())})
    assert got == [1.0]


def test_work_in_a_task_of_its_own_gives_its_result_or_its_error() -> None:
    baton = Baton()
    loop = BatonLoop(baton)

    def work() -> float:
        baton.wait_until(lambda: False, 2.0)
        return baton.now

    def fail() -> None:
        raise LookupError("not there")

    async def main() -> tuple[float, str]:
        with pytest.raises(LookupError, match="not there"):
            await loop.in_task("fail", fail, None)
        return await loop.in_task("work", work, None), "then"

    assert baton.run({"loop": lambda: loop.run(main())})["loop"] == (2.0, "then")


def test_what_is_left_when_the_main_task_has_ended_is_cancelled() -> None:
    baton, said = Baton(), list[str]()

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            said.append("cleaned up")

    async def main() -> None:
        keep.append(asyncio.ensure_future(linger()))
        await asyncio.sleep(0)

    keep: list[Any] = []
    assert run(baton, main()) is None
    assert said == ["cleaned up"]


def test_a_killed_loop_lets_its_coroutines_go_at_once_and_silently(caplog: pytest.LogCaptureFixture) -> None:
    baton, process, said = Baton(), Process("p"), list[str]()
    loop = BatonLoop(baton)

    async def stubborn(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            said.append(f"{number} tries to clean up")
            await asyncio.sleep(1.0)
            said.append("cleaned up")

    async def main() -> None:
        await asyncio.gather(*(stubborn(number) for number in range(3)))

    def conductor() -> Any:
        task = baton.start("loop", lambda: loop.run(main()), process)
        baton.wait_until(lambda: False, 1.0)
        process.kill()
        baton.wait_until(lambda: task.has_ended)
        return task.result

    assert isinstance(baton.run({"conductor": conductor})["conductor"], Killed)
    gc.collect()
    assert said == [f"{number} tries to clean up" for number in range(3)]
    assert loop.is_closed()
    assert caplog.records == []


def test_a_loop_that_waits_for_nothing_is_part_of_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    error = run(Baton(), main())
    assert isinstance(error, Deadlock)
    assert "loop for an event of its loop" in str(error)


def test_what_goes_wrong_in_a_callback_is_kept() -> None:
    baton = Baton()
    loop = BatonLoop(baton)

    def fail() -> None:
        raise LookupError("in a callback")

    async def main() -> None:
        loop.call_soon(fail)
        await asyncio.sleep(0.1)

    baton.run({"loop": lambda: loop.run(main())})
    assert len(loop.errors) == 1
    assert "LookupError('in a callback')" in loop.errors[0]


def test_a_callback_that_is_killed_is_no_error_and_the_loop_ends() -> None:
    baton, process = Baton(), Process("p")
    loop = BatonLoop(baton)

    def call_back() -> None:
        process.kill()
        baton.hand_over()

    async def main() -> None:
        loop.call_soon(call_back)
        await asyncio.Event().wait()

    def conductor() -> Any:
        task = baton.start("loop", lambda: loop.run(main()), process)
        baton.wait_until(lambda: task.has_ended)
        return task.result

    assert isinstance(baton.run({"conductor": conductor})["conductor"], Killed)
    assert loop.errors == []
