# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whole runs: some seeds pass, the same seed goes the same way twice, and mistakes made on purpose are found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation import __main__ as command
from tests.simulation.finding import find
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS
from tests.simulation.oracle import Oracle
from tests.simulation.replays import differences
from tests.simulation.run import draw_case, run_case
from tests.simulation.seeds import model_folder, run_seed
from tests.simulation.shrink import Case

NUM_SEEDS = 10
QUICK = ("free a slot twice", "keep a block after a free", "skip a settled", "leak a slot")
"""Mistakes that nearly every seed meets. All others are found by `python -m tests.simulation mutations`."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with model_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(autouse=True)
def _no_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_seeds_pass(folder: Path, oracle: Oracle, scale: int) -> None:
    for seed in range(NUM_SEEDS * scale):
        assert run_seed(seed, folder, oracle).violations == (), f"python -m tests.simulation --seed {seed}"


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_goes_the_same_way_twice(folder: Path, oracle: Oracle, seed: int) -> None:
    case = draw_case(seed)

    first, second = (run_case(seed, case, folder, oracle) for _ in range(2))

    assert first.trace == second.trace
    assert [result.end for result in first.results] == [result.end for result in second.results]


def test_a_journal_of_two_ranks_says_the_same_on_one(folder: Path, oracle: Oracle) -> None:
    seed = next(seed for seed in range(100) if draw_case(seed).workload.ep_size == 2 and not draw_case(seed).faults)

    outcome = run_case(seed, draw_case(seed), folder, oracle)

    assert outcome.violations == []
    for ledger in outcome.ledgers:
        assert list(differences(ledger.records)) == []
        assert list(differences(ledger.records, ep_size=1)) == []


@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each.name in QUICK], ids=lambda each: each.name)
def test_a_mistake_is_found(folder: Path, oracle: Oracle, mutation: Mutation) -> None:
    found = find(mutation, range(6), folder, oracle)

    assert found is not None
    assert found.violations


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_every_mistake_is_found(folder: Path, oracle: Oracle, mutation: Mutation) -> None:
    assert find(mutation, range(2000), folder, oracle) is not None


def test_a_mutation_ends_where_it_should() -> None:
    """Each one changes something, and leaves the engine as it was."""
    for mutation in MUTATIONS:
        with mutation.apply():
            pass
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 10


def test_a_failing_seed_is_cut_down_and_printed_with_the_command_that_runs_it_again(
    folder: Path, oracle: Oracle, capsys: pytest.CaptureFixture[str]
) -> None:
    mutation = next(each for each in MUTATIONS if each.name == "free a slot twice")
    case = draw_case(1)

    with mutation.apply():
        command._explain(1, case, folder)

    printed = capsys.readouterr().out
    assert "is freed and holds nothing" in printed
    schedule = printed.split("--schedule ")[1].strip().strip("'")
    small = command._given(command._parser().parse_args(["--seed", "1", "--schedule", schedule]))
    assert len(small.workload.lives[-1].asks) == 1
    assert run_case(1, small, folder, oracle).violations == []
    with mutation.apply():
        assert run_case(1, small, folder, oracle).violations != []


def test_a_case_survives_json() -> None:
    case = draw_case(5)

    assert command.case_from_map(command.case_to_map(case), Case(case.workload, ())) == case
