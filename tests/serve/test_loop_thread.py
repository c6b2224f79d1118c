# SPDX-License-Identifier: MIT OR Apache-2.0
"""Callers and readers of a loop in another thread: each is answered, whoever leaves, whenever it is closed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.serve.loop_thread import LoopThread
from tests.llm_rig import SOON_S, Call

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop", "it was closed", end_timeout_s=0.2)
    thread.start()
    yield thread
    thread.close()


class Numbers:
    """A generator's numbers, and what came of it. `clean_up`: what its end waits for."""

    def __init__(self, clean_up: Any = None) -> None:
        self.ended = threading.Event()
        self._clean_up = clean_up

    async def items(self, last: int = 1_000_000) -> AsyncGenerator[int, None]:
        try:
            for number in range(last):
                yield number
        finally:
            if self._clean_up is not None:
                await self._clean_up()
            self.ended.set()


async def forever(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


async def five() -> int:
    return 5


async def refuse() -> None:
    raise ValueError("no")


def test_what_a_coroutine_gives_or_raises_reaches_its_caller(loop: LoopThread) -> None:
    assert loop.wait(five()) == 5
    with pytest.raises(ValueError, match="no"):
        loop.wait(refuse())


def test_a_reader_gets_all_items_and_one_that_leaves_early_ends_them(loop: LoopThread) -> None:
    whole, left = Numbers(), Numbers()
    assert list(loop.read(whole.items(3))) == [0, 1, 2]
    assert whole.ended.is_set()
    reader = loop.read(left.items())
    assert [next(reader), next(reader)] == [0, 1]
    reader.close()  # type: ignore[attr-defined]
    assert left.ended.wait(SOON_S)


def test_leaving_a_reader_waits_for_nothing(loop: LoopThread) -> None:
    go_on, held = threading.Event(), threading.Event()

    async def hold() -> None:
        held.set()
        go_on.wait(SOON_S)  # the loop's thread itself, as whatever holds it up

    numbers = Numbers()
    reader = loop.read(numbers.items())
    next(reader)
    holder = Call(lambda: loop.wait(hold()))
    assert held.wait(SOON_S)
    reader.close()  # type: ignore[attr-defined]
    assert not numbers.ended.is_set()
    go_on.set()
    assert holder.ended()
    assert numbers.ended.wait(SOON_S)


def test_a_clean_up_that_fails_is_logged(loop: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    reader = loop.read(Numbers(clean_up=refuse).items())
    next(reader)
    with caplog.at_level(logging.ERROR):
        reader.close()  # type: ignore[attr-defined]
        loop.wait(five())  # behind it
        loop.close()
    assert "could not be cleaned up" in caplog.text


def test_closing_answers_who_waits_and_ends_what_is_open(loop: LoopThread) -> None:
    begun, numbers = threading.Event(), Numbers()
    reader = loop.read(numbers.items())
    next(reader)
    call = Call(lambda: loop.wait(forever(begun)))
    assert begun.wait(SOON_S)
    loop.close()
    loop.close()
    assert call.ended()
    assert isinstance(call.error, EngineDead)
    assert call.error.message == "it was closed"
    assert numbers.ended.is_set()
    with pytest.raises(EngineDead, match="it was closed"):
        next(reader)
    with pytest.raises(EngineDead, match="it was closed"):
        loop.wait(five())


def test_a_task_that_was_cancelled_by_another_is_no_end_of_the_loop(loop: LoopThread) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    call = Call(lambda: loop.wait(cancelled()))
    assert call.ended()
    assert not isinstance(call.error, EngineDead)
    assert loop.wait(five()) == 5


def test_a_clean_up_that_does_not_end_is_left_behind_and_told(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()
    numbers = Numbers(clean_up=release.wait)
    reader = loop.read(numbers.items())
    next(reader)
    with caplog.at_level(logging.WARNING):
        loop.close()
    assert "what ran in test-loop has not ended within 0.2 s" in caplog.text
    assert not numbers.ended.is_set()
    assert "test-loop" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_whose_thread_is_stuck_is_left_behind_and_its_callers_are_answered(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, stuck = threading.Event(), threading.Event()

    async def hold() -> None:
        stuck.set()
        go_on.wait(SOON_S * 2)

    call = Call(lambda: loop.wait(hold()))
    assert stuck.wait(SOON_S)
    with caplog.at_level(logging.WARNING):
        loop.close()
    assert "the thread test-loop does not stop, and is left behind" in caplog.text
    assert call.ended()
    assert isinstance(call.error, EngineDead)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "test-loop"]
    go_on.set()
    thread.join(SOON_S)  # it ends by itself once it can
    assert not thread.is_alive()


def test_a_loop_that_was_never_started_can_be_closed() -> None:
    thread = LoopThread("test-loop", "it was closed")
    thread.close()
    with pytest.raises(EngineDead, match="it was closed"):
        thread.wait(five())
