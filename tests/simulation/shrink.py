# SPDX-License-Identifier: MIT OR Apache-2.0
"""`shrink`: the smallest workload and schedule that still fail, found by leaving things out.

Rules: each attempt is a whole run, so attempts are bounded. Faults go first, then lives, then requests by halves and
one by one, then what is special about a request. Whatever still fails is kept, in the same way or another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.simulation.schedule import Fault
from tests.simulation.workload import Life, Workload

MAX_RUNS = 150
"""Of a run each: some thirty seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a run is made of, beside the seed of its turns and delays."""

    workload: Workload
    faults: tuple[Fault, ...]


def shrink(case: Case, fails: Callable[[Case], bool], max_runs: int = MAX_RUNS) -> Case:
    """A case no larger than `case`, which fails, that fails too; `fails` runs one."""
    runs_left = max_runs
    is_done = False
    while not is_done:
        is_done = True
        for smaller in _smaller(case):
            if runs_left == 0:
                return case
            runs_left -= 1
            if fails(smaller):
                case, is_done = smaller, False
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    yield from _fewer_faults(case)
    yield from _fewer_lives(case)
    for number in range(len(case.workload.lives)):
        yield from (_with_life(case, number, life) for life in _smaller_lives(case.workload.lives[number]))


def _fewer_faults(case: Case) -> Iterator[Case]:
    if len(case.faults) > 1:
        yield replace(case, faults=())
    for index in range(len(case.faults)):
        yield replace(case, faults=case.faults[:index] + case.faults[index + 1 :])


def _fewer_lives(case: Case) -> Iterator[Case]:
    """Without its last life, or with its first emptied: numbers of lives stay, as faults name them."""
    lives = case.workload.lives
    if len(lives) > 1:
        faults = tuple(fault for fault in case.faults if fault.life < len(lives) - 1)
        yield Case(replace(case.workload, lives=lives[:-1]), faults)


def _smaller_lives(life: Life) -> Iterator[Life]:
    asks = life.asks
    if life.leaves:
        yield replace(life, leaves=())
    if len(asks) > 2:
        half = len(asks) // 2
        yield replace(life, asks=asks[:half])
        yield replace(life, asks=asks[half:])
    if len(asks) > 1:
        yield from (replace(life, asks=asks[:index] + asks[index + 1 :]) for index in range(len(asks)))
    for index, ask in enumerate(asks):
        plain = replace(ask, priority=0, timeout_s=None, then="read", after_tokens=0, index=0)
        if plain != ask:
            yield replace(life, asks=(*asks[:index], plain, *asks[index + 1 :]))


def _with_life(case: Case, number: int, life: Life) -> Case:
    lives = case.workload.lives
    return replace(case, workload=replace(case.workload, lives=(*lives[:number], life, *lives[number + 1 :])))
