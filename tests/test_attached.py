# SPDX-License-Identifier: MIT OR Apache-2.0
"""A driver of an engine that somebody else started, without Ray: what it refuses, its session, and its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray import SamplingParams, attach, attached, driver
from metrale_ray.cluster.actors import WayIn
from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, EngineDead, StartError, UserError
from tests.fixtures.tiny import write_tiny
from tests.llm_rig import SOON_S, Call, PlayedClient, PlayedCluster, answer, one_token

LONG = SamplingParams(max_tokens=50, ignore_eos=True)


class PlayedRunning(PlayedCluster):
    """The engine "mine", which `find` finds at once."""

    config = EngineConfig(model="m")
    refuses: Exception | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(self.config)

    def find(self, address: str, timeout_s: float) -> WayIn:
        self.done.append(f"find {address} {timeout_s:g}")
        if self.refuses is not None:
            raise self.refuses
        return WayIn(self.front_address, self.head_key, self.config, [])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe")


@pytest.fixture(autouse=True)
def played(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(PlayedCluster, "made", [], raising=False)
    monkeypatch.setattr(PlayedClient, "made", [], raising=False)
    monkeypatch.setattr(PlayedRunning, "config", EngineConfig(model=str(model), max_queue_len=20))
    monkeypatch.setattr(attached, "RunningEngine", PlayedRunning)
    monkeypatch.setattr(driver, "FrontClient", PlayedClient)


def engine() -> PlayedCluster:
    return PlayedCluster.made[-1]


def client() -> PlayedClient:
    return PlayedClient.made[-1]


def test_it_answers_and_leaves_the_engine_when_it_is_closed() -> None:
    with attach("mine") as llm:
        client().on_submit = answer
        assert llm.generate([[1], [2]], LONG, progress=False)[1].outputs[0].token_ids == [7]
        assert (llm.name, llm.max_model_len, llm.tokenizer) == ("mine", 100, None)
        assert llm.config.max_queue_len == 20
        assert llm.stats() == {"running": 0}
        stream = llm.stream([1], LONG)
        assert next(stream).outputs[0].token_ids == [7]
    llm.close()
    assert engine().done == ["find auto 60", "stop", "close"]  # `stop` ends the wait for the engine's end
    assert client().death is not None
    for call in (lambda: llm.generate([[1]]), lambda: llm.stream([1]), llm.stats):
        with pytest.raises(EngineDead, match="this AttachedLLM was closed"):
            call()


def test_the_ray_is_the_one_that_is_named_else_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    attach("mine", timeout_s=3).close()
    assert engine().done[0] == "find 10.0.0.5:6379 3"
    attach("mine", "10.0.0.6:6379").close()
    assert engine().done[0] == "find 10.0.0.6:6379 60"


def test_whoever_waits_when_the_engine_ends_is_told_why() -> None:
    with attach("mine") as llm:
        client().on_submit = one_token
        waiting = Call(lambda: llm.generate([[1]], LONG, progress=False))
        assert client().submitted.wait(SOON_S)
        engine().end(lambda: EngineDead("rank 1: a tooth of the gear broke", rank=1))
        assert waiting.ended()
        with pytest.raises(EngineDead, match="a tooth of the gear broke"):
            llm.stats()
    assert isinstance(waiting.error, EngineDead)
    assert (waiting.error.message, waiting.error.rank) == ("rank 1: a tooth of the gear broke", 1)


def broken_find(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlayedRunning, "refuses", UserError("no engine named 'mine'"))


def no_session(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: PlayedClient, timeout_s: float) -> None:
        raise TimeoutError("no answer")

    patch.setattr(PlayedClient, "wait_opened", refuse)


def model_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlayedRunning, "config", EngineConfig(model="/nowhere/model"))


def model_not_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlayedRunning, "config", EngineConfig(model="owner/name"))
    patch.setattr(attached, "find", lambda model, revision: None)


@pytest.mark.parametrize(
    ("breakage", "error", "message"),
    [
        (broken_find, UserError, "no engine named 'mine'"),
        (no_session, StartError, "did not open a session"),
        (model_elsewhere, ConfigError, r"'/nowhere/model' was not found.*its tokenizer is needed here too: give model"),
        (model_not_in_the_cache, ConfigError, "'owner/name' is not in the hub's cache here; engine 'mine' has that"),
    ],
)
def test_whatever_breaks_it_leaves_nothing(
    breakage: Callable[[pytest.MonkeyPatch], None], error: type[Exception], message: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        breakage(patch)
        with pytest.raises(error, match=message):
            attach("mine")
    assert engine().done[-1] == "close"
    assert all(made.death is not None for made in PlayedClient.made)


def test_a_checkpoint_that_is_elsewhere_here_can_be_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_elsewhere(monkeypatch)
    with attach("mine", model=str(model)) as llm:
        assert llm.config.model == "/nowhere/model"


@pytest.mark.parametrize("name", ["", None, 5])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="it must be the name of an engine that runs"):
        attach(name)
