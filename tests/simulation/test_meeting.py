# SPDX-License-Identifier: MIT OR Apache-2.0
"""The simulated sums: what they give, how long they take, and what becomes of them when a rank does not come."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from metrale_ray.baton import Baton, Killed, Process, Task
from metrale_ray.errors import LinkLost, PeerFailed
from tests.simulation.faults import Fault, Partition, SumFault
from tests.simulation.meeting import Meeting, SimCollectives
from tests.simulation.network import Network, Weather

TIMEOUT_S = 20.0
SHAPE = (2, 4)


@dataclass
class Ranks:
    """Some ranks of one group, each a task of its own process that adds up ones, a few times."""

    world: int
    faults: tuple[Fault, ...] = ()
    num_sums: int = 3
    lost: str | None = None  # what the links say
    baton: Baton = field(default_factory=Baton)
    processes: list[Process] = field(default_factory=list)
    ends: list[SimCollectives] = field(default_factory=list)
    totals: dict[int, list[float]] = field(default_factory=dict)

    def run(self, script: Callable[[Ranks], object] | None = None) -> list[Any]:
        """What each rank gave or raised. `script` runs beside them."""
        network = Network(self.baton, 0, Weather(silent_share=0.0))
        self.meeting = Meeting(self.baton, network, self.world, random.Random(0), self.faults)
        tasks = list[Task]()

        def conductor() -> None:
            network.begin_life(0, self.faults)
            for rank in range(self.world):
                process = Process(f"rank {rank}")
                self.processes.append(process)
                self.ends.append(self._end(rank, process))
                tasks.append(self.baton.start(process.name, lambda rank=rank: self._work(rank), process))  # type: ignore[misc]
            if script is not None:
                script(self)
            self.baton.wait_until(lambda: all(task.has_ended or task.is_stopped for task in tasks), 3 * TIMEOUT_S)
            for process in self.processes:
                process.kill()

        error = self.baton.run({"conductor": conductor})["conductor"]
        if error is not None:
            raise error
        return [task.result for task in tasks]

    def _end(self, rank: int, process: Process) -> SimCollectives:
        return SimCollectives(
            self.meeting, process, rank, *SHAPE, torch.float32, timeout_s=TIMEOUT_S, check_peers=self._check_peers
        )

    def _check_peers(self) -> None:
        if self.lost is not None:
            raise LinkLost(self.lost, rank=1)

    def _work(self, rank: int) -> None:
        end = self.ends[rank]
        end.begin(SHAPE[0], self.num_sums)
        totals = self.totals.setdefault(rank, [])
        for number in range(self.num_sums):
            end.payload().fill_(10.0**number * (rank + 1))
            totals.append(float(end.all_reduce().sum()))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_the_sum_and_time_passes(world: int) -> None:
    ranks = Ranks(world)
    assert ranks.run() == [None] * world
    expected = [8.0 * 10**number * sum(range(1, world + 1)) for number in range(3)]
    assert ranks.totals == dict.fromkeys(range(world), expected)
    assert 6e-5 < ranks.baton.now < 0.01
    assert ranks.meeting.violations == []


def test_a_late_rank_holds_the_others_up() -> None:
    ranks = Ranks(3, (SumFault(0, 1, 2, "delay", 7.0),))
    assert ranks.run() == [None] * 3
    assert 7.0 < ranks.baton.now < 7.1
    assert len(ranks.meeting.fired) == 1


def test_a_rank_that_never_comes_is_missed_at_the_deadline() -> None:
    results = Ranks(3, (SumFault(0, 2, 2, "never"),)).run()
    assert [type(error) for error in results] == [LinkLost, LinkLost, Killed]
    assert results[0].message == "a reduction between the ranks did not complete within 20 s"


@pytest.mark.parametrize(("amount", "num_sums"), [(0.0, 1), (0.9, 2)])
def test_a_rank_that_dies_in_a_sum_breaks_it_or_the_next_one_at_once(amount: float, num_sums: int) -> None:
    ranks = Ranks(3, (SumFault(0, 2, 2, "kill", amount),))
    results = ranks.run()
    assert isinstance(results[2], Killed)
    assert "rank 2: its process has gone" in results[0].message
    assert len(ranks.totals[0]) == num_sums
    assert ranks.baton.now < 3.0  # the time in which the links may name it


def test_the_links_name_the_peer_that_has_gone() -> None:
    def script(ranks: Ranks) -> None:
        ranks.baton.wait_until(lambda: ranks.processes[1].is_dead)
        ranks.lost = "rank 1 has gone"

    results = Ranks(3, (SumFault(0, 1, 1, "kill"),)).run(script)
    assert [(error.message, error.rank) for error in (results[0], results[2])] == [("rank 1 has gone", 1)] * 2


def test_a_stopped_rank_holds_the_others_up_until_it_goes_on() -> None:
    def script(ranks: Ranks) -> None:
        ranks.processes[1].stop()
        ranks.baton.wait_until(lambda: False, 3.0)
        assert max(map(len, ranks.totals.values())) < 3
        ranks.processes[1].resume()

    assert Ranks(3).run(script) == [None] * 3


def test_a_partition_between_two_ranks_holds_all_of_them_up() -> None:
    ranks = Ranks(3, (Partition(0, "rank 1", "rank 2", 0.0, 5.0, both=False),))
    assert ranks.run() == [None] * 3
    assert 5.0 <= ranks.baton.now < 6.0


def test_a_rank_that_leaves_breaks_the_sums_of_the_others() -> None:
    def script(ranks: Ranks) -> None:
        ranks.processes[1].stop()
        ranks.ends[1].close()

    results = Ranks(2).run(script)
    assert "rank 1: left the group" in results[0].message


def test_a_rank_s_flag_reaches_all() -> None:
    ranks = Ranks(2)

    def report(rank: int) -> None:
        ranks.ends[rank].begin(SHAPE[0], 1)
        ranks.ends[rank].report_failure() if rank else ranks.ends[rank].all_reduce()

    ranks._work = report  # type: ignore[method-assign]
    assert [type(result) for result in ranks.run()] == [PeerFailed, type(None)]


def test_ranks_that_enter_unlike_sums_are_a_violation() -> None:
    ranks = Ranks(2)
    usual = ranks._work

    def work(rank: int) -> None:
        usual(rank) if rank else ranks.ends[0].begin(1, 1)
        ranks.ends[0].all_reduce()

    ranks._work = work  # type: ignore[method-assign]
    ranks.run()
    unlike = [("sum_in_rank_order", (5,)), ("sum_in_rank_order", (9,))]
    assert ranks.meeting.violations == [f"the ranks entered unlike sums: {unlike}"]
