# SPDX-License-Identifier: MIT OR Apache-2.0
"""A failing run is cut down to what makes it fail."""

from __future__ import annotations

from tests.simulation.faults import ProcessFault, SumFault
from tests.simulation.shrink import Case, shrink
from tests.simulation.workload import Ask, Leave, Life, Workload, draw_workload

STOP = ProcessFault(0, "head", "stop", at_s=0.1, for_s=0.2)
KILL = ProcessFault(0, "rank 1", "kill", at_turn=100)
OTHERS = (STOP, SumFault(1, 0, 3, "never"), STOP)


def _workload() -> Workload:
    drawn = draw_workload(0)
    asks = tuple(Ask(0.1 * index, 0, index, 3, priority=1, timeout_s=2.0) for index in range(6))
    lives = (Life(2, asks, (Leave(0.5, 1, "die"),)), Life(1, asks[:2]))
    return Workload(**{name: getattr(drawn, name) for name in Workload.__slots__ if name != "lives"}, lives=lives)


def test_only_the_fault_and_the_request_that_matter_are_left() -> None:
    case = Case(_workload(), (*OTHERS, KILL))

    def fails(smaller: Case) -> bool:
        return KILL in smaller.faults and any(ask.entry == 4 for ask in smaller.workload.lives[0].asks)

    small = shrink(case, fails)

    assert small.faults == (KILL,)
    (life,) = small.workload.lives
    assert [(ask.entry, ask.timeout_s, ask.priority) for ask in life.asks] == [(4, None, 0)]
    assert not life.leaves


def test_what_needs_all_of_it_stays_whole() -> None:
    case = Case(_workload(), (KILL,))

    assert shrink(case, lambda smaller: smaller == case) == case


def test_attempts_are_bounded() -> None:
    attempts: list[Case] = []

    def fails(smaller: Case) -> bool:
        attempts.append(smaller)
        return True

    shrink(Case(_workload(), OTHERS), fails, max_runs=5)

    assert len(attempts) == 5
