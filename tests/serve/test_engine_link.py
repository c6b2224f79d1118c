# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front's way to its engine: ready after a real token, honest while it is not, and back when another one comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import FaultSpec
from metrale_ray.errors import EngineDead, StartError
from metrale_ray.protocol.front import RequestHandle
from metrale_ray.protocol.keys import new_keys
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.serve.engine_link import EngineAddress, EngineLink
from metrale_ray.serve.failures import ApiError
from tests.fixtures.succ import write_succ
from tests.test_head import Process

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_succ(tmp_path_factory.mktemp("succ"))


def address_of(process: Process) -> EngineAddress:
    keys = new_keys()
    process.allow(keys.public)
    return EngineAddress(process.head.front_address, keys, process.head.public_key, 100)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def all_of(handle: RequestHandle) -> None:
    while True:
        await handle.aget()


class Running:
    """A link whose task runs inside the `async with`."""

    def __init__(self, find: Callable[[], Awaitable[EngineAddress]], **options: Any) -> None:
        self.link = EngineLink(find, None, progress_timeout_s=60, **options)

    async def __aenter__(self) -> EngineLink:
        self._task = asyncio.ensure_future(self.link.run())
        return self.link

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def test_it_is_ready_after_a_real_token_and_answers(model: Path) -> None:
    process = Process(model, 1)

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find) as link:
            assert not link.health().is_ready
            assert link.health().ready_reason == "the engine is starting"
            with pytest.raises(ApiError, match="the engine is starting; try again later") as refused:
                link.front()
            assert (refused.value.status, refused.value.code) == (503, "engine_unavailable")
            await until(lambda: link.health().is_ready)
            assert link.figures()["phase"] == "ready"
            front = link.front()
            (request,) = front.prepare.requests([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            async for item in front.stream(request):
                last = item
            assert last.outputs[0].token_ids == [6, 7]

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()


def test_an_engine_that_ends_is_a_503_and_the_next_one_is_found(model: Path) -> None:
    first, second = Process(model, 1), Process(model, 1)
    addresses = [address_of(first), address_of(second)]

    async def scene() -> None:
        may_find = asyncio.Event()
        may_find.set()

        async def find() -> EngineAddress:
            if not may_find.is_set():
                raise StartError("the engine is not there")
            return addresses.pop(0)

        async with Running(find) as link:
            await until(lambda: link.health().is_ready)
            may_find.clear()
            await asyncio.to_thread(first.close)
            await until(lambda: link.health().ready_reason.startswith("the engine is not there (the last one ended: "))
            with pytest.raises(ApiError, match="the engine is not there"):
                link.front()
            assert link.figures()["phase"] == "ended"
            assert link.health().is_moving  # nothing waits
            may_find.set()
            await until(lambda: link.health().is_ready)
            assert link.num_sessions == 2

    try:
        first.wait_ready()
        second.wait_ready()
        asyncio.run(scene())
    finally:
        second.close()


def test_work_that_waits_without_a_completed_command_is_no_progress(model: Path) -> None:
    process = Process(model, 1)
    now = [0.0]

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find, clock=lambda: now[0]) as link:
            await until(lambda: link.health().is_ready)
            link._told = {"has_work": True, "progress_age_s": 50.0}  # what a head with a stuck engine tells
            link._told_at_s = 0.0
            assert link.health().is_moving
            now[0] = 11.0
            health = link.health()
            assert not health.is_moving
            assert not health.is_ready
            assert health.moving_reason == health.ready_reason == ("work waits and no command has completed for 61 s")
            await until(lambda: link.health().is_moving)  # the head was asked again

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()


def test_what_more_is_known_of_a_death_is_told(model: Path) -> None:
    async def explain(seen: EngineDead) -> EngineDead:
        return EngineDead("rank 1: out of memory", rank=1)

    async def find() -> EngineAddress:
        raise StartError("never")

    seen = EngineDead("the connection was lost")
    assert asyncio.run(EngineLink(find, None, progress_timeout_s=1).explain(seen)) is seen
    told = asyncio.run(EngineLink(find, None, progress_timeout_s=1, explain=explain).explain(seen))
    assert (told.message, told.rank) == ("rank 1: out of memory", 1)


def test_an_address_where_nobody_listens_is_told_and_tried_again(model: Path) -> None:
    tries = []

    async def scene() -> None:
        async def find() -> EngineAddress:
            tries.append(1)
            return EngineAddress("tcp://127.0.0.1:1", new_keys(), new_keys().public, 1)

        async with Running(find) as link:
            await until(lambda: len(tries) == 2)
            assert "tcp://127.0.0.1:1" in link.health().ready_reason

    asyncio.run(scene())


def test_whatever_goes_wrong_on_the_way_is_told_and_tried_again(model: Path) -> None:
    errors: list[Exception] = [OSError(24, "Too many open files"), ValueError("odd")]

    async def scene() -> None:
        async def find() -> EngineAddress:
            if errors:
                raise errors.pop(0)
            await asyncio.Event().wait()
            raise AssertionError("never")

        async with Running(find) as link:
            await until(lambda: "Too many open files" in link.health().ready_reason)
            await until(lambda: link.health().ready_reason == "ValueError: odd")

    asyncio.run(scene())


def test_who_knows_better_ends_the_session_and_the_figures_of_what_has_gone_say_so(model: Path) -> None:
    process = Process(model, 1)
    found: list[EngineAddress] = [address_of(process)]

    async def scene() -> None:
        async def find() -> EngineAddress:
            if not found:
                raise StartError("the engine is not there")
            return found.pop()

        async with Running(find) as link:
            await until(lambda: link.health().is_ready)
            handle = link.front()._client.submit((1,), TokenParams(max_tokens=3000, ignore_eos=True))
            await handle.aget()
            assert (await link.ask())["running"] == 1
            link.die(EngineDead("rank 1 is lost", rank=1))
            with pytest.raises(EngineDead, match="rank 1 is lost"):
                await all_of(handle)
            reason = "the engine is not there (the last one ended: rank 1 is lost)"
            await until(lambda: link.health().ready_reason == reason)
            figures = link.figures()
            assert (figures["phase"], figures["why"]) == ("ended", "rank 1 is lost")
            assert (figures["running"], figures["waiting"], figures["has_work"]) == (0, 0, False)
            assert figures["cache"]["free_blocks"] == figures["cache"]["total_blocks"] > 0
            assert [rank["state"] for rank in figures["ranks"]] == ["ended"]
            assert (await link.ask())["phase"] == "ended"

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()


def test_a_head_that_does_not_say_how_it_is_is_not_ready(model: Path) -> None:
    process = Process(model, 1)
    now = [0.0]

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find, clock=lambda: now[0]) as link:
            await until(lambda: link.health().is_ready)
            link._told_at_s = -13.0
            assert link.health().ready_reason == "the head has not said for 13 s how the engine is"

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()


def test_a_journal_that_the_disk_refuses_is_told_where_the_service_runs(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not again at each question."""
    process = Process(model, 1, journal=str(tmp_path / "journal"))

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find) as link:
            await until(lambda: link.health().is_ready)
            await until(lambda: link.figures()["journal"]["is_on"])
            process.head._recording._journal._fail("no space")  # type: ignore[attr-defined]  # the writer's own
            await until(lambda: link.figures()["journal"]["failure"] is not None)
            told_at_s = link._told_at_s
            await until(lambda: link._told_at_s > told_at_s)

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()
    assert [r.name for r in caplog.records if "no space" in r.message].count("metrale_ray.serve.engine_link") == 1


def test_an_engine_that_refuses_its_first_token_again_and_again_is_given_up(model: Path) -> None:
    fault = FaultSpec(rank=0, phase="before", first_token=0)
    process = Process(model, 1, faults=(fault,))

    async def scene() -> None:
        async def find() -> EngineAddress:
            return address_of(process)

        async with Running(find) as link:
            await until(lambda: bool(link.refusal))
            assert link.refusal.startswith("the engine gave no first token: ")
            assert not link.health().is_ready

    try:
        process.wait_ready()
        asyncio.run(scene())
    finally:
        process.close()
