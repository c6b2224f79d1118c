# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a person sees while a batch goes on: a bar on a terminal, a line now and then elsewhere, as in a job's log.

It is written from the numbers that the tally has, so that its cost does not grow with the load.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import TextIO

from metrale_ray.batch.tally import Tally

REFRESH_S = 0.25
LINE_EVERY_S = 10.0
RATE_OVER_S = 2.0
"""Tokens come by steps: over a shorter time their rate would be one number now and another one then."""


async def show(tally: Tally, stream: TextIO | None = None, *, line_every_s: float = LINE_EVERY_S) -> None:
    """Show how far it is until this is cancelled. `stream`: standard error where none is given."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        await _show_bar(tally, stream)
        return
    rate = Rate(tally)
    while tally.num_done < tally.num_requests:
        stream.write(line(tally, rate()) + "\n")
        stream.flush()
        await asyncio.sleep(line_every_s)


class Rate:
    """Tokens a second, over the last seconds."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._since = (0, 0.0)
        self._found = 0.0

    def __call__(self) -> float:
        num_tokens, now_s = self._tally.num_seen_tokens, self._tally.passed_s
        last_tokens, last_s = self._since
        if now_s - last_s >= RATE_OVER_S:
            self._found, self._since = (num_tokens - last_tokens) / (now_s - last_s), (num_tokens, now_s)
        return self._found


def line(tally: Tally, tokens_per_s: float) -> str:
    """How far it is, in words."""
    left_s = tally.left_s
    left = "" if left_s is None else f", {timedelta(seconds=round(left_s))} left"
    errors = f", {tally.num_errors} errors" if tally.num_errors else ""
    return f"{tally.num_done} of {tally.num_requests} requests{errors}, {tokens_per_s:.0f} tokens/s{left}"


async def _show_bar(tally: Tally, stream: TextIO) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rate = Rate(tally)
    with Progress(*columns, console=Console(file=stream), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=tally.num_requests)
        while True:
            bar.update(task, completed=tally.num_done, description=line(tally, rate()))
            bar.refresh()
            await asyncio.sleep(REFRESH_S)
