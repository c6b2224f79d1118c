# SPDX-License-Identifier: MIT OR Apache-2.0
"""An engine that is found by its name: its answers, its end, and whoever leaves it. Ray itself is stood in for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from metrale_ray.cluster import names, running
from metrale_ray.cluster.actors import WayIn
from metrale_ray.cluster.cluster import RAY_GONE
from metrale_ray.cluster.running import RunningEngine
from metrale_ray.config import EngineConfig
from metrale_ray.errors import EngineDead, StartError, UserError

WAY = WayIn("tcp://10.0.0.5:7000", "head's key", EngineConfig(model="m"), [{"rank": 0}])
SOON_S = 10.0


class Ref:
    """A Ray object that is there, or will never be."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, timeout: float) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(self.value, Future):
            return self.value
        if isinstance(self.value, ray.exceptions.RayError):
            future.set_exception(self.value)
        else:
            future.set_result(self.value)
        return future


class PlayedHead:
    """Answers each question with what is next in its list."""

    def __init__(self, **answers: list[Any]) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self._answers = {name: iter(given) for name, given in answers.items()}

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Ref:
            self.asked.append((name, given))
            return Ref(next(self._answers[name]))

        return SimpleNamespace(remote=remote)


class PlayedRay:
    """A Ray with these heads by name, until it is shut down."""

    exceptions = ray.exceptions

    def __init__(self, heads: dict[str, PlayedHead]) -> None:
        self.is_there = True
        self._heads = heads

    def is_initialized(self) -> bool:
        return self.is_there

    def get_actor(self, name: str, namespace: str) -> PlayedHead:
        assert namespace == names.NAMESPACE
        if name not in self._heads:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return self._heads[name]

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        others = [{"name": "theirs/rank-0", "namespace": "theirs"}, {"name": "mine/rank-1", "namespace": "metrale_ray"}]
        return [*others, *({"name": name, "namespace": names.NAMESPACE} for name in self._heads)]

    @staticmethod
    def get(ref: Ref, timeout: float) -> Any:
        return ref.get(timeout)


Play = Callable[..., tuple[RunningEngine, PlayedHead, PlayedRay]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """The engine "mine", which nobody has found yet."""
    monkeypatch.setattr(running, "POLL_S", 0.0)

    def make(**answers: list[Any]) -> tuple[RunningEngine, PlayedHead, PlayedRay]:
        head = PlayedHead(**answers)
        played = PlayedRay({"mine/rank-0": head, "another/rank-0": PlayedHead()})
        monkeypatch.setattr(running, "ray", played)
        monkeypatch.setattr(names, "ray", played)
        monkeypatch.setattr(names, "list_named_actors", played.list_named_actors)
        return RunningEngine("mine"), head, played

    monkeypatch.setattr(running.RaySession, "join", lambda self, address: None)
    return make


def died(text: str) -> ray.exceptions.RayError:
    return ray.exceptions.RayError(text)


def raised(cause: Exception) -> ray.exceptions.RayTaskError:
    return ray.exceptions.RayTaskError("way_in", "traceback", cause)


def test_an_engine_that_is_starting_is_waited_for_and_then_let_us_in(play: Play) -> None:
    engine, head, _ = play(way_in=[None, None, WAY])
    assert engine.find("auto", SOON_S) is WAY
    assert head.asked == [("way_in", (engine.front_keys.public,))] * 3
    assert (engine.front_address, engine.head_key) == (WAY.front_address, WAY.head_key)


def test_one_that_is_not_ready_in_time_is_a_start_error(play: Play) -> None:
    engine, _, _ = play(way_in=itertools.repeat(None))
    with pytest.raises(StartError, match=r"engine 'mine' runs and is not ready yet; wait longer .timeout_s."):
        engine.find("auto", 0.0)
    engine, _, _ = play(way_in=[ray.exceptions.GetTimeoutError("late")])
    with pytest.raises(StartError, match="not ready yet"):
        engine.find("auto", SOON_S)


def test_one_that_has_ended_or_gone_is_dead_with_its_reason(play: Play) -> None:
    engine, _, _ = play(way_in=[raised(EngineDead("rank 1: it broke", rank=1))])
    with pytest.raises(EngineDead, match="engine 'mine': rank 1: it broke") as caught:
        engine.find("auto", SOON_S)
    assert caught.value.rank == 1
    engine, _, _ = play(way_in=[died("The actor died\nmore")])
    with pytest.raises(EngineDead, match=r"the head of engine 'mine' has gone: The actor died$"):
        engine.find("auto", SOON_S)


def test_a_name_that_no_engine_has_is_refused_with_those_that_run(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    play()
    with pytest.raises(UserError, match="no engine named 'yours' runs on this Ray; those that run are 'another', 'min"):
        RunningEngine("yours").find("auto", SOON_S)
    monkeypatch.setattr(names, "list_named_actors", lambda all_namespaces: [])
    with pytest.raises(UserError, match="no engine named 'yours' runs on this Ray; none runs there at all"):
        RunningEngine("yours").find("auto", SOON_S)


def test_the_end_is_told_with_its_reason_and_asked_again_while_there_is_none(play: Play) -> None:
    engine, head, _ = play(way_in=[WAY], ended=[None, None, EngineDead("rank 1: it broke", rank=1), died("gone\nx")])
    engine.find("auto", SOON_S)
    assert [engine.wait_ended(SOON_S) for _ in range(2)] == [None, None]
    first, second = engine.wait_ended(SOON_S), engine.wait_ended(SOON_S)
    assert first is not None
    assert (first.message, first.rank) == ("rank 1: it broke", 1)
    assert second is not None
    assert (second.message, second.rank) == ("the head of engine 'mine' has gone: gone", 0)
    assert head.asked[1:] == [("ended", (running.ASK_S,))] * 4


def test_one_question_waits_at_the_head_however_often_it_is_looked_at(play: Play) -> None:
    waiting: Future[Any] = Future()
    engine, head, _ = play(way_in=[WAY], ended=[waiting])
    engine.find("auto", SOON_S)
    assert [engine.wait_ended(0.0) for _ in range(3)] == [None] * 3
    assert len(head.asked) == 2
    waiting.set_result(EngineDead("it broke"))
    death = engine.wait_ended(0.0)
    assert death is not None
    assert death.message == "it broke"


def test_whoever_leaves_need_not_wait_for_the_engines_end(play: Play) -> None:
    engine, _, _ = play(way_in=[WAY], ended=[Future()])
    engine.find("auto", SOON_S)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.wait_ended(1000.0)), daemon=True)
    thread.start()
    engine.stop()
    thread.join(SOON_S)
    assert results == [None]
    engine.close()


def test_figures_come_with_the_ranks_and_a_head_that_has_gone_is_dead(play: Play) -> None:
    engine, _, played = play(way_in=[WAY], stats=[{"running": 0}, died("gone"), ray.exceptions.GetTimeoutError("late")])
    engine.find("auto", SOON_S)
    assert engine.stats() == {"running": 0, "ranks": [{"rank": 0}]}
    for _ in range(2):
        with pytest.raises(EngineDead, match="the head of engine 'mine' has gone"):
            engine.stats()
    played.is_there = False
    with pytest.raises(EngineDead, match=RAY_GONE):
        engine.stats()
    death = engine.wait_ended(SOON_S)
    assert death is not None
    assert death.message == RAY_GONE


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
