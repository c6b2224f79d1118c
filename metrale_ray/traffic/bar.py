# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a person sees while a run goes on: a bar on a terminal, a line now and then elsewhere, on standard error.

It is written a few times a second from the numbers that the run has, so that its cost does not grow with the load.
"""

from __future__ import annotations

import asyncio
import sys
from time import perf_counter

from metrale_ray.traffic.drive import Run

REFRESH_S = 0.25
LINE_EVERY_S = 5.0


async def show(run: Run, *, num_requests: int | None, seconds: float | None) -> None:
    """Show the run until this is cancelled. `num_requests` or `seconds`: how far it will go."""
    if sys.stderr.isatty():
        await _show_bar(run, num_requests, seconds)
    else:
        await _write_lines(run, num_requests)


def line(run: Run, num_requests: int | None) -> str:
    """How far the run is, in words."""
    of = "" if num_requests is None else f" of {num_requests}"
    failed = f", {run.num_failed} failed" if run.num_failed else ""
    return f"{run.num_ended}{of} requests, {run.num_running} running{failed}, {run.num_pieces} pieces"


async def _write_lines(run: Run, num_requests: int | None) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY_S)
        sys.stderr.write(f"{run.passed_s:.0f} s: {line(run, num_requests)}\n")
        sys.stderr.flush()


async def _show_bar(run: Run, num_requests: int | None, seconds: float | None) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    total = float(num_requests) if num_requests is not None else seconds
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    last_s, last_pieces = perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)
        while True:
            await asyncio.sleep(REFRESH_S)
            now_s = perf_counter()
            rate = (run.num_pieces - last_pieces) / (now_s - last_s)
            last_s, last_pieces = now_s, run.num_pieces
            done = float(run.num_ended) if num_requests is not None else min(run.passed_s, seconds or 0.0)
            bar.update(task, completed=done, description=f"{line(run, num_requests)}, {rate:.0f}/s")
            bar.refresh()
