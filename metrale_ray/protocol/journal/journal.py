# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Journal`: where the head notes what it does. Here are the interface, one that keeps nothing and one in memory.

Rules: the engine's thread notes, and that costs it next to nothing: `note` never waits and never raises. Whoever notes
asks `is_on` first, so that without a journal no record is made. What each step has is noted with `note_later`, so that
its records are made where there is time.

What is left out: the one that writes files (`writer`), and files of the last records (`dump`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from metrale_ray.protocol.journal.records import Closed, Gap, Record, Snapshot, Started


class JournalState(NamedTuple):
    """How a journal does. `failure`: why it was switched off, None while it was not."""

    is_on: bool
    failure: str | None = None
    num_let_go: int = 0  # records, since the start


class Journal(Protocol):
    """Takes records in the order in which things happen."""

    @property
    def is_on(self) -> bool:
        """Whether records are kept. It may become False at any time, and then stays so."""
        ...

    def note(self, record: Record) -> None:
        """Keep `record`. Never waits, never raises; what cannot be kept is counted in a Gap."""
        ...

    def note_later(self, make: Callable[[], Record], num_bytes: int) -> None:
        """As `note`, of the record that `make` gives, which is called once or never, soon, from whatever thread.

        Nothing that it reads may change any more; about `num_bytes` are held until then.
        """
        ...

    def wants_snapshot(self) -> bool:
        """Whether the next record given should be a Snapshot, because a new segment is due."""
        ...

    def state(self) -> JournalState | None:
        """How it does; None where there is none. From any thread."""
        ...

    def close(self, reason: str, failure: str | None) -> None:
        """Note the end (a Closed) and let go of everything. Further calls do nothing."""
        ...


class NoJournal:
    """Keeps nothing."""

    is_on = False

    def note(self, record: Record) -> None:
        """Let `record` go."""

    def note_later(self, make: Callable[[], Record], num_bytes: int) -> None:
        """Nothing is made."""

    def wants_snapshot(self) -> bool:
        """False."""
        return False

    def state(self) -> JournalState | None:
        """None."""
        return None

    def close(self, reason: str, failure: str | None) -> None:
        """Nothing is held."""


class MemoryJournal:
    """Keeps records in a list, in memory: for tests, for simulations, and for what a dump is written from.

    `max_records`: where it is given at least so many of the last records are kept, and at most twice as many.
    `is_snapshot_due`: set it to ask for a Snapshot, as a segment that is full does.
    """

    def __init__(self, max_records: int | None = None) -> None:
        self.records: list[Record] = []
        self.is_on = True
        self.is_snapshot_due = False
        self._max_records = max_records
        self._started: Started | None = None
        self._num_let_go = 0

    def note(self, record: Record) -> None:
        """Keep `record`; one of the oldest may go."""
        if not self.is_on:
            return
        if isinstance(record, Started):
            self._started = record
        elif isinstance(record, Snapshot):
            self.is_snapshot_due = False
        self.records.append(record)
        if self._max_records is not None and len(self.records) > 2 * self._max_records:
            self._num_let_go += len(self.records) - self._max_records
            del self.records[: -self._max_records]

    def note_later(self, make: Callable[[], Record], num_bytes: int) -> None:
        """Make the record at once, and keep it."""
        if self.is_on:
            self.note(make())

    def wants_snapshot(self) -> bool:
        """Whether one was asked for by `is_snapshot_due`."""
        return self.is_snapshot_due

    def state(self) -> JournalState | None:
        """How it does: nothing is refused."""
        return JournalState(self.is_on)

    def close(self, reason: str, failure: str | None) -> None:
        """Note the end, at the time of the last record. Further calls do nothing."""
        if not self.is_on:
            return
        self.note(Closed(at_us_of(self.records[-1]) if self.records else 0, reason, failure))
        self.is_on = False

    def kept(self) -> tuple[Record, ...]:
        """The records with what a reader needs before them: where some went, the Started, and a Gap that counts."""
        if not self._num_let_go:
            return tuple(self.records)
        first = () if self._started is None or self._started in self.records else (self._started,)
        gap = Gap(at_us_of(self.records[0]) if self.records else 0, self._num_let_go - len(first))
        return (*first, *(() if not gap.num_records else (gap,)), *self.records)


def at_us_of(record: Record) -> int:
    """When a record was made, in microseconds since Started."""
    return 0 if isinstance(record, Started) else record.at_us
