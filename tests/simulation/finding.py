# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether the simulation finds a mistake: the first seed that fails with it and passes without."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS
from tests.simulation.oracle import Oracle
from tests.simulation.seeds import Seen, quiet, run_seed


def find(mutation: Mutation, seeds: Sequence[int], folder: Path, oracle: Oracle) -> Seen | None:
    """What came of the first of `seeds` that finds the mistake; None when there is none."""
    for seed in seeds:
        with mutation.apply():
            seen = run_seed(seed, folder, oracle)
        if seen.violations and not run_seed(seed, folder, oracle).violations:
            return seen
    return None


def find_all(
    names: Sequence[str], seeds: Sequence[int], folder: Path, num_jobs: int
) -> Iterator[tuple[str, Seen | None]]:
    """The same for each of these mutations, in the order in which they are done."""
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(_find_by_name, name, seeds, folder): name for name in names}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _find_by_name(name: str, seeds: Sequence[int], folder: Path) -> Seen | None:
    quiet()
    return find(next(each for each in MUTATIONS if each.name == name), seeds, folder, Oracle(folder))
