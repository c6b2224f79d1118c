# SPDX-License-Identifier: MIT OR Apache-2.0
"""Many runs, spread over processes: what came of each seed, in short, as it comes.

The model and the oracle's answers are written once into a folder and read by every process.
"""

from __future__ import annotations

import logging
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from metrale_ray.protocol.journal.records import Answered
from tests.simulation.oracle import Oracle
from tests.simulation.replays import differences
from tests.simulation.run import Outcome, draw_case, run_case
from tests.simulation.tiny_model import write_model

SEEDS_PER_JOB = 20
"""Enough that handing them to a process costs nothing, few enough that progress is seen."""


REPLAY_EVERY = 10
"""The journals of one seed in ten are run again, each of which takes as long as the seed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of one seed. `counts`: ends of lives, faults that fired, outcomes of commands, answers, by name."""

    seed: int
    violations: tuple[str, ...]
    counts: Counter[str]


@contextmanager
def model_folder() -> Iterator[Path]:
    """A folder with the model and the oracle's answers, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="simulation-") as name:
        folder = write_model(Path(name))
        Oracle(folder)
        yield folder


def run_seeds(seeds: Sequence[int], folder: Path, num_jobs: int) -> Iterator[Seen]:
    """What came of each of `seeds`, in the order in which they are done."""
    jobs = [seeds[start : start + SEEDS_PER_JOB] for start in range(0, len(seeds), SEEDS_PER_JOB)]
    if num_jobs <= 1:
        for job in jobs:
            yield from _run_job(job, folder)
        return
    # Spawned: this process has had threads, and a fork of it might inherit a lock that one of them held.
    with ProcessPoolExecutor(num_jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_run_job, job, folder) for job in jobs]
        for future in as_completed(futures):
            yield from future.result()


def run_seed(seed: int, folder: Path, oracle: Oracle) -> Seen:
    """One seed with what it draws."""
    outcome = run_case(seed, draw_case(seed), folder, oracle)
    violations, counts = list(outcome.violations), Counter(_counted(outcome))
    if seed % REPLAY_EVERY == 0 and not violations:
        for result, ledger in zip(outcome.results, outcome.ledgers, strict=True):
            if result.end != "desync":  # its last answers hold what was damaged on purpose
                violations += [f"life {result.number}: {line}" for line in differences(ledger.records)]
                counts["journal: replayed"] += 1
    return Seen(seed, tuple(violations), counts)


def quiet() -> None:
    """One thread, and no log lines of engines that are meant to break."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def _run_job(seeds: Iterable[int], folder: Path) -> list[Seen]:
    quiet()
    oracle = Oracle(folder)
    return [run_seed(seed, folder, oracle) for seed in seeds]


def _counted(outcome: Outcome) -> Iterator[str]:
    for result in outcome.results:
        yield f"life: {result.end}"
        yield from ["scheduler: preemption"] * result.num_preemptions
        for fault in result.fired:
            yield f"fault: {type(fault).__name__} {getattr(fault, 'kind', '')}".strip()
        for got in result.got:
            ends = [output for output in got.outputs if output.finish_reason is not None]
            yield from (f"answer: {output.error[0] if output.error else output.finish_reason}" for output in ends)
            if got.error is not None:
                yield f"answer: {type(got.error).__name__}"
    for ledger in outcome.ledgers:
        yield from (f"command: {record.kind}" for record in ledger.records if isinstance(record, Answered))
