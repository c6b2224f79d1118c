# SPDX-License-Identifier: MIT OR Apache-2.0
"""A whole group in one process: healthy lives, one fault of each kind, and runs that repeat to every turn and frame."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.baton import Killed, Overrun
from metrale_ray.config import EngineConfig
from metrale_ray.errors import EngineDead, LinkLost, SessionError
from metrale_ray.protocol.journal.journal import MemoryJournal
from metrale_ray.protocol.journal.records import Closed, Started
from metrale_ray.sampling.token_params import TokenParams
from tests.simulation.faults import Fault, FrameFault, Partition, ProcessFault, SumFault
from tests.simulation.group import Group
from tests.simulation.life import Life
from tests.simulation.seat import Seat
from tests.simulation.tiny_model import kv_block_bytes, write_model

PROMPTS = [(100 + number, 2, 3, 4 + number) for number in range(3)]
IN_CHILD = "import sys; from tests.simulation.test_group import traces; print(traces(sys.argv[1]))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("simulation") / "model")


def config_of(model: Path, ep_size: int, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        ep_size=ep_size,
        dtype="float32",
        device="cpu",
        kv_cache_memory=kv_block_bytes(4) * 32,
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=16,
        step_timeout_s=20.0,
        start_timeout_s=30.0,
        **settings,
    ).resolved({})


def ask_all(seat: Seat) -> list[tuple[int, ...]]:
    """Ask for all PROMPTS together, and give the tokens of each answer."""
    seat.wait_ready()
    with seat.client() as client:
        client.wait_opened(5.0)
        handles = [
            client.submit(prompt, TokenParams(temperature=0, max_tokens=6, ignore_eos=True)) for prompt in PROMPTS
        ]
        answers = []
        for handle in handles:
            token_ids: tuple[int, ...] = ()
            while True:
                output = handle.get(60.0)
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    break
            answers.append(token_ids)
        return answers


def life_of(model: Path, *faults: Fault, ep_size: int = 3, seed: int = 0, **settings: Any) -> Life:
    lives = Group(seed, config_of(model, ep_size, **settings), faults=faults).run([[ask_all]])
    assert lives[0].violations == ()
    assert lives[0].fired == faults
    return lives[0]


def is_fine(life: Life) -> bool:
    ends = [life.head, *life.workers.values()]
    return ends == [None] * len(ends) and isinstance(life.fronts[0], list)


@pytest.fixture(scope="module")
def answers(model: Path) -> Any:
    return life_of(model, ep_size=1).fronts[0]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_a_healthy_group_gives_the_same_answers_whatever_its_size(
    model: Path, answers: Any, ep_size: int, version: str
) -> None:
    sizes = {"max_batch_size": 1} if version == "v1" else {}
    life = life_of(model, ep_size=ep_size, ep_protocol=version, seed=ep_size, **sizes)
    assert is_fine(life)
    assert [len(token_ids) for token_ids in answers] == [6, 6, 6]
    assert life.fronts[0] == answers
    assert 0 < life.took_s < 1.0


def test_lives_follow_one_another_with_higher_epochs_and_journals_of_their_own(model: Path, answers: Any) -> None:
    journals = {number: MemoryJournal() for number in range(3)}
    group = Group(1, config_of(model, 2), journal=journals.__getitem__)
    lives = group.run([[ask_all, ask_all], [ask_all], [Seat.wait_ready]])
    assert [(life.number, life.epoch, life.head) for life in lives] == [(0, 1, None), (1, 2, None), (2, 3, None)]
    assert lives[0].fronts[0] == lives[0].fronts[1] == lives[1].fronts[0] == answers
    for number, journal in journals.items():
        first, last = journal.records[0], journal.records[-1]
        assert isinstance(first, Started)
        assert (first.epoch, isinstance(last, Closed)) == (number + 1, True)


def traces(model: Path | str) -> str:
    """What three runs with faults leave behind: turns, frames, and what became of every front."""
    groups = []
    for seed in range(3):
        fault = ProcessFault(0, "rank 1", "stop", at_turn=200 + 30 * seed, for_s=1.0)
        groups.append(Group(seed, config_of(Path(model), 3), faults=[fault]))
        groups[-1].run([[ask_all, ask_all], [ask_all]])
    return repr([(group.trace, [life.fronts for life in group.lives]) for group in groups])


def test_another_process_goes_the_same_way_to_every_turn_and_frame(model: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", IN_CHILD, str(model)]
    child = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, check=False
    )
    assert child.stdout.strip() == traces(model), child.stderr


def test_seeds_give_different_ways(model: Path) -> None:
    groups = [Group(seed, config_of(model, 2)) for seed in range(4)]
    for group in groups:
        group.run([[ask_all]])
    assert len({group.trace for group in groups}) == 4


def test_a_killed_worker_ends_the_engine_and_is_named(model: Path) -> None:
    life = life_of(model, ProcessFault(0, "rank 1", "kill", at_turn=250))
    assert isinstance(life.head, EngineDead)
    assert isinstance(life.workers[1], Killed)
    assert isinstance(life.workers[2], LinkLost)
    assert isinstance(life.fronts[0], EngineDead)
    assert life.head.rank == life.fronts[0].rank == 1


def test_a_worker_that_is_stopped_for_a_moment_only_delays(model: Path, answers: Any) -> None:
    life = life_of(model, ProcessFault(0, "rank 1", "stop", at_turn=250, for_s=2.0))
    assert is_fine(life)
    assert life.fronts[0] == answers
    assert life.took_s > 2.0


def test_a_worker_that_is_stopped_for_good_is_lost_by_its_heartbeat(model: Path) -> None:
    life = life_of(model, ProcessFault(0, "rank 2", "stop", at_turn=250))
    assert isinstance(life.head, EngineDead)
    assert life.head.rank == 2
    assert "has gone" in life.head.message
    assert isinstance(life.workers[2], Killed)


def test_a_killed_head_leaves_nobody_waiting(model: Path) -> None:
    life = life_of(model, ProcessFault(0, "head", "kill", at_turn=250))
    assert isinstance(life.head, Killed)
    assert [type(life.workers[rank]) for rank in (1, 2)] == [LinkLost, LinkLost]
    assert isinstance(life.fronts[0], EngineDead)


def test_a_front_that_dies_costs_nobody_else_anything(model: Path, answers: Any) -> None:
    fault = ProcessFault(0, "front 0", "kill", at_s=0.01)
    life = Group(3, config_of(model, 2), faults=[fault]).run([[ask_all, ask_all]])[0]
    assert isinstance(life.fronts[0], Killed)
    assert life.fronts[1] == answers
    assert (life.head, life.workers[1]) == (None, None)


def test_a_command_that_is_repeated_is_noticed_by_the_worker(model: Path) -> None:
    life = life_of(model, FrameFault(0, "head", "rank 1", 5, "duplicate"))
    assert isinstance(life.workers[1], SessionError)
    assert isinstance(life.head, EngineDead)


def test_a_command_that_is_lost_is_missed_at_the_deadline(model: Path) -> None:
    life = life_of(model, FrameFault(0, "head", "rank 1", 5, "lose"))
    assert isinstance(life.head, EngineDead)
    assert "20 s" in life.head.message


def test_a_frame_of_an_earlier_life_is_refused(model: Path) -> None:
    fault = FrameFault(1, "head", "rank 1", 5, "stale", 0.9)
    first, second = Group(2, config_of(model, 2), faults=[fault]).run([[ask_all], [ask_all]])
    assert is_fine(first)
    assert second.fired == (fault,)
    assert isinstance(second.workers[1], SessionError)
    assert "epoch 1" in second.workers[1].message


def test_a_late_frame_and_a_short_partition_only_delay(model: Path, answers: Any) -> None:
    faults = (FrameFault(0, "rank 1", "head", 4, "delay", 1.0), Partition(0, "head", "rank 2", 0.005, 2.0))
    group = Group(0, config_of(model, 3), faults=faults)
    life = group.run([[ask_all]])[0]
    assert set(life.fired) == set(faults)
    assert is_fine(life)
    assert life.fronts[0] == answers


def test_a_long_partition_ends_the_engine(model: Path) -> None:
    life = life_of(model, Partition(0, "head", "rank 2", 0.005, 30.0, both=False))
    assert isinstance(life.head, LinkLost | EngineDead)
    assert life.head.rank == 2


@pytest.mark.parametrize("kind", ["never", "kill"])
def test_a_rank_that_fails_in_a_sum_ends_the_engine(model: Path, kind: Any) -> None:
    life = life_of(model, SumFault(0, 1, 5, kind))
    assert isinstance(life.head, EngineDead)
    assert isinstance(life.workers[1], Killed)
    assert isinstance(life.workers[2], LinkLost)


def test_a_group_that_takes_too_long_is_stopped(model: Path) -> None:
    def sleeps(seat: Seat) -> None:
        seat.sleep(1000.0)

    with pytest.raises(Overrun, match="more than 50 s passed"):
        Group(0, config_of(model, 2), max_s=50.0).run([[sleeps]])


def test_what_a_hook_finds_reaches_the_caller(model: Path) -> None:
    def check(group: Group) -> None:
        if group.head is not None and group.head.state.phase == "ready":
            raise AssertionError("found")

    with pytest.raises(AssertionError, match="found"):
        Group(0, config_of(model, 2), at_turn=check).run([[ask_all]])


def test_a_healthy_hour_raises_no_alarm(model: Path, answers: Any, scale: int) -> None:
    """Of virtual time, with work every 45 seconds; many hours in a nightly run."""

    def asks_now_and_then(seat: Seat) -> None:
        for _ in range(80 * scale):
            seat.sleep(45.0)
            assert ask_all(seat) == answers

    config = config_of(model, 2, scrub=True, agreement_interval=4)
    life = Group(5, config, max_turns=10_000_000, max_s=1e6).run([[asks_now_and_then]])[0]
    assert (life.head, life.workers, life.fronts, life.violations) == (None, {1: None}, {0: None}, ())
    assert life.took_s > 3600.0 * scale


def test_the_key_of_a_front_that_left_long_ago_is_good_no_longer(model: Path) -> None:
    """Ten minutes of virtual time: the head's clock is the one from outside everywhere."""

    def comes_back(seat: Seat) -> str:
        ask_all(seat)
        seat.sleep(11 * 60.0)
        with pytest.raises(EngineDead) as caught:
            seat.client().wait_opened(5.0)
        return caught.value.message

    life = Group(0, config_of(model, 1)).run([[comes_back]])[0]
    assert "it does not know this process's key" in life.fronts[0]
