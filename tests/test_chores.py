# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an engine does beside its steps, and when, with a clock and an engine that are played."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_ray.chores import BUSY_SHARE, IDLE_SHARE, IDLE_WAIT_S, MIN_REST_S, PASS_REST_S, Chores
from metrale_ray.config import EngineConfig
from metrale_ray.errors import LinkLost

TOOK_S = 0.25  # one part


class Engine:
    """Writes down its chores; scrubbing takes TOOK_S, and a pass is `parts` parts."""

    def __init__(self, parts: int = 3) -> None:
        self.now_s = 100.0
        self.done: list[str] = []
        self.parts = parts

    def clock(self) -> float:
        return self.now_s

    def ping(self) -> None:
        self.done.append("ping")

    def scrub(self) -> bool:
        self.done.append("scrub")
        self.now_s += TOOK_S
        return self.done.count("scrub") % self.parts == 0


def chores_of(engine: Any, check_links: Any = lambda: None, **settings: Any) -> Chores:
    return Chores(engine, EngineConfig(model="m", idle_ping_s=2.0, **settings), check_links, engine.clock)


def idle_for(engine: Engine, chores: Chores, seconds: float) -> int:
    """Do what is to be done until so much time has passed; how often it was looked."""
    until_s, looks = engine.now_s + seconds, 0
    while engine.now_s < until_s:
        chores.while_idle()
        engine.now_s += chores.wait_s or 0.001
        looks += 1
    return looks


def test_an_idle_engine_pings_and_one_at_work_does_not() -> None:
    engine = Engine()
    chores = chores_of(engine)
    assert chores.wait_s == IDLE_WAIT_S
    for _ in range(10):
        engine.now_s += 1.0
        chores.after_step()
    assert engine.done == []
    idle_for(engine, chores, 10.5)
    assert engine.done == ["ping"] * 5


def test_links_are_looked_at_first() -> None:
    engine = Engine()

    def lost() -> None:
        raise LinkLost("rank 1 has gone", rank=1)

    with pytest.raises(LinkLost):
        chores_of(engine, lost, scrub=True).while_idle()
    assert engine.done == []


def test_an_idle_engine_scrubs_for_a_share_of_its_time_and_rests_after_a_pass() -> None:
    engine = Engine(parts=3)
    chores = chores_of(engine, scrub=True)
    began_s = engine.now_s
    while engine.done.count("scrub") < 3:
        idle_for(engine, chores, 0.1)
    share = 3 * TOOK_S / (engine.now_s - began_s)
    assert share <= 3 / (2 * IDLE_SHARE + 3) + 0.05
    idle_for(engine, chores, PASS_REST_S - 2)
    assert engine.done.count("scrub") == 3
    idle_for(engine, chores, 4)
    assert engine.done.count("scrub") > 3
    assert engine.done.count("ping") > 20


def test_an_engine_at_work_scrubs_next_to_never() -> None:
    engine = Engine()
    chores = chores_of(engine, scrub=True)
    began_s = engine.now_s
    while engine.done.count("scrub") < 4:
        engine.now_s += 0.03
        chores.after_step()
    assert 3 * TOOK_S / (engine.now_s - began_s) <= 1 / BUSY_SHARE


def test_quick_parts_are_not_looked_at_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_chores.TOOK_S", 0.0)
    engine = Engine(parts=1000)
    chores = chores_of(engine, scrub=True)
    idle_for(engine, chores, 1.0)
    assert engine.done.count("scrub") <= 1.0 / MIN_REST_S + 1
