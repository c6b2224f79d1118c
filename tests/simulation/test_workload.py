# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is drawn: the same from the same seed, of every kind, and as JSON and back without loss."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.config import EngineConfig
from tests.simulation.catalogue import MAX_TOKENS, catalogue
from tests.simulation.schedule import (
    FINE,
    KINDS,
    EngineFault,
    draw_schedule,
    ends_of,
    from_map,
    is_violent,
    to_map,
)
from tests.simulation.workload import draw_workload, workload_from_map, workload_to_map

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_a_seed_draws_the_same_workload_and_schedule_each_time(seed: int) -> None:
    workload = draw_workload(seed)

    assert draw_workload(seed) == workload
    assert draw_schedule(seed, workload) == draw_schedule(seed, workload)


@given(SEEDS)
def test_a_workload_and_its_schedule_survive_json(seed: int) -> None:
    workload = draw_workload(seed)
    faults = draw_schedule(seed, workload)

    assert workload_from_map(json.loads(json.dumps(workload_to_map(workload)))) == workload
    assert tuple(from_map(data) for data in json.loads(json.dumps([to_map(fault) for fault in faults]))) == faults


@given(SEEDS)
def test_every_workload_is_a_configuration_and_its_faults_are_of_its_ranks_and_lives(seed: int) -> None:
    workload = draw_workload(seed)
    faults = draw_schedule(seed, workload)
    specs = tuple(fault.spec() for fault in faults if isinstance(fault, EngineFault))

    config = EngineConfig(model="model", faults=specs, **workload.settings())

    assert config.resolved({}).max_batch_size == workload.max_batch_size
    assert all(0 <= fault.life < len(workload.lives) for fault in faults)


def test_some_seeds_have_each_kind_of_workload() -> None:
    drawn = [draw_workload(seed) for seed in range(300)]

    assert {workload.ep_size for workload in drawn} == {1, 2, 3, 4}
    assert {workload.ep_protocol for workload in drawn} == {"v1", "v2"}
    assert {len(workload.lives) for workload in drawn} == {1, 2}
    asks = [ask for workload in drawn for life in workload.lives for ask in life.asks]
    assert {ask.entry for ask in asks} == set(range(len(catalogue())))
    assert {ask.then for ask in asks} == {"read", "abort", "finish"}


def test_some_seeds_have_each_kind_of_fault_and_some_have_none() -> None:
    drawn = [draw_schedule(seed, draw_workload(seed)) for seed in range(1000)]
    faults = [fault for schedule in drawn for fault in schedule]

    assert {type(fault) for fault in faults} == set(KINDS.values())
    kinds = {kind for fault in faults if (kind := getattr(fault, "kind", None))}
    assert {"delay", "lose", "duplicate", "truncate", "flip", "stale", "close", "kill", "stop", "never"} <= kinds
    assert sum(not schedule for schedule in drawn) > 150
    assert sum(bool(schedule) and not any(map(is_violent, schedule)) for schedule in drawn) > 100


@given(SEEDS)
def test_what_is_gentle_lets_a_life_be_and_what_is_violent_names_the_end_it_may_have(seed: int) -> None:
    for fault in draw_schedule(seed, draw_workload(seed)):
        assert ends_of(fault) >= FINE
        assert is_violent(fault) == (ends_of(fault) > FINE)


def test_what_is_no_fault_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="one of frame, partition, process, sum, engine"):
        from_map({"fault": "flood"})
    with pytest.raises(ValueError, match="is no fault"):
        from_map({"fault": "sum", "rank": 1})


def test_entries_of_the_catalogue_have_first_tokens_of_their_own_and_parameters_that_are_legal() -> None:
    entries = catalogue()

    assert len({entry.prompt[0] for entry in entries}) == len(entries)
    assert all(entry.params(length).max_tokens == length for entry in entries for length in (entry.least, MAX_TOKENS))
