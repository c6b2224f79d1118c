# SPDX-License-Identifier: MIT OR Apache-2.0
"""A command that fails: at every command, phase and rank, for 2 and 3 ranks.

What must hold after each fault: every rank stays up and leaves in order, every request is answered exactly once,
whoever the failure does not belong to gets the tokens of a run without it, and every block is free again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import PHASES, FaultSpec, Phase
from metrale_ray.errors import Desync, LinkLost, StartError
from metrale_ray.protocol.commands import command_rows
from tests.fixtures.tiny import write_tiny
from tests.harness import Answer, Driver, Outcome, run_engine

# Prompts of several lengths over a budget of 12 tokens: chunks, mixed steps, batches, and single rows at both ends.
PROMPTS = [[11, *range(20, 40)], [12, 50, 51], [13, *range(60, 75)], [14, 80]]
SETTINGS: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 64}
EP_SIZES = (pytest.param(2, marks=pytest.mark.nightly), 3)
WITH_ROWS = ("prefill_chunk", "mixed_step", "decode_batch", "decode")
FAILS = "injected fault"


def script(driver: Driver) -> None:
    driver.submit(PROMPTS[0])
    driver.engine.step()  # a chunk alone
    for prompt in PROMPTS[1:]:
        driver.submit(prompt)
    driver.run()
    driver.engine.ping()
    driver.submit(PROMPTS[0][:3])  # at the end one sequence alone: single decodes
    driver.run()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe")


@pytest.fixture(scope="module")
def healthy(model: Path) -> Outcome:
    """The same jobs without a fault, on one rank."""
    return run_engine(model, script, **SETTINGS)


@pytest.fixture(scope="module")
def commands(model: Path) -> dict[str, list[tuple[int, int]]]:
    """By command name: (number in the epoch, number of rows) of each command that `script` gives rise to."""
    seen: dict[str, list[tuple[int, int]]] = {}

    def watched(driver: Driver) -> None:
        replica = driver.engine._replica
        run = replica.run

        def note(frame: Any) -> Any:
            name = frame.command.code.name.lower()
            seen.setdefault(name, []).append((frame.envelope.seq, len(command_rows(frame.command))))
            return run(frame)

        replica.run = note  # type: ignore[method-assign]
        script(driver)

    run_engine(model, watched, **SETTINGS)
    return seen


def places(ep_size: int) -> Iterator[tuple[int, Phase]]:
    for rank in range(ep_size):
        for phase in PHASES:
            yield rank, phase


def check_the_rest(outcome: Outcome, healthy: Outcome, failed: set[int]) -> None:
    """Everybody but `failed` got what a run without a fault gives; nothing is left; every rank left in order."""
    assert outcome.head_error is None
    assert all(left is None for left in outcome.left.values()), outcome.left
    for number, expected in healthy.answers.items():
        answer = outcome.answers[number]
        assert answer.answers == 1
        if number in failed:
            assert_failed(answer)
        else:
            assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason), number
    stats = outcome.stats
    assert (stats["running"], stats["waiting"], stats["free_blocks"]) == (0, 0, stats["total_blocks"])


def assert_failed(answer: Answer) -> None:
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert answer.error[0] == "command_failed"
    assert FAILS in answer.error[1]


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_fault_that_fires_once_costs_nothing_where_others_can_prove_innocence(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]], name: str, ep_size: int
) -> None:
    numbers = commands[name]
    number, num_rows = numbers[len(numbers) // 2]
    for rank, phase in places(ep_size):
        fault = FaultSpec(rank=rank, phase=phase, layer=1, command=number, message=FAILS)
        outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
        assert outcome.stats["failed_commands"] == 1, (rank, phase)
        # A row that was alone in its step has nobody to prove that the failure was not its own.
        failed = {n for n, answer in outcome.answers.items() if answer.finish_reason == "error"}
        assert len(failed) == (1 if num_rows == 1 else 0), (rank, phase)
        check_the_rest(outcome, healthy, failed)


@pytest.mark.parametrize("blame", [False, True], ids=["searched", "blamed"])
@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_a_fault_of_one_sequence_fails_that_sequence_alone(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]], name: str, ep_size: int, blame: bool
) -> None:
    # The victim has a row in the command at which its fault begins.
    victim, first_token = {"prefill_chunk": (0, 11), "decode": (4, 11)}.get(name, (2, 13))
    number = commands[name][-1 if name == "decode" else 1 if name == "decode_batch" else 0][0]
    for rank, phase in places(ep_size):
        fault = FaultSpec(
            rank=rank, phase=phase, layer=2, first_token=first_token, command=number, blame=blame, message=FAILS
        )
        outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
        failed = {n for n, answer in outcome.answers.items() if answer.finish_reason == "error"}
        assert victim in failed, (rank, phase)
        check_the_rest(outcome, healthy, {victim} if name != "prefill_chunk" else {0, 4})


@pytest.mark.parametrize(("ep_size", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("name", ["free_slot", "ping"])
@pytest.mark.parametrize("phase", ["validation", "reply"])
def test_a_command_without_rows_that_fails_once_is_done_again(
    model: Path,
    healthy: Outcome,
    commands: dict[str, list[tuple[int, int]]],
    name: str,
    phase: Phase,
    ep_size: int,
    rank: int,
) -> None:
    fault = FaultSpec(rank=rank, phase=phase, command=commands[name][0][0], message=FAILS)
    outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
    assert outcome.stats["failed_commands"] == 1
    check_the_rest(outcome, healthy, set())


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["free_slot", "ping"])
def test_a_command_without_rows_that_fails_again_and_again_is_its_ranks_fault(
    model: Path, name: str, rank: int
) -> None:
    fault = FaultSpec(rank=rank, phase="validation", cmd=name, message=FAILS)
    outcome = run_engine(model, script, ep_size=3, faults=(fault,), **SETTINGS)
    assert isinstance(outcome.head_error, LinkLost)
    assert outcome.head_error.rank == rank
    assert FAILS in outcome.head_error.message
    assert all(isinstance(left, LinkLost) for left in outcome.left.values())  # the head has closed the links


@pytest.mark.parametrize(("ep_size", "rank"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
@pytest.mark.parametrize("phase", ["validation", "reply"])
def test_a_load_that_fails_ends_the_start_with_the_rank_and_its_reason(
    model: Path, ep_size: int, rank: int, phase: Phase
) -> None:
    fault = FaultSpec(rank=rank, phase=phase, cmd="load", message=FAILS)
    outcome = run_engine(model, script, ep_size=ep_size, faults=(fault,), **SETTINGS)
    assert isinstance(outcome.head_error, StartError)
    assert f"rank {rank} could not load: {FAILS}" in outcome.head_error.message


@pytest.mark.parametrize("rank", [1, 2])
def test_a_worker_that_fails_its_shutdown_leaves_all_the_same(model: Path, healthy: Outcome, rank: int) -> None:
    fault = FaultSpec(rank=rank, phase="validation", cmd="shutdown", message=FAILS)
    outcome = run_engine(model, script, ep_size=3, faults=(fault,), **SETTINGS)
    assert outcome.tokens() == healthy.tokens()
    assert isinstance(outcome.left.pop(f"rank {rank}"), LinkLost)  # it waited for a command, and the head had gone
    assert set(outcome.left.values()) == {None}


@pytest.mark.parametrize("ep_size", [2, 3])
def test_two_faulty_sequences_are_both_found_each_with_its_own_reason(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]], ep_size: int
) -> None:
    number = commands["decode_batch"][1][0]
    faults = (
        FaultSpec(rank=1, phase="before", first_token=12, command=number, message=FAILS + " A"),
        FaultSpec(rank=0, phase="after", layer=2, first_token=14, command=number, message=FAILS + " B"),
    )
    outcome = run_engine(model, script, ep_size=ep_size, faults=faults, **SETTINGS)
    assert [outcome.answers[n].error for n in (1, 3)] == [
        ("command_failed", FAILS + " A"),
        ("command_failed", FAILS + " B"),
    ]
    check_the_rest(outcome, healthy, {1, 3})


@pytest.mark.parametrize("rank", [0, 1])
def test_poisoned_sequences_are_prefilled_anew(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]], rank: int
) -> None:
    fault = FaultSpec(rank=rank, phase="after", kind="poison", command=commands["decode_batch"][1][0])
    outcome = run_engine(model, script, ep_size=2, faults=(fault,), **SETTINGS)
    assert outcome.stats["failures_by_kind"] == {"poisoned": 1}
    check_the_rest(outcome, healthy, set())


def test_a_sequence_that_is_poisoned_twice_is_failed(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]]
) -> None:
    number = commands["decode_batch"][1][0]
    fault = FaultSpec(rank=1, phase="after", kind="poison", first_token=13, command=number, message=FAILS)
    outcome = run_engine(model, script, ep_size=2, faults=(fault,), **SETTINGS)
    answer = outcome.answers.pop(2)
    assert (answer.finish_reason, answer.error) == ("error", ("slot_poisoned", FAILS))
    others = Outcome({n: a for n, a in healthy.answers.items() if n != 2}, healthy.stats, {})
    check_the_rest(outcome, others, set())


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_diverges_is_named_with_the_first_differing_command(
    model: Path, commands: dict[str, list[tuple[int, int]]], rank: int
) -> None:
    number = commands["decode_batch"][1][0]
    fault = FaultSpec(rank=rank, phase="validation", kind="diverge", command=number)
    outcome = run_engine(model, script, ep_size=3, faults=(fault,), **SETTINGS)
    assert isinstance(outcome.head_error, Desync)
    assert (outcome.head_error.rank, outcome.head_error.seq) == (rank, number - 1)


def test_every_row_failing_on_one_rank_is_the_ranks_fault(model: Path) -> None:
    faults = tuple(FaultSpec(rank=1, phase="before", cmd=name, message=FAILS) for name in ("decode_batch", "decode"))
    outcome = run_engine(model, script, ep_size=2, faults=faults, **SETTINGS)
    assert isinstance(outcome.head_error, LinkLost)
    assert outcome.head_error.rank == 1
    assert FAILS in outcome.head_error.message


def test_two_faulty_sequences_alone_on_different_ranks_are_failed_and_the_engine_goes_on(model: Path) -> None:
    faults = (
        FaultSpec(rank=1, phase="before", first_token=12, cmd="decode_batch", message="A"),
        FaultSpec(rank=1, phase="before", first_token=12, cmd="decode", message="A"),
        FaultSpec(rank=0, phase="after", first_token=14, cmd="decode_batch", message="B"),
        FaultSpec(rank=0, phase="after", first_token=14, cmd="decode", message="B"),
    )

    def pair(driver: Driver) -> None:
        driver.submit(PROMPTS[1])
        driver.submit(PROMPTS[3])
        driver.run()

    outcome = run_engine(model, pair, ep_size=2, faults=faults, **SETTINGS)
    assert outcome.head_error is None
    assert [answer.error for answer in outcome.answers.values()] == [("command_failed", "A"), ("command_failed", "B")]


def test_two_ranks_that_blame_in_one_step_each_have_their_say(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]]
) -> None:
    number = commands["decode_batch"][1][0]
    faults = tuple(
        FaultSpec(
            rank=rank, phase="validation", first_token=token, command=number, blame=True, message=f"{FAILS} {rank}"
        )
        for rank, token in ((1, 12), (2, 14))
    )
    outcome = run_engine(model, script, ep_size=3, faults=faults, **SETTINGS)
    assert [outcome.answers[n].error for n in (1, 3)] == [
        ("command_failed", FAILS + " 1"),
        ("command_failed", FAILS + " 2"),
    ]
    check_the_rest(outcome, healthy, {1, 3})


def test_more_faulty_sequences_than_one_search_can_find_are_all_failed_and_the_others_are_not(model: Path) -> None:
    guilty = range(0, 32, 2)
    faults = tuple(FaultSpec(rank=1, phase="inside", first_token=100 + n, message=FAILS) for n in guilty)

    def crowd(driver: Driver) -> None:
        for number in range(32):
            driver.submit([100 + number, 5])
        driver.run()

    settings = SETTINGS | {"max_batch_size": 32, "max_num_batched_tokens": 64}
    outcome = run_engine(model, crowd, ep_size=2, faults=faults, **settings)
    assert outcome.head_error is None
    failed = [number for number, answer in outcome.answers.items() if answer.finish_reason == "error"]
    assert failed == list(guilty)
    assert {answer.finish_reason for n, answer in outcome.answers.items() if n % 2} == {"length"}


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("name", ["decode_batch", "mixed_step"])
def test_the_first_and_the_last_reduction_are_no_exception(
    model: Path, healthy: Outcome, commands: dict[str, list[tuple[int, int]]], name: str, layer: int
) -> None:
    for number, _ in commands[name]:
        for rank in (0, 1):
            fault = FaultSpec(rank=rank, phase="after", layer=layer, command=number, message=FAILS)
            check_the_rest(run_engine(model, script, ep_size=2, faults=(fault,), **SETTINGS), healthy, set())


@pytest.mark.parametrize("ep_size", EP_SIZES)
@pytest.mark.parametrize("name", ["prefill_chunk", "decode"])
def test_v1_confines_a_failure_in_the_same_way(model: Path, healthy: Outcome, name: str, ep_size: int) -> None:
    settings = SETTINGS | {"ep_protocol": "v1", "max_batch_size": 1}
    for rank, phase in places(ep_size):
        fault = FaultSpec(rank=rank, phase=phase, layer=1, first_token=13, cmd=name, message=FAILS)
        check_the_rest(run_engine(model, script, ep_size=ep_size, faults=(fault,), **settings), healthy, {2})
