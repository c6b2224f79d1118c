# SPDX-License-Identifier: MIT OR Apache-2.0
"""How much other work the machine did during a measurement, so that disturbed ones can be told and done again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

BUSY_CORES = 0.15  # above this a measurement counts as disturbed
ROOT_VARIABLE = "BENCH_ROOT_PID"


class OtherLoad:
    """`cores`: cores kept from this process's tree while the `with` block ran, by other processes or by the host."""

    cores = 0.0

    def __enter__(self) -> OtherLoad:
        self._started = time.perf_counter()
        self._all, self._own = _busy_ticks(), _tree_ticks(_root())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ticks = (time.perf_counter() - self._started) * os.sysconf("SC_CLK_TCK")
        others = (_busy_ticks() - self._all) - (_tree_ticks(_root()) - self._own)
        # A tick is counted when it is over, so two processes' short slices may be one tick of error.
        self.cores = max(0.0, (others - 1) / max(ticks, 1.0))

    @property
    def is_disturbed(self) -> bool:
        """Whether others took enough of the machine to spoil the figure."""
        return self.cores > BUSY_CORES


def _root() -> int:
    """The measuring script, which is this process or the one that started it for a single case."""
    return int(os.environ.get(ROOT_VARIABLE, os.getpid()))


def _busy_ticks() -> int:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq + steal


def _tree_ticks(root: int) -> int:
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue  # it ended between the listing and the look
        fields = text[text.rindex(")") + 2 :].split()
        pid = int(folder.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # its own, and of its children that have ended
    todo, total = [root], 0
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        total += ticks.get(pid, 0)
    return total
