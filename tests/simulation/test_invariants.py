# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a run may end with, and what is told when it ended otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import Output
from tests.simulation.catalogue import catalogue
from tests.simulation.faults import FrameFault, ProcessFault
from tests.simulation.invariants import Got, LifeResult, violations
from tests.simulation.oracle import Oracle
from tests.simulation.schedule import EngineFault, Fault
from tests.simulation.tiny_model import write_model
from tests.simulation.workload import Ask, Life, Workload

ENTRY = next(index for index, entry in enumerate(catalogue()) if entry.name == "greedy 5")
WORKLOAD = Workload(
    ep_size=2,
    ep_protocol="v2",
    max_batch_size=4,
    max_num_batched_tokens=16,
    max_model_len=40,
    block_size=4,
    num_blocks=10,
    max_queue_len=100,
    agreement_interval=4,
    scrub=False,
    lives=(),
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(write_model(tmp_path_factory.mktemp("model")))


class Run:
    """One life with one request, and what is said of it."""

    def __init__(self, oracle: Oracle, **asked: object) -> None:
        self.oracle = oracle
        self.num_blocks = WORKLOAD.num_blocks
        self.ask = replace(Ask(0.0, 0, ENTRY, 4), **asked)  # type: ignore[arg-type]
        self.got = Got(self.ask, is_sent=True, is_over=True)
        self.result = LifeResult(0, "fine", "", [self.got])
        self.tokens = oracle.answer(self.ask.entry, 0, 4).token_ids

    def outputs(self, *outputs: Output) -> Run:
        """What came to its front, and what its reader saw."""
        self.got.outputs[:] = self.got.read[:] = outputs
        return self

    def ends(self, tokens: tuple[int, ...], reason: str, code: str | None = None) -> Run:
        """One output with some tokens and the end."""
        error = None if code is None else (code, "")
        return self.outputs(Output(1, 0, tokens, reason, None, error))  # type: ignore[arg-type]

    def fired(self, *faults: Fault, end: str = "fine") -> Run:
        """What went wrong, and how the life ended."""
        self.result.fired, self.result.end = faults, end
        return self

    def lines(self) -> list[str]:
        """What is wrong."""
        workload = replace(WORKLOAD, num_blocks=self.num_blocks, lives=(Life(1, (self.ask,)),))
        return violations(workload, self.oracle, [self.result])


def test_the_whole_answer_with_its_end_is_right(oracle: Oracle) -> None:
    run = Run(oracle)

    assert run.ends(run.tokens, "length").lines() == []


@pytest.mark.parametrize(
    ("tokens", "reason", "said"),
    [
        ((1, 2), "length", "it got (1, 2) instead of"),
        ((), "length", "it ended by length after ()"),
        ((), "abort", "it was aborted, and nobody asked"),
        ((), "stop", "it ended by stop after ()"),
    ],
)
def test_other_tokens_and_other_ends_are_told(oracle: Oracle, tokens: tuple[int, ...], reason: str, said: str) -> None:
    assert said in "\n".join(Run(oracle).ends(tokens, reason).lines())


def test_no_end_two_ends_and_a_reader_that_waits_for_ever_are_told(oracle: Oracle) -> None:
    run = Run(oracle)
    assert "it got no end" in run.outputs().lines()[0]

    whole = Output(1, 0, run.tokens, "length")
    assert "2 ends" in run.outputs(whole, Output(1, 0, (), "length")).lines()[0]

    run.got.is_over = False
    assert "never came to an end" in run.outputs(whole).lines()[0]


def test_a_reader_must_get_all_that_came(oracle: Oracle) -> None:
    run = Run(oracle)
    run.ends(run.tokens, "length").got.read.clear()

    assert "its reader got 0 outputs" in run.lines()[0]


def test_a_request_without_a_limit_has_all_that_there_is_room_for(oracle: Oracle) -> None:
    run = Run(oracle, max_tokens=None)
    run.num_blocks = 3
    longest = 3 * WORKLOAD.block_size + 1 - len(run.ask.of.prompt)
    tokens = oracle.answer(ENTRY, 0, longest).token_ids

    assert run.ends(tokens, "length").lines() == []
    assert "it must end by length" in run.ends(tokens[:-1], "length").lines()[0]


def test_a_part_is_right_after_an_abort_or_a_stop_of_the_front(oracle: Oracle) -> None:
    aborted = Run(oracle, then="abort", after_tokens=2)
    assert aborted.ends(aborted.tokens[:2], "abort").lines() == []

    finished = Run(oracle, then="finish", after_tokens=2)
    assert finished.ends(finished.tokens[:2], "stop").lines() == []


def test_errors_need_their_cause(oracle: Oracle) -> None:
    assert "deadline_exceeded" in Run(oracle).ends((), "error", "deadline_exceeded").lines()[0]
    assert Run(oracle, timeout_s=1.0).ends((), "error", "deadline_exceeded").lines() == []

    fault = EngineFault(0, 1, "inside", "fail", first_token=catalogue()[ENTRY].prompt[0])
    failed = Run(oracle).ends((), "error", "command_failed")
    assert "command_failed" in failed.lines()[0]
    assert failed.fired(fault).lines() == []
    assert failed.fired(replace(fault, first_token=7)).lines() != []


def test_a_life_ends_only_as_its_faults_allow(oracle: Oracle) -> None:
    dead = Run(oracle).outputs()
    dead.got.error = EngineDead("gone")
    kill = ProcessFault(0, "rank 1", "kill", at_turn=100)

    assert "ended with link_lost" in dead.fired(end="link_lost").lines()[0]
    assert dead.fired(kill, end="link_lost").lines() == []
    assert dead.fired(kill, end="desync").lines() != []
    assert dead.fired(FrameFault(0, "head", "rank 1", 5, "duplicate"), end="session_error").lines() == []


def test_a_front_whose_connection_broke_is_not_owed_an_answer_and_others_are(oracle: Oracle) -> None:
    run = Run(oracle).outputs()
    run.got.error = EngineDead("lost")

    assert run.fired(FrameFault(0, "head", "front 0", 5, "close")).lines() == []
    assert run.fired(FrameFault(0, "head", "front 1", 5, "close")).lines() != []


def test_refusals_are_for_what_cannot_be_served_alone(oracle: Oracle) -> None:
    refused = Output(1, 0, (), "error", None, ("kv_cache_exceeded", ""), is_refusal=True)
    long = next(index for index, entry in enumerate(catalogue()) if entry.name == "greedy 21")

    assert "refused with kv_cache_exceeded" in Run(oracle).outputs(refused).lines()[0]

    run = Run(oracle, entry=long, max_tokens=12)
    run.num_blocks = 7  # and 32 tokens need eight
    assert run.outputs(refused).lines() == []
    assert "should have been refused" in "\n".join(run.ends((175,), "length").lines())
