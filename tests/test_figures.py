# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's figures: what it says of itself while it loads, works, stands still and has ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import FaultSpec
from metrale_ray.figures import Figures, HeadView, document_text
from metrale_ray.protocol.front.messages import MAX_DOCUMENT_CHARS
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.request import RequestId
from tests.fixtures.succ import write_succ
from tests.harness import Driver, run_engine
from tests.test_head import GREEDY, LONG, TIMEOUT_S, Process, running, tokens_of, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_succ(tmp_path_factory.mktemp("succ"))


def test_a_front_is_told_how_the_engine_is_and_where_its_ranks_are(model: Path) -> None:
    with running(model) as (process, client):
        process.head.note_places(
            [{"rank": rank, "pid": 100 + rank, "node": f"n{rank}", "address": "127.0.0.1"} for rank in range(2)]
        )
        told = client.ask(TIMEOUT_S)
        assert (told["phase"], told["why"], told["epoch"]) == ("ready", None, 1)
        assert (told["running"], told["waiting"], told["has_work"], told["progress_age_s"]) == (0, 0, False, 0.0)
        places = [(rank["rank"], rank["state"], rank["pid"], rank["node"]) for rank in told["ranks"]]
        assert places == [(0, "ready", 100, "n0"), (1, "ready", 101, "n1")]
        assert tokens_of(client.submit([1], GREEDY)) == list(range(2, 10))


def test_what_runs_and_waits_is_work_and_commands_that_complete_keep_its_age_small(model: Path) -> None:
    with running(model, max_batch_size=2) as (process, client):
        handles = [client.submit([n], LONG) for n in range(1, 6)]
        handles[0].get(TIMEOUT_S)
        until(lambda: process.head.figures()["waiting"] == 3)
        told = client.ask(TIMEOUT_S)
        assert (told["running"], told["waiting"], told["has_work"]) == (2, 3, True)
        assert 0 <= told["progress_age_s"] < TIMEOUT_S
        for handle in handles:
            handle.abort()
        until(lambda: not process.head.figures()["has_work"])
        told = asyncio.run(client.aask(TIMEOUT_S))
        assert (told["running"], told["waiting"], told["progress_age_s"]) == (0, 0, 0.0)


def test_a_command_that_does_not_complete_is_named_and_its_age_grows(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", kind="slow", seconds=0.5, cmd="prefill_chunk")
    with running(model, faults=(fault,)) as (process, client):
        handle = client.submit([1, 2, 3], GREEDY)
        until(lambda: process.head.figures()["progress_age_s"] > 0.2)
        told = client.ask(TIMEOUT_S)
        assert (told["command"], told["has_work"], told["running"]) == ("prefill_chunk", True, 1)
        assert len(tokens_of(handle)) == 8
        until(lambda: process.head.figures()["progress_age_s"] == 0.0)


def test_the_figures_hold_after_the_engine_has_ended_and_say_why(model: Path) -> None:
    fault = FaultSpec(rank=1, phase="validation", kind="diverge", cmd="decode")
    process = Process(model, 2, faults=(fault,))
    try:
        process.wait_ready()
        with process.front() as client:
            client.wait_opened(TIMEOUT_S)
            client.submit([1], GREEDY)
            process.wait_ended()
        told: dict[str, Any] = process.head.figures()
        assert told["phase"] == "ended"
        assert "rank 1 differs" in told["why"]
        assert (told["running"], told["has_work"]) == (0, False)
        assert [rank["state"] for rank in told["ranks"]] == ["ended", "failed"]
        assert told["digest_mismatches"] == 1
        assert told["commands"]["decode"]["by_status"] == {"desync": 1}
        assert told["commands"]["prefill_chunk"]["by_status"] == {"ok": 1}
        assert json.loads(json.dumps(told)) == told
    finally:
        process.close()


def after(model: Path, script: Any, ep_size: int = 1, **settings: Any) -> dict[str, Any]:
    """The figures of an engine that has run `script`."""
    told: dict[str, Any] = {}

    def work(driver: Driver) -> None:
        script(driver)
        told.update(Figures(ep_size, 1).document(HeadView("ready", engine=driver.engine)))

    outcome = run_engine(model, work, ep_size=ep_size, **settings)
    assert outcome.head_error is None
    return told


@pytest.mark.parametrize("ep_size", [1, 3])
def test_everything_that_an_engine_did_is_counted_once(model: Path, ep_size: int) -> None:
    def script(driver: Driver) -> None:
        for first in range(5):
            driver.submit([first, 2, 3], GREEDY)
        driver.run()
        driver.engine.ping()

    told = after(model, script, ep_size)
    assert (told["prompt_tokens"], told["generation_tokens"]) == (15, 40)
    assert told["finished"] == {"stop": 0, "length": 5, "abort": 0, "error": 0}
    num_computed = 5 * (3 + 8 - 1)  # the last token of each is sampled and never computed
    assert sum(told["expert_tokens"]) == num_computed * 2 * 2  # two experts for each, in two layers
    assert len(told["expert_tokens"]) == 4
    for histogram in told["seconds"].values():
        assert sum(histogram["counts"]) == 5
    seconds = {name: histogram["sum_s"] for name, histogram in told["seconds"].items()}
    assert seconds["end_to_end"] == pytest.approx(seconds["queue"] + seconds["prefill"] + seconds["decode"])
    ran = {name: command["by_status"] for name, command in told["commands"].items() if command["by_status"]}
    assert set(ran) >= {"load", "mixed_step", "decode_batch", "free_slot", "ping"}
    assert all(statuses == {"ok": statuses["ok"]} for statuses in ran.values())
    num_commands = sum(statuses["ok"] for statuses in ran.values())
    assert [rank["replies"] for rank in told["ranks"]] == [num_commands] * ep_size
    decode = told["commands"]["decode_batch"]
    assert all(decode[f"{phase}_s"] > 0 for phase in ("plan", "send", "run", "sample", "deliver"))
    assert decode["run_s"] >= decode["reduce_s"] >= 0
    assert [(rank["first_expert"], rank["num_experts"]) for rank in told["ranks"]] == (
        [(0, 4)] if ep_size == 1 else [(0, 2), (2, 1), (3, 1)]
    )
    for rank in told["ranks"][1:]:
        assert 0 <= rank["last_lag_s"] <= rank["max_lag_s"] <= rank["lag_s"]
        assert rank["computed_s"] > 0
    assert told["cache"]["free_blocks"] == told["cache"]["total_blocks"]
    assert (told["has_work"], told["command"], told["digest_mismatches"]) == (False, None, 0)


def test_a_failed_command_and_a_failed_request_are_counted_as_such(model: Path) -> None:
    def script(driver: Driver) -> None:
        driver.submit([7, 2, 3], GREEDY)
        driver.submit([1, 2, 3], GREEDY)
        driver.run()

    fault = FaultSpec(rank=0, phase="validation", first_token=7, blame=True)
    told = after(model, script, faults=(fault,))
    assert told["finished"] == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    statuses = [command["by_status"] for command in told["commands"].values()]
    assert sum(each.get("failed", 0) for each in statuses) >= 1
    assert sum(told["seconds"]["queue"]["counts"]) == 2
    assert sum(told["seconds"]["end_to_end"]["counts"]) == 1


def test_a_preempted_sequence_is_counted_and_its_prompt_once(model: Path) -> None:
    def script(driver: Driver) -> None:
        for first in range(4):
            driver.submit([first] * 8, TokenParams(temperature=0, max_tokens=40, ignore_eos=True))
        driver.run()

    block_bytes = 4 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, their size, bytes of a number
    told = after(model, script, block_size=4, kv_cache_memory=15 * block_bytes)
    assert told["preemptions"] > 0
    assert (told["prompt_tokens"], told["generation_tokens"]) == (32, 160)
    assert [sum(histogram["counts"]) for histogram in told["seconds"].values()] == [4] * 4


def test_aborts_and_stops_are_told_apart_wherever_they_meet_a_request(model: Path) -> None:
    def script(driver: Driver) -> None:
        for _ in range(3):
            driver.submit([1, 2, 3], LONG)
        driver.engine.abort(RequestId(0))
        driver.engine.step()
        driver.engine.abort(RequestId(1))
        driver.engine.finish(RequestId(2))
        driver.run()

    told = after(model, script)
    assert told["finished"] == {"stop": 1, "length": 0, "abort": 2, "error": 0}
    assert (told["running"], told["waiting"], told["has_work"]) == (0, 0, False)


def test_requests_that_are_not_taken_are_counted_by_their_code(model: Path) -> None:
    with running(model, ep_size=1) as (_, client):
        for prompt in ([1] * 5000, [1] * 5001, [10**6]):
            assert client.submit(prompt, GREEDY).get(TIMEOUT_S).finish_reason == "error"
        told = client.ask(TIMEOUT_S)
        assert told["rejected"]["context_length_exceeded"] == 2
        assert sum(told["rejected"].values()) == 3
        assert sum(told["finished"].values()) == 0
        assert (told["fronts"], told["refused_strangers"]) == (1, 0)


def test_the_sums_between_ranks_are_counted_with_their_bytes(model: Path) -> None:
    with running(model) as (_, client):
        assert len(tokens_of(client.submit([1, 2, 3], GREEDY))) == 8
        sums = client.ask(TIMEOUT_S)["collectives"]["all_reduce"]
        num_steps, hidden_size = 8, 320
        assert sums["count"] == num_steps * 2  # two layers
        assert sums["bytes"] == 2 * 4 * ((3 + 7) * hidden_size + num_steps)  # and the flag
        assert sums["seconds"] > 0


def test_the_figures_are_whole_at_every_moment_of_an_engine_at_work(model: Path) -> None:
    with running(model) as (process, client):
        keys = set(process.head.figures())
        handles = [client.submit([n], LONG, priority=n) for n in range(1, 7)]
        handles[0].get(TIMEOUT_S)
        for _ in range(300):
            told = process.head.figures()
            assert set(told) == keys
            assert json.loads(document_text(told)) == told
            assert (told["has_work"], told["running"] <= 4, told["waiting"] <= 12) == (True, True, True)
        for handle in handles:
            handle.abort()
        until(lambda: not process.head.figures()["has_work"])
        told = client.ask(TIMEOUT_S)
        assert told["finished"]["abort"] == 6
        assert told["cache"]["free_blocks"] == told["cache"]["total_blocks"]


def test_before_there_is_an_engine_every_key_is_there(model: Path) -> None:
    told = Figures(2, 1).document(HeadView("starting"))
    assert set(told) == set(after(model, lambda driver: None))
    assert [rank["state"] for rank in told["ranks"]] == ["starting", "starting"]
    assert told["ranks"][0]["replies"] == 0


def test_what_is_too_large_to_be_told_is_left_out_and_named() -> None:
    told = Figures(1, 1).document(HeadView("starting"))
    told["expert_tokens"] = [10**12] * (MAX_DOCUMENT_CHARS // 10)
    text = document_text(told)
    assert len(text) <= MAX_DOCUMENT_CHARS
    short = json.loads(text)
    assert (short["expert_tokens"], short["left_out"]) == ([], ["expert_tokens"])
    assert short["ranks"] == told["ranks"]
    told["ranks"] = [{"rank": rank, "node": "n" * 100} for rank in range(5000)]
    assert json.loads(document_text(told))["left_out"] == ["expert_tokens", "ranks"]
