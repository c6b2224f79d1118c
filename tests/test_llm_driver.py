# SPDX-License-Identifier: MIT OR Apache-2.0
"""The driver without Ray: whatever breaks its start leaves nothing, and every call ends, whoever ends it."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray import LLM, SamplingParams, driver
from metrale_ray import llm as llm_module
from metrale_ray.cluster import address as address_module
from metrale_ray.errors import ConfigError, EngineDead, StartError
from metrale_ray.progress import LoadProgress
from metrale_ray.protocol.front.messages import Abort
from tests.fixtures.tiny import write_tiny
from tests.llm_rig import SOON_S, Call, PlayedClient, PlayedCluster, answer, collected_by_hand, forget, one_token

LONG = SamplingParams(max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe")


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlayedCluster, "made", [], raising=False)
    monkeypatch.setattr(PlayedClient, "made", [], raising=False)
    monkeypatch.setattr(llm_module, "Cluster", PlayedCluster)
    monkeypatch.setattr(driver, "FrontClient", PlayedClient)


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu") as llm:
        yield llm


def cluster() -> PlayedCluster:
    return PlayedCluster.made[-1]


def client() -> PlayedClient:
    return PlayedClient.made[-1]


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("llm-")]


def generate(llm: LLM) -> Call:
    return Call(lambda: llm.generate([[1]], LONG, progress=False))


# Readers that are forgotten


def test_a_forgotten_stream_that_is_collected_on_the_loops_thread_is_aborted_and_holds_up_nothing(llm: LLM) -> None:
    def collect_and_answer(handle: Any) -> None:
        gc.collect()
        answer(handle)

    with collected_by_hand():
        client().on_submit = one_token
        forget(llm.stream([1, 2], LONG))
        client().on_submit = collect_and_answer
        call = generate(llm)
        assert call.ended()
    assert call.error is None
    assert client().heard.wait(SOON_S)
    assert client().said == [Abort(0)]


def test_a_forgotten_stream_that_is_collected_in_the_middle_of_a_call_holds_up_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = asyncio.run_coroutine_threadsafe

    def collect_and_begin(*given: Any) -> Any:
        gc.collect()  # any allocation may
        return begin(*given)

    with collected_by_hand():
        client().on_submit = one_token
        forget(llm.stream([1, 2], LONG))
        client().on_submit = answer
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", collect_and_begin)
        call = generate(llm)
        assert call.ended()
    assert call.error is None
    assert client().heard.wait(SOON_S)


# Starts that break


def interrupt_at_the_bars_end(patch: pytest.MonkeyPatch) -> None:
    end_for_good = LoadProgress.__exit__

    def end(self: LoadProgress, *given: Any) -> None:
        end_for_good(self, *given)
        raise KeyboardInterrupt

    patch.setattr(LoadProgress, "__exit__", end)


def no_more_descriptors(patch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    patch.setattr(asyncio, "new_event_loop", refuse)


def no_more_threads(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        start = threading.Thread.start

        def refuse(self: threading.Thread) -> None:
            if self.name == name:
                raise RuntimeError("can't start new thread")
            start(self)

        patch.setattr(threading.Thread, "start", refuse)

    return apply


def interrupt_at_the_last_step(patch: pytest.MonkeyPatch) -> None:
    def register(call: Callable[[], None]) -> None:
        raise KeyboardInterrupt

    patch.setattr(atexit, "register", register)


def no_session(patch: pytest.MonkeyPatch) -> None:
    def refuse(self: PlayedClient, timeout_s: float) -> None:
        raise TimeoutError("no answer")

    patch.setattr(PlayedClient, "wait_opened", refuse)


@pytest.mark.parametrize(
    ("breakage", "error"),
    [
        (interrupt_at_the_bars_end, KeyboardInterrupt),
        (no_more_descriptors, OSError),
        (no_more_threads("llm-loop"), RuntimeError),
        (no_more_threads("llm-watch"), RuntimeError),
        (interrupt_at_the_last_step, KeyboardInterrupt),
        (no_session, StartError),
    ],
)
def test_a_start_that_breaks_anywhere_leaves_nothing_running(
    model: Path, breakage: Callable[[pytest.MonkeyPatch], None], error: type[BaseException]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        breakage(patch)
        with pytest.raises(error):
            LLM(str(model), device="cpu")
    assert cluster().done[-1] == "close"
    assert all(made.death is not None for made in PlayedClient.made)
    assert own_threads() == []


def test_an_engine_that_ends_as_it_opens_is_a_start_error_with_the_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: PlayedClient, timeout_s: float) -> None:
        cluster().end(lambda: EngineDead("rank 1: a tooth of the gear broke", rank=1))
        raise EngineDead("the head went away", rank=0)

    monkeypatch.setattr(PlayedClient, "wait_opened", die)
    with pytest.raises(StartError, match="rank 1: a tooth of the gear broke") as caught:
        LLM(str(model), device="cpu")
    assert caught.value.rank == 1
    assert cluster().done[-1] == "close"


def test_the_ranks_get_the_absolute_path_of_a_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    with LLM(model.name, device="cpu"):
        assert cluster().config.model == str(model)


class Joined:
    """Ray, which this process has joined at `gcs_address`."""

    def __init__(self, gcs_address: str) -> None:
        self.gcs_address = gcs_address

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Joined:
        return self


@pytest.mark.parametrize(
    ("joined", "asked"),
    [
        ("10.0.0.5:6379", "10.0.0.6:6379"),
        ("10.0.0.5:6379", "10.0.0.5:6380"),
        ("10.0.0.5:6379", "127.0.0.1:6380"),
        ("[2001:db8::1]:6379", "10.0.0.5:6379"),
    ],
)
def test_an_address_of_another_ray_is_refused_with_both(
    model: Path, monkeypatch: pytest.MonkeyPatch, joined: str, asked: str
) -> None:
    monkeypatch.setattr(address_module, "ray", Joined(joined))
    with pytest.raises(ConfigError) as caught:
        LLM(str(model), device="cpu", address=asked)
    assert f"address is '{asked}', and this process has joined the Ray at '{joined}'" in caught.value.message
    assert PlayedCluster.made == []


@pytest.mark.parametrize("joined", ["10.0.0.5:6379", "[2001:db8::1]:6379", ""])
@pytest.mark.parametrize(
    "asked", [None, "auto", "local", "head.example:6379", "127.0.0.1:6379", "ray://10.0.0.9:10001"]
)
def test_an_address_that_may_be_that_of_the_joined_ray_is_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch, joined: str, asked: str | None
) -> None:
    monkeypatch.setattr(address_module, "ray", Joined(joined))
    for address in (asked, joined or None):
        with LLM(str(model), device="cpu", address=address):
            assert len(cluster().done) == 1


def test_an_address_in_the_environment_does_not_matter_where_ray_was_joined(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_module, "ray", Joined("10.0.0.5:6379"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.6:6379")
    with LLM(str(model), device="cpu"):
        assert cluster().done == ["start"]


# The end


def test_close_ends_the_session_then_the_ranks_then_the_threads(model: Path) -> None:
    llm = LLM(str(model), device="cpu")
    assert sorted(own_threads()) == ["llm-loop", "llm-watch"]
    llm.close()
    llm.close()
    assert cluster().done == ["start", "stop", "close"]
    assert own_threads() == []


def test_whoever_waits_when_the_llm_is_closed_is_told_that_it_was_closed(llm: LLM) -> None:
    call = generate(llm)
    assert client().submitted.wait(SOON_S)
    llm.close()
    assert call.ended()
    assert isinstance(call.error, EngineDead)
    assert call.error.message == "this LLM was closed"


def test_whoever_waits_for_the_reason_of_a_death_when_the_llm_is_closed_is_told_so(llm: LLM) -> None:
    call = generate(llm)
    assert client().submitted.wait(SOON_S)
    client().die("the head went away", 0)
    llm.close()
    assert call.ended()
    assert isinstance(call.error, EngineDead)
    assert call.error.message == "this LLM was closed"


def test_a_stream_goes_no_further_after_close(llm: LLM) -> None:
    client().on_submit = one_token
    stream = llm.stream([1], LONG)
    next(stream)
    llm.close()
    with pytest.raises(EngineDead, match="this LLM was closed"):
        next(stream)
    with pytest.raises(EngineDead, match="this LLM was closed"):
        llm.stream([1])


def test_a_death_is_told_with_the_reason_that_the_cluster_has(llm: LLM) -> None:
    call = generate(llm)
    assert client().submitted.wait(SOON_S)
    cluster().end(lambda: EngineDead("rank 1: a tooth of the gear broke", rank=1))
    assert call.ended()
    assert isinstance(call.error, EngineDead)
    assert (call.error.message, call.error.rank) == ("rank 1: a tooth of the gear broke", 1)


def test_a_watch_that_fails_is_the_engines_death_and_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("Ray says something new")

    call = generate(llm)
    assert client().submitted.wait(SOON_S)
    with caplog.at_level(logging.ERROR):
        cluster().end(fail)
        assert client().died.wait(SOON_S)
    assert call.ended()
    assert isinstance(call.error, EngineDead)
    assert "ValueError: Ray says something new" in call.error.message
    assert "Ray says something new" in caplog.text
    with pytest.raises(EngineDead, match="Ray says something new"):
        llm.stats()
