# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's figures: what it says of itself while it loads, works, stands still and has ended."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import FaultSpec
from tests.fixtures.succ import write_succ
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
        assert json.loads(json.dumps(told)) == told
    finally:
        process.close()
