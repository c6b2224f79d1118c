# SPDX-License-Identifier: MIT OR Apache-2.0
"""The folder of journals: a folder for each life of an engine, and what is removed so that bounds hold.

    <folder>/<UTC time>-<process>/000001.journal ...     a life: its segments, and `lock`, which its process holds
    <folder>/<UTC time>-<name>.dump                      a few records by themselves (see `dump`)
    <folder>/incidents/<rank>/<UTC time>-<name>.dump     the same, a folder for each rank

Rules: only this user can read them. Several processes may share the folder: what one is writing, which is the last
segment of a life whose lock is held, is never removed by another. Oldest goes first, whoever wrote it. A life without
segments and without a process is removed. A lock comes into being locked, so a life is never taken for an ended one
while it begins.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from metrale_ray.protocol.journal.segments import DUMP_NAME, segment_number

log = logging.getLogger(__name__)

LIFE_NAME = re.compile(r"\d{8}T\d{6}Z-\d+(-\d+)?")
LOCK_NAME = "lock"
INCIDENTS = "incidents"
FOLDER_MODE, FILE_MODE = 0o700, 0o600
MAX_NAMESAKES = 100
"""Lives of one second and one process number: hosts that share the folder may have the same numbers."""

UNLOCKED_S = 60.0
"""A life that has no lock for so long is none: its process ended while it made the folder."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the folder: when it was written last (seconds since 1970), how large it is, and whether it may go."""

    written_s: float
    path: Path
    size_bytes: int
    may_go: bool


class Life:
    """A life's folder, whose lock this process holds until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def begin(cls, folder: Path, now_s: float) -> Life:
        """A new life in `folder`, which is made where it is missing. Raises OSError."""
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        path = _new_folder(folder, f"{stamp(now_s)}-{os.getpid()}")
        return cls(path, _new_lock(path))

    def close(self) -> None:
        """Let the lock go. Further calls do nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def stamp(wall_time_s: float) -> str:
    """The time in UTC, as names have it; later ones sort behind."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(wall_time_s))


def lives_of(folder: Path) -> list[Path]:
    """The lives in `folder`, oldest first."""
    with os.scandir(folder) as entries:
        return sorted(
            Path(entry.path)
            for entry in entries
            if LIFE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )


def segments_of(life: Path) -> list[tuple[int, Path]]:
    """The segments in a life's folder and their numbers, in order."""
    with os.scandir(life) as entries:
        numbered = [(segment_number(entry.name), Path(entry.path)) for entry in entries]
    return sorted((number, path) for number, path in numbered if number is not None)


def dumps_of(folder: Path) -> list[Path]:
    """The dumps in `folder`, by name."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if DUMP_NAME.fullmatch(entry.name))
    return []


def prune(folder: Path, max_bytes: int, oldest_s: float) -> int:
    """Remove what was written last before `oldest_s`, and the oldest of what is above `max_bytes` in all.

    Gives the bytes that are left. What other processes are writing stays, and what cannot be removed stays too.
    """
    stored = sorted(_stored(folder), key=lambda file: (file.written_s, file.path))
    total = sum(file.size_bytes for file in stored)
    for file in stored:
        if file.may_go and (total > max_bytes or file.written_s < oldest_s) and _removed(file.path):
            total -= file.size_bytes
    _remove_empty_lives(folder)
    return total


def _new_folder(folder: Path, name: str) -> Path:
    for number in range(1, MAX_NAMESAKES + 1):
        path = folder / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(mode=FOLDER_MODE)
            return path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder / name))


def _new_lock(life: Path) -> int:
    unnamed = life / f"{LOCK_NAME}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(life / LOCK_NAME)
    except OSError:
        os.close(lock)
        raise
    return lock


def _stored(folder: Path) -> Iterator[StoredFile]:
    for life in lives_of(folder):
        with suppress(FileNotFoundError):  # another process may remove it meanwhile
            segments = [path for _, path in segments_of(life)]
            is_written = _is_held(life)
            for path in segments:
                yield from _stored_file(path, may_go=not is_written or path != segments[-1])
    for dumps in (folder, *folder.glob(f"{INCIDENTS}/*/")):
        for path in dumps_of(dumps):
            yield from _stored_file(path, may_go=True)


def _stored_file(path: Path, *, may_go: bool) -> Iterator[StoredFile]:
    with suppress(FileNotFoundError):
        found = path.stat()
        yield StoredFile(found.st_mtime, path, found.st_size, may_go)


def _is_held(life: Path) -> bool:
    """Whether a process writes this life, or is about to."""
    try:
        lock = os.open(life / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - life.stat().st_mtime < UNLOCKED_S
    except OSError:
        return True  # another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _removed(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove %s, so the journal's bounds do not hold: %s", path, error.strerror)
        return False
    return True


def _remove_empty_lives(folder: Path) -> None:
    for life in lives_of(folder):
        with suppress(OSError):  # it holds something else, is another user's, or another process was faster
            if not segments_of(life) and not _is_held(life):
                for name in (LOCK_NAME, f"{LOCK_NAME}.new"):
                    (life / name).unlink(missing_ok=True)
                life.rmdir()
