# SPDX-License-Identifier: MIT OR Apache-2.0
"""The journals that the engines of the tests write, for whoever looks into a failing one.

`folder` is where every engine writes: those that read the environment find it there, the others are given it. A test
that fails shows which journals were written while it ran, and the command that runs each again. Engines in one process
keep theirs in memory (`remember`), and it is written out then.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from metrale_ray.config import JOURNAL_VAR
from metrale_ray.protocol.journal.dump import write_dump
from metrale_ray.protocol.journal.journal import MemoryJournal
from metrale_ray.protocol.journal.records import Record, Snapshot, Started

MAX_REMEMBERED = 4
MAX_SHOWN = 8

_remembered: list[MemoryJournal] = []
_began_s = 0.0
num_reported = 0  # tests that failed and had journals


def folder() -> Path:
    """The folder of this run's journals; made, and put into the environment, when it is first asked for."""
    given = os.environ.get(JOURNAL_VAR)
    if given is None:
        given = os.environ[JOURNAL_VAR] = tempfile.mkdtemp(prefix="metrale-journals-")
    return Path(given)


def environment() -> dict[str, str]:
    """The variable alone, for what is not to know the rest of the environment."""
    return {JOURNAL_VAR: str(folder())}


def begin() -> None:
    """A test begins."""
    global _began_s
    _began_s = time.time()
    _remembered.clear()


def remember(journal: MemoryJournal) -> MemoryJournal:
    """Keep the journal of an engine in this process until the test has ended; the oldest of many go."""
    _remembered.append(journal)
    del _remembered[:-MAX_REMEMBERED]
    return journal


def report() -> list[str]:
    """A line for each journal of the test that is under way: how to run it again."""
    paths = {_written(journal): model_of(journal.records) for journal in _remembered if journal.records}
    for path in sorted(folder().glob("*/")):
        segments = sorted(path.glob("*.journal"))
        if segments and segments[-1].stat().st_mtime >= _began_s - 1:
            paths[path] = model_in(path)
    global num_reported
    num_reported += bool(paths)
    return [f"metrale-ray replay {path} --model {model}" for path, model in list(paths.items())[-MAX_SHOWN:]]


def model_in(path: Path) -> str:
    """The checkpoint that a journal on the disk names."""
    from metrale_ray.protocol.journal.reader import open_journal

    return model_of(list(open_journal(path)))


def model_of(records: list[Record]) -> str:
    """The checkpoint that a journal names."""
    for record in records:
        started = record.started if isinstance(record, Snapshot) else record
        if isinstance(started, Started):
            return str(started.config["model"])
    return "DIR"


def _written(journal: MemoryJournal) -> Path:
    return write_dump(folder() / "in-process", "test", journal.kept(), redact=False)
