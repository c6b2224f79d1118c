# SPDX-License-Identifier: MIT OR Apache-2.0
"""`python -m tests.simulation`: run many seeds, run one again, or show that mistakes are found.

    python -m tests.simulation --seeds 2000 [--first N] [--jobs N]
    python -m tests.simulation --seed N [--schedule FILE or JSON]
    python -m tests.simulation mutations [--seeds N] [--only NAME]

A seed that fails is cut down to the smallest workload and schedule that fail, and printed with the command that runs
these again. The exit code is 1 when a seed fails or a mistake is not found.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.simulation.finding import find_all
from tests.simulation.mutations import MUTATIONS
from tests.simulation.oracle import Oracle
from tests.simulation.run import draw_case, run_case
from tests.simulation.schedule import from_map, to_map
from tests.simulation.seeds import Seen, model_folder, quiet, run_seeds
from tests.simulation.shrink import Case, shrink
from tests.simulation.workload import workload_from_map, workload_to_map

SAY_EVERY_S = 10.0
MAX_SHOWN = 3
"""Failing seeds that are cut down and shown; of more only the numbers are told."""

MAX_LINES = 12


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says, and give the exit code."""
    options = _parser().parse_args(arguments)
    quiet()
    with model_folder() as folder:
        if options.command == "mutations":
            return _mutations(options, folder)
        if options.seed is not None:
            return _again(options.seed, _given(options), folder)
        return _many(options, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.simulation", description="The whole group under drawn faults.")
    parser.add_argument("command", nargs="?", choices=("run", "mutations"), default="run")
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to run them in")
    parser.add_argument("--seed", type=int, help="run this one alone, and say what came of it")
    parser.add_argument("--schedule", help="its workload and faults, as a file or as JSON, instead of those it draws")
    parser.add_argument("--only", default="", help="mutations: those whose names contain this text")
    return parser


# Many seeds --------------------------------------------------------------------------------------------------------


def _many(options: argparse.Namespace, folder: Path) -> int:
    seeds = range(options.first, options.first + options.seeds)
    began_s = time.monotonic()
    counts: Counter[str] = Counter()
    failed: list[Seen] = []
    for seen in _shown(run_seeds(seeds, folder, options.jobs), len(seeds)):
        counts += seen.counts
        if seen.violations:
            failed.append(seen)
    print(f"{len(seeds)} seeds in {time.monotonic() - began_s:.0f} s: {len(failed)} failed")
    _print_counts(counts)
    for seen in sorted(failed, key=lambda each: each.seed)[:MAX_SHOWN]:
        _explain(seen.seed, draw_case(seen.seed), folder)
    if len(failed) > MAX_SHOWN:
        print(f"all seeds that failed: {sorted(seen.seed for seen in failed)}")
    return int(bool(failed))


def _shown(results: Iterator[Seen], total: int) -> Iterator[Seen]:
    """The same results, with progress: a bar on a terminal, and else a line from time to time."""
    if Console().is_terminal:
        with Progress() as progress:
            task = progress.add_task("seeds", total=total)
            for seen in results:
                progress.advance(task)
                if seen.violations:
                    progress.print(f"seed {seen.seed} fails: {seen.violations[0]}", markup=False)
                yield seen
        return
    said_s, num_failed = time.monotonic(), 0
    for num_done, seen in enumerate(results, 1):
        num_failed += bool(seen.violations)
        if time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            print(f"{num_done} of {total} seeds, {num_failed} failed", flush=True)
        yield seen


def _print_counts(counts: Counter[str]) -> None:
    """What was met on the way: a simulation that meets nothing proves nothing."""
    for kind in sorted({name.partition(":")[0] for name in counts}):
        of_kind = {name.partition(": ")[2]: number for name, number in counts.items() if name.startswith(kind + ":")}
        print(f"  {kind}: " + ", ".join(f"{name} {of_kind[name]}" for name in sorted(of_kind)))


# One seed ----------------------------------------------------------------------------------------------------------


def _given(options: argparse.Namespace) -> Case:
    """What the seed draws, but for what was given."""
    case = draw_case(options.seed)
    if options.schedule is None:
        return case
    text = options.schedule
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text(encoding="utf-8")
    return case_from_map(json.loads(text), case)


def case_to_map(case: Case) -> dict[str, object]:
    """As JSON has it."""
    return {"workload": workload_to_map(case.workload), "faults": [to_map(fault) for fault in case.faults]}


def case_from_map(data: dict[str, object], drawn: Case) -> Case:
    """The case of `case_to_map`; what is left out is as in `drawn`."""
    workload, faults = data.get("workload"), data.get("faults")
    return Case(
        drawn.workload if workload is None else workload_from_map(workload),  # type: ignore[arg-type]
        drawn.faults if faults is None else tuple(from_map(fault) for fault in faults),  # type: ignore[attr-defined]
    )


def _again(seed: int, case: Case, folder: Path) -> int:
    outcome = run_case(seed, case, folder, Oracle(folder))
    print(json.dumps(case_to_map(case), indent=1))
    for result in outcome.results:
        print(f"life {result.number} ended: {result.end} {result.message}")
        print(f"  faults that fired: {[to_map(fault) for fault in result.fired]}")
        for index, got in enumerate(result.got):
            whose = f"request {index} ({got.ask.of.name}) of front {got.ask.front}"
            print(f"  {whose}: {_told(got.outputs)} {got.error or ''}")
    _print_violations(outcome.violations)
    return int(bool(outcome.violations))


def _told(outputs: Sequence[object]) -> list[str]:
    return [
        f"{output.index}:{list(output.token_ids)}{output.finish_reason or ''}{output.error or ''}"  # type: ignore[attr-defined]
        for output in outputs
    ]


def _explain(seed: int, case: Case, folder: Path) -> None:
    """Cut the case down and print it."""
    oracle = Oracle(folder)
    small = shrink(case, lambda smaller: bool(run_case(seed, smaller, folder, oracle).violations))
    print(f"\nseed {seed} fails:")
    _print_violations(run_case(seed, case, folder, oracle).violations)
    print("cut down, it fails with:")
    _print_violations(run_case(seed, small, folder, oracle).violations)
    text = json.dumps(case_to_map(small), separators=(",", ":"))
    print(f"run it again:\n  OMP_NUM_THREADS=1 python -m tests.simulation --seed {seed}")
    print(f"  OMP_NUM_THREADS=1 python -m tests.simulation --seed {seed} --schedule {shlex.quote(text)}", flush=True)


def _print_violations(lines: Sequence[str]) -> None:
    for line in lines[:MAX_LINES]:
        print(f"  {line}")
    if len(lines) > MAX_LINES:
        print(f"  ... and {len(lines) - MAX_LINES} more")


# Mutations ---------------------------------------------------------------------------------------------------------


def _mutations(options: argparse.Namespace, folder: Path) -> int:
    seeds = range(options.first, options.first + options.seeds)
    names = [mutation.name for mutation in MUTATIONS if options.only in mutation.name]
    missed = 0
    print("| mistake | found by seed | after seeds | what found it |\n|---|---|---|---|", flush=True)
    for name, found in find_all(names, seeds, folder, options.jobs):
        missed += found is None
        print(f"| {name} | {_row(found, seeds)} |", flush=True)
    return int(bool(missed))


def _row(found: Seen | None, seeds: Sequence[int]) -> str:
    if found is None:
        return f"none | {len(seeds)} | nothing"
    return f"{found.seed} | {found.seed - seeds[0] + 1} | {found.violations[0][:160].replace('|', '/')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
