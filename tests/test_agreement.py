# SPDX-License-Identifier: MIT OR Apache-2.0
"""Damage to one rank's memory is found, named and ends the group; a healthy group raises no alarm.

Each flip is of one bit, on one rank, at a command in the middle of a run. What is told: rank, command, field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.config import FaultSpec
from metrale_ray.errors import Desync
from metrale_ray.model.scrubbing import Scrubbing
from metrale_ray.protocol.commands import Cmd, Reply, Slot
from tests.fixtures.tiny import write_tiny
from tests.harness import Driver, Outcome, Script, run_engine

PROMPTS = [[11, *range(20, 31)], [12, 50, 51], [13, *range(60, 68)], [0, 80]]
SETTINGS: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 12, "block_size": 4, "max_model_len": 64}
EP_SIZES = (2, 3)
INTERVAL = 4
AT = 6  # the command at which memory is damaged: every sequence has settled tokens
STAGED = {"flip_token": "tokens", "flip_block": "blocks", "flip_length": "lengths"}


def script(driver: Driver) -> None:
    for prompt in PROMPTS:
        driver.submit(prompt)
    driver.run()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_moe", num_hidden_layers=2)


@pytest.fixture(scope="module")
def healthy(model: Path) -> Outcome:
    """The same jobs without damage, on one rank."""
    return run_engine(model, script, **SETTINGS)


def busy(driver: Driver) -> None:
    """Traffic that goes on for some intervals, whatever becomes of single requests."""
    for _ in range(3):
        script(driver)


def damaged(model: Path, ep_size: int, fault: FaultSpec, do: Script = busy, **settings: Any) -> tuple[Outcome, Desync]:
    """A run with `fault`, and the alarm that ended it. The tokens that left before it are in the outcome."""
    settings = {"agreement_interval": INTERVAL, **SETTINGS, **settings}
    outcome = run_engine(model, do, ep_size=ep_size, faults=(fault,), **settings)
    assert isinstance(outcome.head_error, Desync), outcome.head_error
    return outcome, outcome.head_error


def expected_rank(rank: int, ep_size: int) -> int:
    """Two ranks cannot say which of them is right: rank 1 is named, as the one that differs from the head."""
    return rank if ep_size > 2 else 1


def flips(kind: str, **fields: Any) -> Iterator[tuple[int, int, FaultSpec]]:
    for ep_size in EP_SIZES:
        for rank in range(ep_size):
            yield ep_size, rank, FaultSpec(rank, "validation", kind, command=AT, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", STAGED)
def test_a_flip_in_what_is_staged_is_found_at_that_command_before_a_token_leaves(
    model: Path, healthy: Outcome, kind: str
) -> None:
    for ep_size, rank, fault in flips(kind):
        outcome, alarm = damaged(model, ep_size, fault, agreement_interval=0)
        assert (alarm.rank, alarm.seq, alarm.field) == (expected_rank(rank, ep_size), AT, STAGED[kind])
        check_only_good_tokens_left(outcome, healthy)


def test_a_flip_in_an_attended_cache_row_is_found_within_one_interval(model: Path) -> None:
    for ep_size, rank, fault in flips("flip_kv", bit=1):
        _, alarm = damaged(model, ep_size, fault)
        assert (alarm.rank, alarm.field) == (expected_rank(rank, ep_size), "residual")
        assert_within_one_interval(alarm)


def test_a_flip_in_a_replicated_weight_is_found_within_one_interval(model: Path) -> None:
    for ep_size, rank, fault in flips("flip_weight"):
        _, alarm = damaged(model, ep_size, fault)
        assert alarm.rank == expected_rank(rank, ep_size)
        # Logits that are not finite let the head look at the memory at once.
        assert alarm.field in ("residual", "weights")
        assert_within_one_interval(alarm)


def assert_within_one_interval(alarm: Desync) -> None:
    """From the first step of the next interval on, before which there may be commands without rows."""
    assert alarm.seq is not None
    assert AT < alarm.seq <= AT + INTERVAL


# A router that differs spoils the sum of all ranks alike, so it shows in the choice of experts alone.
LAYER_TENSORS = {
    **dict.fromkeys(("input_layernorm", "qkv", "head_norms", "output"), "residual"),
    **dict.fromkeys(("post_attention_layernorm", "router"), "routing"),
}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", LAYER_TENSORS)
def test_every_replicated_tensor_of_a_layer_is_found_within_one_interval(model: Path, name: str, dtype: str) -> None:
    for layer, bit in ((0, 0), (0, 1), (1, 1)):
        fault = FaultSpec(1, "validation", "flip_weight", command=AT, tensor=f"layers.{layer}.{name}", bit=bit)
        _, alarm = damaged(model, 2, fault, dtype=dtype)
        assert_within_one_interval(alarm)
        if bit == 1:  # a value that vanished; what became NaN is so on all ranks, and their choices of experts differ
            assert alarm.field == LAYER_TENSORS[name], (layer, alarm)


def test_the_embedding_of_a_token_in_use_is_found_within_one_interval(model: Path) -> None:
    first = FaultSpec(1, "validation", "flip_weight", command=2, tensor="embedding")  # the row of token 0, a prompt's
    _, alarm = damaged(model, 2, first, agreement_interval=1)
    assert (alarm.rank, alarm.field) == (1, "residual")


# The final norm and the head are rank 0's alone, a row of the embedding may be of a token that never comes, and an
# expert is on one rank: what is computed with them is the same on all ranks, or on one.
SCRUB_ONLY = [
    (0, "flip_weight", "final_norm"),
    (0, "flip_weight", "head"),
    (1, "flip_weight", "embedding"),
    (0, "flip_expert", None),
    (1, "flip_expert", None),
    (1, "flip_expert", "layers.1.experts.gate_up"),
    (2, "flip_expert", "layers.0.experts.down"),
    (1, "flip_weight", "layers.1.qkv"),
]


@pytest.mark.parametrize(("rank", "kind", "tensor"), SCRUB_ONLY)
@pytest.mark.parametrize("num_parts", [pytest.param(1, marks=pytest.mark.nightly), 7])
def test_any_flipped_weight_is_found_by_one_pass_of_the_scrub(
    model: Path, rank: int, kind: Any, tensor: str | None, num_parts: int
) -> None:
    fault = FaultSpec(rank, "validation", kind, command=2, cmd="scrub", tensor=tensor)
    _, alarm = damaged(model, 3, fault, scrubs(num_parts), scrub=True)
    assert alarm.rank == rank
    assert alarm.seq is not None
    assert 2 <= alarm.seq < 2 + num_parts  # the load was command 1
    assert alarm.field == (tensor or "layers.0.experts.gate_up")
    assert f"rank {rank}" in alarm.message


def scrubs(num_parts: int) -> Script:
    """One pass of the scrub, and nothing else."""

    def do(driver: Driver) -> None:
        scrubbing = Scrubbing(num_parts)
        while not scrubbing.num_passes:
            assert driver.engine._orders.run(scrubbing.next({})).ok

    return do


def test_a_replicated_weight_is_found_by_a_scrub_without_sums_of_the_load(model: Path) -> None:
    for ep_size, rank, fault in flips("flip_weight"):
        early = FaultSpec(fault.rank, "validation", "flip_weight", command=2, tensor="embedding")
        _, alarm = damaged(model, ep_size, early, scrubs(1), scrub=False)
        assert (alarm.rank, alarm.seq, alarm.field) == (expected_rank(rank, ep_size), 2, "weights")


def test_a_flip_in_a_cache_row_is_found_by_a_scrub_of_its_slot(model: Path) -> None:
    def do(driver: Driver) -> None:
        driver.submit(PROMPTS[0])
        driver.engine.step()
        driver.engine.step()
        for _ in range(2):
            driver.engine._orders.run(Scrubbing(1).next({Slot(0): 1}))
        driver.run()

    assert run_engine(model, do, ep_size=3, **SETTINGS).head_error is None
    for ep_size, rank, fault in flips("flip_kv"):
        # Command 3 writes; its row 0 of the cache is damaged before it runs, and no interval is due.
        early = FaultSpec(fault.rank, "validation", "flip_kv", command=3)
        _, alarm = damaged(model, ep_size, early, do, agreement_interval=0)
        assert (alarm.rank, alarm.seq, alarm.field) == (expected_rank(rank, ep_size), 4, "kv")


def test_caches_behind_bad_logits_are_looked_at_for_a_limited_time(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of a step has bad logits: without time, one scrub; with time, one for each."""
    seen: list[int] = []

    def do(driver: Driver) -> None:
        for prompt in PROMPTS[1:3]:
            driver.submit(prompt)
        driver.run()
        seen.append(driver.engine.counters.of_command(Cmd.SCRUB).by_status.get("ok", 0))

    monkeypatch.setattr("metrale_ray.engine._has_bad_logits", lambda readout, row: row.samples)
    for limit_s in (0.0, 60.0):
        monkeypatch.setattr("metrale_ray.engine.COMPARE_S", limit_s)
        assert run_engine(model, do, ep_size=2, **SETTINGS).head_error is None
    assert seen == [8, 16]


def check_only_good_tokens_left(outcome: Outcome, healthy: Outcome) -> None:
    for number, answer in outcome.answers.items():
        good = healthy.answers[number].token_ids
        assert answer.token_ids == good[: len(answer.token_ids)]
    assert sum(len(answer.token_ids) for answer in outcome.answers.values()) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ep_size", [2, 3])
def test_a_healthy_group_raises_no_alarm(model: Path, scale: int, dtype: str, ep_size: int) -> None:
    def do(driver: Driver) -> None:
        scrubbing = Scrubbing(5)
        for number in range(6 * scale):
            driver.submit([number % 300, *range(number % 11)])
            driver.engine.step()
            slots = {slot: seq.length for slot, seq in driver.engine._replica.slots.live.items() if seq.length}
            driver.engine._orders.run(scrubbing.next(slots))
        driver.run()

    outcome = run_engine(model, do, ep_size=ep_size, dtype=dtype, agreement_interval=1, scrub=True, **SETTINGS)
    assert outcome.head_error is None
    assert all(answer.finish_reason == "length" for answer in outcome.answers.values())


def witnesses_of(model: Path, interval: int) -> list[tuple[int, set[str]]]:
    """(number, names of the witness) of each reply of rank 0."""
    seen: list[tuple[int, set[str]]] = []

    def watched(driver: Driver) -> None:
        run: Callable[[Any], Reply] = driver.engine._replica.run

        def note(frame: Any) -> Reply:
            reply = run(frame)
            seen.append((reply.seq, set(reply.witness)))
            return reply

        driver.engine._replica.run = note  # type: ignore[method-assign]
        script(driver)
        driver.engine.ping()

    run_engine(model, watched, agreement_interval=interval, **SETTINGS)
    return seen


def test_what_was_computed_is_shown_by_the_first_step_of_every_interval_and_never_with_0(model: Path) -> None:
    for interval in (0, 1, 4):
        watched = None
        for seq, names in witnesses_of(model, interval):
            has_rows = "tokens" in names
            assert "command" in names
            is_due = interval > 0 and seq // interval != watched
            assert ({"residual", "routing"} <= names) == (has_rows and is_due), (interval, seq)
            watched = seq // interval if has_rows and is_due else watched
