# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's process without Ray: its asyncio loop, its engine thread, workers as threads, fronts over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import EngineConfig, FaultSpec
from metrale_ray.engine import Engine
from metrale_ray.errors import EngineDead, HandshakeError, LinkLost, MetraleError, StartError
from metrale_ray.head import Head
from metrale_ray.protocol.front import FrontClient, Output
from metrale_ray.protocol.journal.reader import open_journal
from metrale_ray.protocol.journal.records import Closed
from metrale_ray.protocol.keys import new_keys
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.worker import Worker
from tests.fixtures.succ import write_succ
from tests.journals import environment

HOST = "127.0.0.1"
TIMEOUT_S = 30.0
GREEDY = TokenParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = TokenParams(temperature=0, max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_succ(tmp_path_factory.mktemp("succ"))


class Process:
    """A head on a loop of its own thread, and its workers, one thread each."""

    def __init__(self, model: Path, ep_size: int, **settings: Any) -> None:
        given = {"max_batch_size": 4, "max_model_len": 4000, "dtype": "float32", "device": "cpu", **settings}
        self.config = EngineConfig(model=str(model), ep_size=ep_size, **given).resolved(environment())
        self.worker_errors: list[BaseException | None] = [None] * ep_size
        self.failure: MetraleError | None = None
        self.head = Head(self.config, HOST)
        self.loop = asyncio.new_event_loop()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run_loop, daemon=True)]
        self._threads[0].start()
        self.workers = {rank: Worker(self.config, rank, HOST) for rank in range(1, ep_size)}
        self.addresses = self.call(self.head.listen({rank: w.public_key for rank, w in self.workers.items()}))
        for rank, address in self.addresses.items():
            self._threads.append(threading.Thread(target=self._work, args=(rank, address), daemon=True))
        for thread in self._threads[1:]:
            thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self.loop)

    def front(self) -> FrontClient:
        """A front of its own keys, which the head allows."""
        keys = new_keys()
        self.allow(keys.public)
        return FrontClient(self.head.front_address, keys, self.head.public_key)

    def allow(self, public_key: str) -> None:
        """Let the head know a front before it comes."""

        async def allow() -> None:
            self.head.allow_front(public_key)

        self.call(allow())

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(TIMEOUT_S)

    def wait_ready(self) -> None:
        while self.head.state.phase not in ("ready", "ended"):
            self._ended.wait(0.01)
        assert self.failure is None, self.failure

    def wait_ended(self) -> MetraleError | None:
        assert self._ended.wait(TIMEOUT_S)
        for thread in self._threads[1:]:
            thread.join(TIMEOUT_S)
        return self.failure

    def close(self) -> None:
        self.call(self.head.stop())
        self.wait_ended()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._threads[0].join(TIMEOUT_S)
        self.loop.close()
        assert not any(thread.is_alive() for thread in self._threads)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _serve(self) -> None:
        try:
            await self.head.serve()
        except MetraleError as error:
            self.failure = error
        finally:
            self._ended.set()

    def _work(self, rank: int, address: Any) -> None:
        try:
            self.workers[rank].run(address)
        except MetraleError as error:
            self.worker_errors[rank] = error


@contextmanager
def running(model: Path, ep_size: int = 2, **settings: Any) -> Iterator[tuple[Process, FrontClient]]:
    process = Process(model, ep_size, **settings)
    try:
        process.wait_ready()
        with process.front() as client:
            client.wait_opened(TIMEOUT_S)
            yield process, client
    finally:
        process.close()


def tokens_of(handle: Any) -> list[int]:
    tokens: list[int] = []
    while True:
        output: Output = handle.get(TIMEOUT_S)
        tokens += output.token_ids
        if output.finish_reason is not None:
            return tokens


def end_of(handle: Any) -> str:
    while True:
        output: Output = handle.get(TIMEOUT_S)
        if output.finish_reason is not None:
            return output.finish_reason


def until(condition: Callable[[], bool]) -> None:
    """Look again and again, at most for a while; the waits are the process's own."""
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


def test_several_fronts_get_their_own_answers(model: Path) -> None:
    with running(model) as (process, first), process.front() as second:
        second.wait_opened(TIMEOUT_S)
        handles = [(c, n, c.submit([n], GREEDY)) for n, c in enumerate([first, second] * 4)]
        for _, number, handle in handles:
            assert tokens_of(handle) == list(range(number + 1, number + 9))
        stats = process.call(process.head.stats())
        assert (stats["finished_requests"], stats["running"], stats["waiting"]) == (8, 0, 0)
        assert stats["free_blocks"] == stats["total_blocks"]


def test_a_front_that_goes_away_has_its_requests_aborted_and_others_go_on(model: Path) -> None:
    with running(model) as (process, client):
        with process.front() as leaving:
            leaving.wait_opened(TIMEOUT_S)
            leaving.submit([5], LONG).get(TIMEOUT_S)
        until(lambda: process.call(process.head.stats())["running"] == 0)
        assert tokens_of(client.submit([7], GREEDY)) == list(range(8, 16))


def test_aborted_and_finished_requests_give_everything_back(model: Path) -> None:
    with running(model) as (process, client):
        handles = [client.submit([n], LONG) for n in (1, 2, 3)]
        for handle in handles:
            handle.get(TIMEOUT_S)
        handles[0].abort()
        handles[1].finish()
        handles[2].abort()
        assert [end_of(handle) for handle in handles] == ["abort", "stop", "abort"]
        assert not client._handles  # nothing waits for them any more
        until(lambda: process.call(process.head.stats())["running"] == 0)
        stats = process.call(process.head.stats())
        assert (stats["free_blocks"], stats["finished_requests"]) == (stats["total_blocks"], 1)


def test_what_cannot_be_served_is_refused_with_its_code(model: Path) -> None:
    with running(model) as (_, client):
        refused = client.submit([1] * 4001, GREEDY).get(TIMEOUT_S)
        assert (refused.finish_reason, refused.error[0] if refused.error else "") == (
            "error",
            "context_length_exceeded",
        )
        assert tokens_of(client.submit([1], GREEDY)) == list(range(2, 10))


def test_a_stop_ends_every_rank_in_order(model: Path) -> None:
    process = Process(model, 3)
    process.wait_ready()
    process.close()
    assert process.failure is None
    assert process.worker_errors == [None, None, None]


def test_an_idle_engine_pings_and_finds_a_rank_that_differs(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", kind="diverge", cmd="ping")
    with running(model, faults=(fault,), idle_ping_s=0.05) as (process, client):
        until(lambda: client.death is not None)
        failure = process.wait_ended()
        assert isinstance(failure, EngineDead)
        assert failure.rank == 1
        with pytest.raises(EngineDead, match="rank 1 differs"):
            client.submit([1], GREEDY)


class Unspeakable(BaseException):
    """No Exception, as a panic in Rust is none, and nobody can say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words for it")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt("a key"), "KeyboardInterrupt: a key"),
        (Unspeakable(), "nothing says why"),
    ],
)
def test_what_is_no_exception_ends_the_engine_and_is_told_to_all_who_wait(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    def fail(engine: Engine) -> bool:
        raise error

    process = Process(model, 1)
    process.wait_ready()
    with process.front() as client:
        client.wait_opened(TIMEOUT_S)
        monkeypatch.setattr(Engine, "step", fail)
        handle = client.submit([1], GREEDY)
        with pytest.raises(EngineDead, match=said):
            handle.get(TIMEOUT_S)
    process._ended.wait(TIMEOUT_S)
    failure = process.head.state.failure
    assert isinstance(failure, EngineDead)
    assert said in failure.message
    process.close()


def test_questions_after_the_end_are_answered_with_the_last_figures(model: Path) -> None:
    process = Process(model, 1)
    process.wait_ready()
    process.call(process.head.stop())
    process.wait_ended()
    assert process.call(process.head.stats())["epoch"] == 1
    process.close()


def test_a_worker_of_an_earlier_launch_is_refused_and_counted_and_the_engine_goes_on(model: Path) -> None:
    with running(model) as (process, client):
        for _ in range(2):
            earlier = Worker(process.config, 1, HOST)
            with pytest.raises(LinkLost, match="it does not know this process's key"):
                earlier.run(process.addresses[1])
            assert tokens_of(client.submit([7], GREEDY)) == list(range(8, 16))
        stranger = FrontClient(process.head.front_address, new_keys(), process.head.public_key)
        with stranger, pytest.raises(EngineDead, match="was lost"):
            stranger.wait_opened(TIMEOUT_S)
        until(lambda: process.call(process.head.stats())["refused_strangers"] == 3)
        assert tokens_of(client.submit([7], GREEDY)) == list(range(8, 16))


def test_a_failed_load_is_a_start_error_with_rank_and_reason_and_nothing_runs_on(model: Path) -> None:
    fault = FaultSpec(rank=2, phase="validation", cmd="load", message="no memory for it")
    process = Process(model, 3, faults=(fault,))
    failure = process.wait_ended()
    assert isinstance(failure, StartError)
    assert "rank 2 could not load: no memory for it" in failure.message
    process.close()


def test_ranks_that_differ_refuse_to_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from metrale_ray.model.ranks import introduce

    def differ(setup: Any) -> Any:
        hello = introduce(setup)
        return dataclasses.replace(hello, must_equal={**hello.must_equal, "torch": "another"})

    monkeypatch.setattr("metrale_ray.worker.introduce", differ)
    process = Process(model, 2)
    failure = process.wait_ended()
    assert isinstance(failure, HandshakeError)
    assert isinstance(process.worker_errors[1], HandshakeError)
    assert "torch: rank 0 on 127.0.0.1 has" in failure.message
    process.close()


def test_damage_that_a_scrub_finds_during_requests_ends_all_of_them_and_names_the_rank(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", kind="flip_expert", first_token=5)
    with running(model, scrub=True, agreement_interval=0, faults=(fault,)) as (process, client):
        with process.front() as other:
            handles = [client.submit([7], LONG), other.submit([8], LONG), client.submit([5], LONG)]
            for handle in handles:
                with pytest.raises(EngineDead, match=r"^the memory of rank 1 is damaged, .*\.experts\.") as caught:
                    tokens_of(handle)
                assert caught.value.rank == 1
        assert process.wait_ended() is not None


def test_a_start_that_fails_closes_its_journal_and_one_without_a_checkpoint_makes_none(
    model: Path, tmp_path: Path
) -> None:
    def listen(folder: Path, journal: Path) -> BaseException:
        config = EngineConfig(model=str(folder), ep_size=2, device="cpu", journal=str(journal)).resolved({})
        with pytest.raises(Exception, match=r".") as caught:
            asyncio.run(Head(config, HOST).listen({1: "no key"}))
        return caught.value

    listen(tmp_path, tmp_path / "unmade")
    assert not (tmp_path / "unmade").exists()
    error = listen(model, tmp_path / "journal")
    assert not any(thread.name == "journal" for thread in threading.enumerate())
    (life,) = (tmp_path / "journal").iterdir()
    (closed,) = open_journal(life)
    assert isinstance(closed, Closed)
    assert (closed.reason, closed.failure) == ("the engine did not start", str(error))
