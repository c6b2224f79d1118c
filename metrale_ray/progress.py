# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a person sees while something takes longer than a moment: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from metrale_ray.head import HeadState

# Where there is no terminal, one line in this time is enough to see that it goes on.
LOG_EVERY_S = 5.0


class LoadProgress:
    """The start of an engine: its phase, and how far each rank has loaded.

    Without a terminal a thread says it now and then, as a start may be silent for long: Ray itself has to come up.
    """

    def __init__(self, ep_size: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            console=_console(),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._ranks = [self._bars.add_task(f"rank {rank}: starting", total=None) for rank in range(ep_size)]
        self._line = f"starting {ep_size} rank{'s' if ep_size > 1 else ''}"
        self._is_over = threading.Event()
        self._speaker = threading.Thread(target=self._speak, name="load-progress", daemon=True)

    def __enter__(self) -> LoadProgress:
        self._bars.start()
        if not sys.stderr.isatty():
            self._speaker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._bars.stop()
        if self._speaker.is_alive():
            self._speaker.join()

    def update(self, state: HeadState) -> None:
        """Show the head's state."""
        for rank, progress in state.progress.items():
            self._bars.update(
                self._ranks[rank],
                description=f"rank {rank}: loading",
                completed=progress.done_bytes,
                total=progress.total_bytes,
            )
        if state.progress:
            parts = [f"rank {r}: {p.done_bytes >> 20}/{p.total_bytes >> 20} MiB" for r, p in state.progress.items()]
            self._line = f"{state.phase}: " + ", ".join(parts)

    def _speak(self) -> None:
        started = time.monotonic()
        while not self._is_over.wait(LOG_EVERY_S):
            _say(f"{self._line}, {time.monotonic() - started:.0f} s")


@contextmanager
def counted(total: int, unit: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over `total` things; the function it gives is called once for each one done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    visible = shown and total > 1
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done, next_line = 0, time.monotonic() + LOG_EVERY_S
    with Progress(*columns, console=_console(), transient=True, disable=not (visible and sys.stderr.isatty())) as bar:
        task = bar.add_task(unit, total=total)

        def advance() -> None:
            nonlocal done, next_line
            done += 1
            bar.advance(task)
            if visible and not sys.stderr.isatty() and time.monotonic() >= next_line:
                next_line = time.monotonic() + LOG_EVERY_S
                _say(f"{done} of {total} {unit}")

        yield advance


@contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for work of several phases; the function it gives is told the phase, what is done and what there is."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    is_terminal, next_line = sys.stderr.isatty(), time.monotonic() + LOG_EVERY_S
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(), transient=True, disable=not is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def update(phase: str, done: int, total: int) -> None:
            nonlocal next_line
            bar.update(task, description=phase, completed=done, total=total)
            if not is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + LOG_EVERY_S
                _say(f"{phase}: {100 * done // max(total, 1)} %")

        yield update


def _say(line: str) -> None:
    _console().print(line, highlight=False, soft_wrap=True)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)
