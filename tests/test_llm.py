# SPDX-License-Identifier: MIT OR Apache-2.0
"""The driver over real Ray actors, sockets and gloo: the same answers as in one process, and every way to end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import ray

from metrale_ray import LLM, SamplingParams, attach
from metrale_ray.config import FaultSpec
from metrale_ray.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    PlacementError,
    RequestError,
    StartError,
    UserError,
)
from metrale_ray.serve.text import load_tokenizer
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE, write_tiny
from tests.fixtures.tokenizer import write_tokenizer
from tests.harness import Driver, run_engine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPTS = [[11, *range(20, 60)], [12, 50, 51], [13, *range(60, 75)], [14, 80], [15]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_batch_size": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "max_model_len": 1000,
    "num_cpus_per_rank": 1,
}
NOTICED_S = 10.0  # a rank that dies or stops is noticed within this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """One Ray for all engines of this file, with room for four ranks whatever the machine has."""
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """The tokens of one rank in one process."""

    def script(driver: Driver) -> None:
        for prompt in PROMPTS:
            driver.submit(prompt, GREEDY)
        driver.run()

    in_one_process = {name: value for name, value in SETTINGS.items() if name not in ("dtype", "device")}
    return run_engine(model, script, **in_one_process).tokens()


def start(model: Path, **changes: Any) -> LLM:
    return LLM(str(model), **{**SETTINGS, "ep_size": 2, **changes})


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)]


def pids(llm: LLM) -> list[int]:
    return [rank["pid"] for rank in llm.stats()["ranks"]]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.05)
    return True


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ep_size", "protocol"),
    [(1, "v2"), (4, "v2"), (2, "v1"), *(pytest.param(n, "v2", marks=pytest.mark.nightly) for n in (2, 3))],
)
def test_ranks_over_gloo_give_the_tokens_of_one_process_and_leave_nothing(
    model: Path, expected: list[list[int]], ep_size: int, protocol: str
) -> None:
    with start(model, ep_size=ep_size, ep_protocol=protocol) as llm:
        assert tokens_of(llm) == expected
        stats = llm.stats()
        assert (stats["running"], stats["waiting"]) == (0, 0)
        assert stats["free_blocks"] == stats["total_blocks"]
        assert [rank["rank"] for rank in stats["ranks"]] == list(range(ep_size))
        processes = pids(llm)
        assert len(set(processes)) == ep_size
    assert wait_until(lambda: not any(map(is_running, processes)), 15)
    with pytest.raises(EngineDead, match="closed"):
        llm.generate(PROMPTS, GREEDY)


def test_a_failed_command_fails_its_sequence_alone_and_every_process_stays(
    model: Path, expected: list[list[int]]
) -> None:
    fault = FaultSpec(rank=1, phase="inside", layer=1, first_token=13, message="the third expert broke")
    with start(model, ep_size=3, faults=(fault,)) as llm:
        before = pids(llm)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, progress=False)]
        failed = outputs.pop(2)
        assert (failed.finish_reason, failed.error_code) == ("error", "command_failed")
        assert failed.error == "the third expert broke"
        assert [output.token_ids for output in outputs] == expected[:2] + expected[3:]
        assert pids(llm) == before
        assert all(map(is_running, before))


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (0, signal.SIGSTOP),
        (1, signal.SIGKILL),
        *(
            pytest.param(r, s, marks=pytest.mark.nightly)
            for r, s in ((0, signal.SIGKILL), (1, signal.SIGSTOP), (2, signal.SIGKILL), (2, signal.SIGSTOP))
        ),
    ],
)
def test_a_rank_that_dies_or_stops_ends_the_engine_soon_for_all_who_wait(
    model: Path, rank: int, how: signal.Signals
) -> None:
    with start(model, ep_size=3) as llm:
        processes = pids(llm)
        streams = [llm.stream(prompt, LONG) for prompt in PROMPTS[:3]]
        for stream in streams:
            next(stream)
        os.kill(processes[rank], how)
        started = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDead) as caught:
                for _ in stream:
                    pass
            assert caught.value.rank == rank, caught.value.message
        assert time.monotonic() - started < NOTICED_S
        again = time.monotonic()
        with pytest.raises(EngineDead):
            llm.generate(PROMPTS[:1], GREEDY)
        assert time.monotonic() - again < 1
    assert wait_until(lambda: not any(map(is_running, processes)), 15)


def test_a_workers_own_reason_to_leave_reaches_whoever_waits(model: Path) -> None:
    # Settling what failed here: the worker stops at once, saying so, while the head sees only that it has gone.
    fault = FaultSpec(rank=1, phase="after", layer=0, kind="leave", cmd="decode", message="a tooth of the gear broke")
    with start(model, faults=(fault,)) as llm, pytest.raises(EngineDead, match="a tooth of the gear broke") as caught:
        for _ in llm.stream(PROMPTS[1], LONG):
            pass
    assert caught.value.rank == 1


def test_a_rank_that_diverges_is_named_even_when_the_engine_is_idle(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", kind="diverge", cmd="ping")
    with start(model, faults=(fault,), idle_ping_s=0.2) as llm:

        def death() -> bool:
            return llm._client.death is not None

        assert wait_until(death, NOTICED_S)
        with pytest.raises(EngineDead, match="rank 1 differs from rank 0") as caught:
            llm.generate(PROMPTS[:1], GREEDY)
        assert caught.value.rank == 1


def test_more_ranks_than_the_nodes_can_hold_are_refused_with_what_is_missing(model: Path) -> None:
    with pytest.raises(PlacementError) as caught:
        start(model, ep_size=64, placement_timeout_s=2)
    for part in ("64 ranks with 1 CPU each", "The nodes offer", "8 CPU", "Missing: 56 CPU", "--ep-size"):
        assert part in caught.value.message
    with start(model) as llm:  # and nothing of it is in the way
        assert len(pids(llm)) == 2


def test_cores_that_others_use_are_named_when_the_wait_is_over(model: Path) -> None:
    with start(model, num_cpus_per_rank=3), pytest.raises(PlacementError, match="that others use now"):
        start(model, num_cpus_per_rank=3, placement_timeout_s=1.5)


def test_a_workers_failed_load_reaches_the_driver_with_rank_and_reason(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", cmd="load", message="no such tensor here")
    with pytest.raises(StartError, match="rank 1 could not load: no such tensor here"):
        start(model, faults=(fault,))


def test_a_worker_that_dies_during_the_start_is_named(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", kind="kill", cmd="load")
    with pytest.raises(StartError, match="rank 1"):
        start(model, faults=(fault,))


def test_leaving_a_stream_early_aborts_its_request_on_every_rank(model: Path) -> None:
    with start(model) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert wait_until(lambda: llm.stats()["running"] == 0, 5)
        stats = llm.stats()
        assert stats["free_blocks"] == stats["total_blocks"]


def test_an_async_stream_grows_and_ends_with_the_whole_answer(model: Path, expected: list[list[int]]) -> None:
    async def read(llm: LLM) -> list[list[int]]:
        return [item.outputs[0].token_ids async for item in llm.astream(PROMPTS[0], GREEDY)]

    with start(model) as llm:
        items = asyncio.run(read(llm))
    assert items[-1] == expected[0]
    assert all(items[-1][: len(item)] == item for item in items)
    assert len(items) > 1


def test_a_request_that_is_refused_leaves_the_others_alone(model: Path, expected: list[list[int]]) -> None:
    with start(model) as llm:
        outputs = llm.generate([[1] * 2000, PROMPTS[1]], GREEDY, progress=False)
    assert outputs[0].outputs[0].error_code == "context_length_exceeded"
    assert outputs[1].outputs[0].token_ids == expected[1]


def test_mistakes_that_files_show_are_found_before_anything_starts(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM', which is not supported"),
        ({"num_hidden_layers": 4}, "missing from the checkpoint"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(CheckpointError, match=message):
            start(folder)
    with pytest.raises(ConfigError, match="did you mean 'model'"):
        LLM(modle=str(folder))


def test_an_address_of_another_ray_than_the_one_that_was_joined_is_refused_with_both(model: Path) -> None:
    joined = ray.get_runtime_context().gcs_address
    with pytest.raises(ConfigError, match=f"'203.0.113.5:6379', and this process has joined the Ray at '{joined}'"):
        start(model, address="203.0.113.5:6379")
    assert ray.is_initialized()


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, whose greedy output spells the alphabet over and over: a is followed by b."""
    folder = write_tokenizer(tmp_path_factory.mktemp("speaking"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    letters = [tokenizer.encode(letter)[0] for letter in ascii_lowercase]
    successors = list(range(VOCAB_SIZE))
    for letter, following in pairwise([*letters, letters[0]]):
        successors[letter] = following
    return write_succ(folder, successors)


def check_several_answers(llm: LLM, params: SamplingParams) -> None:
    """What goes through the driver: n answers, log probabilities, bad words, priority, time limit."""
    several = dataclasses.replace(params, n=2, max_tokens=3, logprobs=1, prompt_logprobs=0, bad_words=["d"])
    each = llm.generate_each(["a", "x"], several, priority=[1, 0], timeout_s=60, progress=False)
    assert [result.prompt for result in each] == ["a", "x"]
    (result,) = llm.chat([{"role": "user", "content": "c"}], several, priority=1, timeout_s=60)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    for answer in result.outputs:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
    streamed = list(llm.stream("c", several))
    assert streamed[-1].finished
    for index in (0, 1):
        text = streamed[-1].outputs[index].text
        assert "d" not in text
        assert "".join(item.outputs[index].delta for item in streamed) == text
    with pytest.raises(RequestError, match="prompt 1: prompt_token_ids holds 320"):
        llm.generate(["a", [VOCAB_SIZE]], params)
    with pytest.raises(RequestError, match="2 prompts were given and one can be streamed"):
        llm.stream(["a", "b"], params)  # type: ignore[list-item]


def test_text_goes_in_and_comes_out_the_same_at_every_number_of_ranks(speaking: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    for ep_size in (1, 2):
        with start(speaking, ep_size=ep_size, max_num_batched_tokens=64) as llm:
            texts = [output.outputs[0].text for output in llm.generate(["a", "x"], params, progress=False)]
            assert texts == ["bcdefghijklm", "yzabcdefghij"]
            one = llm.generate("a", SamplingParams(temperature=0, max_tokens=20, stop=["ghi", "k"]))[0].outputs[0]
            assert (one.text, one.finish_reason, one.stop_reason) == ("bcdef", "stop", "ghi")
            pieces = [item.outputs[0].delta for item in llm.stream("m", params)]
            assert "".join(pieces) == "nopqrstuvwxy"
            assert len(pieces) > 1
            chat = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=0, max_tokens=1))
            assert chat[0].prompt_token_ids[-1] == llm.tokenizer.encode(" ")[0]  # type: ignore[union-attr]
            check_several_answers(llm, params)
            assert wait_until(lambda: llm.stats()["running"] == 0, 5)  # the stopped one too was ended on every rank


def test_text_for_a_checkpoint_without_a_tokenizer_is_refused_with_what_to_do(model: Path) -> None:
    with start(model, ep_size=1) as llm:
        with pytest.raises(RequestError, match="give token ids"):
            llm.generate("hello")
        with pytest.raises(RequestError, match="use stop_token_ids"):
            llm.generate([[1]], SamplingParams(stop="x"))
        assert llm.tokenizer is None
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def test_drivers_that_attach_share_the_engine_leave_it_as_it_is_and_are_told_of_its_end(
    model: Path, expected: list[list[int]]
) -> None:
    with start(model, ep_size=1, name="shared") as llm:
        with attach("shared") as guest:
            assert [output.outputs[0].token_ids for output in guest.generate(PROMPTS, GREEDY)] == expected
            assert guest.stats()["ranks"] == llm.stats()["ranks"]
            assert (guest.name, guest.max_model_len) == (llm.name, llm.max_model_len)
            left = guest.stream(PROMPTS[0], LONG)
            next(left)
        assert wait_until(lambda: llm.stats()["running"] == 0, 5)
        assert tokens_of(llm) == expected
        with pytest.raises(UserError, match="no engine named 'theirs' runs on this Ray; those that run are 'shared'"):
            attach("theirs")
        waiting, stopped = attach("shared"), attach("shared")
        stream = waiting.stream(PROMPTS[0], LONG)
        next(stream)
    with pytest.raises(EngineDead, match="the engine was stopped"):
        for _ in stream:
            pass
    with pytest.raises(EngineDead):
        stopped.stats()
    waiting.close()
    stopped.close()
    with pytest.raises(UserError, match="none runs there at all"):
        attach("shared")


@pytest.mark.nightly
def test_a_driver_that_attached_is_told_when_the_head_is_killed(model: Path) -> None:
    with start(model, ep_size=1) as llm, attach(llm.name) as guest:
        stream = guest.stream(PROMPTS[0], LONG)
        next(stream)
        os.kill(pids(llm)[0], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"has gone|was lost"):
            for _ in stream:
                pass
