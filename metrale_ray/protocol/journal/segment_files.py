# SPDX-License-Identifier: MIT OR Apache-2.0
"""The files that one life writes: the segment that is open, when the next one is due, and the folder's bounds.

Rules: a segment is left when a new one is begun, never written again. `put` gathers, `flush` writes to the system. A
segment is due at `segment_bytes`, and is left without being asked before it has twice as many; room for that is made
when it begins, so that all files together stay below `max_bytes`. It is due at an eighth of `max_age_s` too, so
that a slow engine's records do not stay much longer than others. All errors of the disk pass as OSError.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from metrale_ray.protocol.journal.lives import FILE_MODE, Life, prune
from metrale_ray.protocol.journal.segments import HEAD_BYTES, MAGIC, pack_record, segment_name

SEGMENT_BYTES = 64 * 2**20
"""Where the bound is large: a segment is then some minutes of a busy engine, and begins with a snapshot of up to
some megabytes."""

SEGMENTS_PER_BOUND = 8
"""At least so many segments fit into the bound, so that removing one does not remove most of what there is."""

SEGMENTS_PER_AGE = 8
PRUNE_S = 60.0
"""How often the folder is looked through: other processes write into it too."""

GATHER_BYTES = 2**20
"""So much is gathered before it is written, however much there is in one batch."""


class SegmentFiles:
    """A new life in `folder`, with its first segment open. Raises OSError."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        max_age_s: float,
        segment_bytes: int | None,
        wall_clock: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._segment_bytes = segment_bytes or min(SEGMENT_BYTES, max_bytes // SEGMENTS_PER_BOUND)
        self._wall_clock = wall_clock
        self._parts: list[bytes] = []
        self._num_parts_bytes = 0
        self._number = 0
        self._was_forced = False
        self._file = -1
        self._life = Life.begin(folder, wall_clock())
        try:
            self.roll()
        except OSError:
            self.close()
            raise

    @property
    def life(self) -> Path:
        """The folder that is written."""
        return self._life.path

    @property
    def largest_payload_bytes(self) -> int:
        """A payload that is larger has no place in a segment."""
        return 2 * self._segment_bytes - len(MAGIC) - HEAD_BYTES

    @property
    def is_due(self) -> bool:
        """Whether a new segment should begin: this one is full, or old, or began without a snapshot."""
        age_s = self._wall_clock() - self._began_s
        is_full = self._size_bytes >= self._segment_bytes
        return is_full or self._was_forced or age_s >= self._max_age_s / SEGMENTS_PER_AGE

    def put(self, payload: bytes) -> None:
        """Write a record, soon; in a new segment if this one has no room for it."""
        record = pack_record(payload)
        if self._size_bytes + len(record) > 2 * self._segment_bytes and not self.is_fresh:
            self.roll()
            self._was_forced = True
        self._parts.append(record)
        self._size_bytes += len(record)
        self._num_parts_bytes += len(record)
        if self._num_parts_bytes >= GATHER_BYTES:
            self.flush()

    @property
    def is_fresh(self) -> bool:
        """Whether this segment holds nothing yet."""
        return self._size_bytes == len(MAGIC)

    def roll(self) -> None:
        """Begin the next segment, and make room for it."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1
        self._number += 1
        self._was_forced = False
        path = self._life.path / segment_name(self._number)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        self._size_bytes = len(MAGIC)
        self._began_s = self._wall_clock()
        _write_all(self._file, MAGIC)
        self.prune()

    def flush(self) -> None:
        """Give what was put to the system: it outlives this process then."""
        if self._parts:
            data = b"".join(self._parts)
            self._parts, self._num_parts_bytes = [], 0
            _write_all(self._file, data)
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "its file has been removed", str(self._life.path))

    def prune(self) -> None:
        """Remove what is too old or too much, in the whole folder. `is_prune_due` says when it is time again."""
        self._pruned_s = self._wall_clock()
        room = self._max_bytes - 2 * self._segment_bytes + self._size_bytes
        prune(self._folder, room, self._pruned_s - self._max_age_s)

    @property
    def is_prune_due(self) -> bool:
        """Whether the folder has not been looked through for a while; also when the clock was set back."""
        return not 0 <= self._wall_clock() - self._pruned_s < PRUNE_S

    def close(self) -> None:
        """Close the file and let the life's lock go, without writing. Further calls do nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._life.close()


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
