# SPDX-License-Identifier: MIT OR Apache-2.0
"""Grammars are compiled on their way into the engine: who passes whom, what is refused, and what ends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.compiling import Compiling
from metrale_ray.errors import RequestError
from metrale_ray.grammar.constraint import Constraint, Vocabulary
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.inbox import Arrived, Ending, Inbox
from metrale_ray.protocol.front import Abort, Finish, FrontId, Submit
from metrale_ray.sampling.token_params import TokenParams
from tests.fixtures.tokenizer import write_tokenizer

FRONT = FrontId(1)
GOOD = 'start: "a" | "b"'
OTHER = 'start: "c"'
BAD = "start: ("


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Slow(Grammars):
    """Compiles each grammar when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 320, [0])
        self.begun: list[str] = []
        self.allowed = threading.Semaphore(0)

    def compile(self, text: str) -> Constraint:
        self.begun.append(text)
        assert self.allowed.acquire(timeout=30)
        return super().compile(text)


class Rig:
    """An inbox, what compiles for it, and what was refused."""

    def __init__(self, grammars: Grammars, **limits: Any) -> None:
        self.inbox = Inbox(100, 100)
        self.refused: list[tuple[int, RequestError]] = []
        self.compiling = Compiling(grammars, self.inbox, self._refuse, max_threads=1, **limits)

    def submit(self, number: int, grammar: str | None, n: int = 1) -> Arrived:
        arrived = self.inbox.submit(FRONT, Submit(number, (1,), TokenParams(n=n, grammar=grammar)), 0.0)
        if grammar is not None:
            self.compiling.start(arrived)
        return arrived

    def taken(self) -> list[int]:
        found = []
        while (arrived := self.inbox.take_request()) is not None:
            found.append(arrived.submit.request_id)
            assert (arrived.constraint is None) == (arrived.submit.params.grammar is None)
        return found

    def _refuse(self, arrived: Arrived, error: RequestError) -> None:
        self.refused.append((arrived.submit.request_id, error))


def on_loop(script: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(script(), 30))


async def settled(rig: Rig) -> None:
    """All grammars have been dealt with."""
    while rig.compiling._tasks:
        await asyncio.wait(rig.compiling._tasks)


def test_requests_with_grammars_wait_and_are_passed_by_those_without(folder: Path) -> None:
    async def script() -> None:
        grammars = Slow(folder)
        rig = Rig(grammars)
        for number, grammar in enumerate([None, GOOD, None, OTHER, None]):
            rig.submit(number, grammar)
        assert (rig.taken(), len(rig.inbox)) == ([0, 2, 4], 2)
        grammars.allowed.release(2)
        await settled(rig)
        assert rig.taken() == [1, 3]
        assert (len(rig.inbox), rig.refused) == (0, [])
        rig.submit(5, GOOD)  # it is known by now
        assert rig.taken() == [5]

    on_loop(script)


def test_a_grammar_that_makes_no_sense_is_refused_and_the_next_one_is_compiled(folder: Path) -> None:
    async def script() -> None:
        rig = Rig(Grammars(folder, 320, [0]))
        rig.submit(1, BAD)
        rig.submit(2, GOOD)
        await settled(rig)
        assert rig.taken() == [2]
        ((number, error),) = rig.refused
        assert (number, error.code) == (1, "invalid_grammar")
        assert error.message.startswith("the grammar is refused: ")

    on_loop(script)


def test_one_that_takes_too_long_is_refused_and_its_thread_is_given_on_when_it_is_done(folder: Path) -> None:
    async def script() -> None:
        grammars = Slow(folder)
        rig = Rig(grammars, timeout_s=0.01)
        rig.submit(1, GOOD)
        while not rig.refused:
            await asyncio.sleep(0)
        assert "more than 0.01 s" in rig.refused[0][1].message
        assert len(rig.compiling) == 1
        rig.submit(2, OTHER)
        grammars.allowed.release(2)
        await settled(rig)
        assert (grammars.begun, len(rig.inbox) + len(rig.refused)) == ([GOOD, OTHER], 2)

    on_loop(script)


def test_who_finds_no_thread_in_time_is_told_to_try_again(folder: Path) -> None:
    async def script() -> None:
        grammars = Slow(folder)
        rig = Rig(grammars, line_timeout_s=0.01)
        rig.submit(1, GOOD)
        rig.submit(2, OTHER)
        while not rig.refused:
            await asyncio.sleep(0)
        assert [(number, error.code) for number, error in rig.refused] == [(2, "queue_full")]
        grammars.allowed.release()
        await settled(rig)
        assert rig.taken() == [1]

    on_loop(script)


def test_what_ends_meanwhile_is_answered_at_once_and_never_reaches_the_engine(folder: Path) -> None:
    async def script() -> None:
        grammars = Slow(folder)
        rig = Rig(grammars)
        aborted = rig.submit(1, GOOD)
        rig.submit(2, OTHER, n=2)
        gone = rig.inbox.submit(FrontId(2), Submit(1, (1,), TokenParams(grammar=GOOD)), 0.0)
        rig.compiling.start(gone)
        rig.inbox.end(FRONT, Abort(1))
        rig.inbox.end(FRONT, Finish(2, 1))
        rig.inbox.gone(FrontId(2))
        ending = rig.inbox.take_ending()
        assert isinstance(ending, Ending)
        assert ending.arrived is aborted
        again = rig.submit(1, OTHER)  # the number is free again
        grammars.allowed.release(3)
        await settled(rig)
        assert len(grammars.begun) <= 3  # the one whose front went was not compiled
        taken = [rig.inbox.take_request() for _ in range(3)]
        assert [each and (each.submit.request_id, each.finished) for each in taken] == [(2, {1}), (1, set()), None]
        assert taken[1] is again
        assert rig.refused == []

    on_loop(script)


def test_an_engine_that_ends_drops_what_is_being_compiled(folder: Path) -> None:
    async def script() -> None:
        grammars = Slow(folder)
        rig = Rig(grammars)
        rig.submit(1, GOOD)
        rig.submit(2, OTHER)
        rig.compiling.close()
        grammars.allowed.release(2)
        await asyncio.gather(*rig.compiling._tasks, return_exceptions=True)
        assert (rig.taken(), rig.refused) == ([], [])

    on_loop(script)


class Panic(BaseException):
    """What a panic in Rust is in Python: no Exception."""


FAILURES = [MemoryError("no memory"), Panic("it panicked"), StopIteration("it stopped"), KeyboardInterrupt("a key")]


class Broken(Grammars):
    """Fails at the place that it is told, as often as there are failures left."""

    def __init__(self, folder: Path, place: str, failures: list[BaseException]) -> None:
        super().__init__(folder, 320, [0])
        self._place = place
        self._failures = failures

    def compile(self, text: str) -> Constraint:
        self._fail("compile")
        return super().compile(text)

    def kept(self, text: str) -> Constraint | None:
        self._fail("kept")
        return super().kept(text)

    def load(self) -> Vocabulary:
        self._fail("load")
        return super().load()

    def _fail(self, place: str) -> None:
        if place == self._place and self._failures:
            raise self._failures.pop(0)


@pytest.mark.parametrize("place", ["kept", "load", "compile"])
def test_whatever_fails_is_an_answer_and_a_line_in_the_log_and_the_next_grammar_has_its_place(
    folder: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def script() -> None:
        rig = Rig(Broken(folder, place, list(FAILURES)))
        for number in range(3):
            rig.submit(number, GOOD)
        ours = pytest.raises(KeyboardInterrupt) if place == "kept" else contextlib.nullcontext()
        with ours:  # on the loop's own thread it is not the grammar's
            rig.submit(3, GOOD)
        await settled(rig)
        assert [(number, error.code) for number, error in rig.refused] == [(n, "invalid_grammar") for n in range(4)]
        for (_, error), failure in zip(rig.refused, FAILURES, strict=True):
            assert error.message == f"the grammar could not be compiled: {type(failure).__name__}: {failure}"
        assert [record.levelname for record in caplog.records] == ["ERROR"] * 4
        assert len(rig.inbox) == 0
        rig.submit(9, GOOD)
        await settled(rig)
        assert rig.taken() == [9]

    on_loop(script)


def test_a_thread_that_cannot_be_started_is_an_answer_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def script() -> None:
        rig = Rig(Grammars(folder, 320, [0]))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            rig.submit(1, GOOD)
            await settled(rig)
        assert [(number, error.code) for number, error in rig.refused] == [(1, "invalid_grammar")]
        rig.submit(2, GOOD)
        await settled(rig)
        assert rig.taken() == [2]

    on_loop(script)


def test_a_checkpoint_without_the_tokenizer_that_grammars_need_says_so(tmp_path: Path) -> None:
    async def script() -> None:
        rig = Rig(Grammars(tmp_path, 320, [0]))
        rig.submit(1, GOOD)
        rig.submit(2, GOOD)
        await settled(rig)
        assert [(number, error.code) for number, error in rig.refused] == [(n, "invalid_grammar") for n in (1, 2)]
        assert all("tokenizer.json" in error.message for _, error in rig.refused)

    on_loop(script)
