# SPDX-License-Identifier: MIT OR Apache-2.0
"""`JournalWriter`: the journal in files.

Rules: whoever notes only appends to a queue; a thread of the writer's own makes records, packs and writes. The queue is
bounded: when the disk is too slow, records are let go until what is queued has been written, and a Gap there counts
them. Whatever the disk refuses switches the journal off with one line in the log, and the engine goes on. A process
that is killed loses what was noted in its last moments, GATHER_S and what writing takes; what was written then ends
whole or torn.

What is left out: files and their bounds (`segment_files`), what a redacted journal leaves out (`redaction`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metrale_ray.clock import Clock
from metrale_ray.errors import ConfigError, FrameError
from metrale_ray.protocol.journal.journal import JournalState
from metrale_ray.protocol.journal.record_codec import encode_record
from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Gap,
    Record,
    Sampled,
    Snapshot,
    Started,
)
from metrale_ray.protocol.journal.redaction import Redaction
from metrale_ray.protocol.journal.segment_files import SegmentFiles

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 * 2**20
"""What waits to be written, by estimate: seconds of a busy engine. As much again may be in the writer's hands."""

GATHER_S = 0.05
"""How long the thread waits for more before it writes: it wakes for some steps at a time, and not inside each."""

CLOSE_S = 5.0
"""How long the end of an engine waits for a slow disk."""

IDLE_S = 60.0
"""How often an engine that notes nothing has its bounds of age looked after."""

BASE_BYTES = 256
ROW_BYTES = 128
ANSWER_BYTES = 512
TOKEN_BYTES = 256
ID_BYTES = 8


class JournalWriter:
    """A Journal in a new folder inside `folder`, which many engines may share. Raises ConfigError where it cannot be.

    `max_bytes` and `max_age_s` bound all of `folder`. `redact`: leave clients' content out. `segment_bytes` is chosen
    by `max_bytes` where it is not given. `clock` is the one that `at_us` of the records is from.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int,
        max_age_s: float,
        redact: bool,
        segment_bytes: int | None = None,
        clock: Clock = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.failure: str | None = None
        self._folder = Path(folder)
        self._files = _begin(self._folder, max_bytes, max_age_s, segment_bytes, wall_clock)
        self._redaction = Redaction() if redact else None
        self._clock = clock
        self._started_s = clock()
        self._is_on = True
        self._is_snapshot_due = False
        self._lock = threading.Lock()  # over what follows; held for moments only
        self._queue: list[Record | Callable[[], Record]] = []
        self._num_queued_bytes = 0
        self._num_queued_snapshots = 0
        self._num_let_go = 0
        self._num_let_go_before = 0  # those that a Gap has counted
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def life(self) -> Path:
        """The folder of this life's segments."""
        return self._files.life

    @property
    def is_on(self) -> bool:
        """Whether records are still written."""
        return self._is_on

    def note(self, record: Record) -> None:
        """Queue `record` for the thread, or count it where the queue is full. Any thread may note."""
        self._append(record, _estimated_bytes(record))

    def note_later(self, make: Callable[[], Record], num_bytes: int) -> None:
        """Queue `make` for the thread, which calls it. Any thread may note."""
        self._append(make, num_bytes)

    def _append(self, record: Record | Callable[[], Record], num_bytes: int) -> None:
        with self._lock:
            if not self._is_on:
                return
            if self._num_let_go or (self._queue and self._num_queued_bytes + num_bytes > MAX_QUEUED_BYTES):
                self._num_let_go += 1
                return
            if type(record) is Snapshot:
                self._num_queued_snapshots += 1
                self._is_snapshot_due = False
            elif type(record) is Started:
                self._started_s = self._clock()
            self._queue.append(record)
            self._num_queued_bytes += num_bytes
        if not self._wake.is_set():
            self._wake.set()

    def wants_snapshot(self) -> bool:
        """Whether a new segment is due, or records were let go, so that only a Snapshot can be gone on from."""
        return self._is_snapshot_due

    def state(self) -> JournalState | None:
        """How it does. From any thread."""
        return JournalState(self._is_on, self.failure, self._num_let_go_before + self._num_let_go)

    def close(self, reason: str, failure: str | None) -> None:
        """Write what is queued and the end, waiting CLOSE_S at most. Further calls do nothing."""
        with self._lock:
            if self._is_on:
                self._queue.append(Closed(self._now_us(), reason, failure))
                self._is_on = False
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the end of the journal in %s is not written after %g s; it may be torn", self.life, CLOSE_S)

    def _now_us(self) -> int:
        return max(0, round((self._clock() - self._started_s) * 1e6))

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(IDLE_S)
                self._closing.wait(GATHER_S)
                self._write(self._taken())
            self._write(self._taken())  # what came between the last look and the end
        except OSError as error:
            self._fail(error.strerror or str(error))
        except MemoryError:
            self._fail("no memory is left for it")
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            if self._is_on and self.failure is None:  # a mistake of this code, which goes to the thread's hook
                self.failure = f"the journal in {self.life} is off: its thread has ended"
            self._is_on, self._is_snapshot_due = False, False
            self._queue = []
        self._files.close()

    def _fail(self, what: str) -> None:
        self.failure = f"the journal in {self.life} is off: {what}"
        log.error("%s; the engine goes on without it", self.failure)

    def _taken(self) -> list[Record | Callable[[], Record]]:
        """What is queued, which then is the thread's alone."""
        with self._lock:
            self._wake.clear()
            batch, self._queue = self._queue, []
            num_let_go, self._num_let_go = self._num_let_go, 0
            self._num_let_go_before += num_let_go
            self._num_queued_bytes, self._num_queued_snapshots = 0, 0
        if num_let_go:
            log.warning("the disk is too slow for the journal in %s: %d records were let go", self.life, num_let_go)
            end = len(batch) - 1 if batch and type(batch[-1]) is Closed else len(batch)
            batch.insert(end, Gap(self._now_us(), num_let_go))
        return batch

    def _write(self, batch: list[Record | Callable[[], Record]]) -> None:
        is_whole = True
        for queued in batch:
            record = self._made(queued) if callable(queued) else queued
            is_whole = self._put(record) and (is_whole or type(record) is Snapshot)
        self._files.flush()
        if self._files.is_prune_due:
            self._files.prune()
        with self._lock:
            if (self._files.is_due or not is_whole) and not self._num_queued_snapshots and self._is_on:
                self._is_snapshot_due = True

    def _made(self, make: Callable[[], Record]) -> Record:
        """What `make` gives. Its error, such as a GPU's that has failed meanwhile, costs this record alone."""
        try:
            return make()
        except RuntimeError as error:  # of a device; another one is a mistake of this code
            log.warning("a record of the journal in %s cannot be made: %r", self.life, error)
            return Gap(self._now_us(), 1)

    def _put(self, record: Record) -> bool:
        """Write `record`, a Snapshot at the start of a segment. Whether what follows can be gone on from."""
        if type(record) is Snapshot and not self._files.is_fresh:
            self._files.roll()
        try:
            payload = encode_record(record if self._redaction is None else self._redaction.redact(record))
        except FrameError as error:
            return self._let_go(record, error.message)
        if len(payload) > self._files.largest_payload_bytes:
            return self._let_go(record, f"{len(payload)} bytes are too much for the journal's bound")
        self._files.put(payload)
        return type(record) is not Gap

    def _let_go(self, record: Record, why: str) -> bool:
        log.warning("a record of the journal in %s is left out (%s): %s", self.life, type(record).__name__, why)
        self._files.put(encode_record(Gap(self._now_us(), 1)))
        # Another snapshot would be as large: the next one is asked for when the next segment is due.
        return type(record) is Snapshot


def _begin(
    folder: Path, max_bytes: int, max_age_s: float, segment_bytes: int | None, wall_clock: Callable[[], float]
) -> SegmentFiles:
    try:
        return SegmentFiles(folder, max_bytes, max_age_s, segment_bytes, wall_clock)
    except OSError as error:
        raise ConfigError(
            f"journal is {str(folder)!r}, which cannot be written: {error.strerror} ({error.filename or folder}); "
            "give a folder that this user may make or write, or leave the journal out"
        ) from error


def _estimated_bytes(record: Record) -> int:
    """About what `record` takes while it is queued. Says a little for whatever else it is given."""
    estimate = _ESTIMATES.get(type(record))
    return BASE_BYTES if estimate is None else BASE_BYTES + estimate(record)


def _of_commanded(record: Commanded) -> int:
    return len(record.data or b"") + ROW_BYTES * len(record.rows)


def _of_answered(record: Answered) -> int:
    return ANSWER_BYTES * len(record.answers)


def _of_sampled(record: Sampled) -> int:
    return TOKEN_BYTES * len(record.tokens)


def _of_admitted(record: Admitted) -> int:
    lists = (value for value in record.params.values() if isinstance(value, bytes | str | list | tuple))
    return BASE_BYTES + ID_BYTES * len(record.prompt_token_ids or ()) + sum(map(len, lists))


def _of_snapshot(record: Snapshot) -> int:
    live = (BASE_BYTES + ID_BYTES * (len(note.tokens) + len(note.block_table)) for note in record.live)
    return sum(map(_of_admitted, record.admitted)) + sum(live)


_ESTIMATES: dict[type[Any], Callable[[Any], int]] = {
    Commanded: _of_commanded,
    Answered: _of_answered,
    Sampled: _of_sampled,
    Admitted: _of_admitted,
    Snapshot: _of_snapshot,
}
