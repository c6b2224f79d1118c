# SPDX-License-Identifier: MIT OR Apache-2.0
"""`OutputFile`: OUTPUT, which is all that a batch remembers: what stands in it is answered.

Rules. One run at a time, by a lock on the file itself. A line is written whole and at once, and reaches the disk within
some seconds. What a run that was killed has left of its last line is cut off; a file that anyone else has written is
refused, and nothing of it is lost. Errors are taken out by writing the rest to another file, which then takes its
place, so that every moment leaves the one or the other. A file that was made here and got no line is removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from metrale_ray.batch.record import START, Record, read_record
from metrale_ray.errors import UserError

log = logging.getLogger(__name__)

SYNC_S = 5.0
"""How much of the work a machine that loses its power may cost; a process that is killed loses nothing."""

FILE_MODE = 0o666  # less what the user's mask takes away
BUFFER_BYTES = 2**20
REST_NAME = ".{}.metrale-rest"
"""What OUTPUT without its errors is written to."""


class OutputFile:
    """The file at `path`, made where it is missing, and locked. Raises UserError. Close it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        with _told(path):
            if path.exists() and not path.is_file():  # asked before links are followed: /dev/stdout leads nowhere
                raise UserError(f"OUTPUT {path} is no regular file; give a file")
            self.path = Path(os.path.realpath(path))  # a link stays one when errors are taken out
            self._made = not self.path.exists()
        self._clock = clock
        self._descriptor = self._open_locked()
        self._synced_at_s = clock()
        self._is_synced = True

    def close(self) -> None:
        """Let others have it."""
        if self._made and os.fstat(self._descriptor).st_size == 0 and self._is_current(self._descriptor):
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def records(self) -> Iterator[Record]:
        """What stands in it, from the first line on; at the end what is left of a line is cut off.

        Raises UserError for a file that holds anything else.
        """
        good_bytes, ends_whole = 0, True
        bad: tuple[int, str] | None = None
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=BUFFER_BYTES) as lines:
            lines.seek(0)
            for number, data in enumerate(lines, start=1):
                if bad is not None:
                    raise self._foreign(*bad)
                record, problem = _read(data)
                if problem:
                    if not _is_left_of_a_line(data):
                        raise self._foreign(number, problem)
                    bad = (number, problem)
                    continue
                good_bytes, ends_whole = good_bytes + len(data), data.endswith(b"\n")
                if record is not None:
                    yield record
        if bad is not None:
            log.info("the last line of OUTPUT %s was not written to its end, and is asked again", self.path)
            os.ftruncate(self._descriptor, good_bytes)
        if not ends_whole:
            self._write(b"\n")

    def drop_errors(self) -> None:
        """Take out every line that is an error."""
        name = self.path.with_name(REST_NAME.format(self.path.name))
        try:
            name.unlink(missing_ok=True)  # of a run that was killed meanwhile
            rest = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise self._failed(error, f"{name}, which takes its place without errors") from error
        try:
            os.fchmod(rest, stat.S_IMODE(os.fstat(self._descriptor).st_mode))
            self._lock(rest)
            self._copy_answers(rest)
            os.fsync(rest)
            os.replace(name, self.path)
        except BaseException as error:
            os.close(rest)
            name.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise self._failed(error) from error
            raise
        os.close(self._descriptor)
        self._descriptor = rest
        self._sync_folder()

    def append(self, line: bytes) -> None:
        """Write one whole line. Raises UserError, and then nothing of it is there."""
        self._write(line)
        self._is_synced = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to `sync`."""
        return not self._is_synced and self._clock() >= self._synced_at_s + SYNC_S

    def sync(self) -> None:
        """Wait until the disk has it all. Raises UserError, also where the file is not under its name any more."""
        self._is_synced, self._synced_at_s = True, self._clock()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error
        if not self._is_current(self._descriptor):
            raise UserError(
                f"OUTPUT {self.path} was removed or replaced while it was written. Put it back if you can, and run the "
                "same command again to go on"
            )

    def _open_locked(self) -> int:
        """The file as it is under its name now: another run may have put another one there."""
        while True:
            descriptor = self._open()
            try:
                self._lock(descriptor)
                if self._is_current(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _open(self) -> int:
        with _told(self.path):
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another run is writing OUTPUT {self.path}; wait for its end, or give another OUTPUT"
            ) from error
        except OSError as error:  # some shared file systems know no locks
            log.warning("OUTPUT %s cannot be locked (%s): start no second run with it", self.path, error.strerror)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _copy_answers(self, rest: int) -> None:
        with (
            os.fdopen(os.dup(self._descriptor), "rb", buffering=BUFFER_BYTES) as lines,
            os.fdopen(os.dup(rest), "wb", buffering=BUFFER_BYTES) as kept,
        ):
            lines.seek(0)
            for data in lines:
                record, _ = _read(data)
                if record is not None and not record.is_error:
                    kept.write(data)

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise self._failed(error) from error

    def _failed(self, error: OSError, what: str = "") -> UserError:
        what = what or f"OUTPUT {self.path}"
        return UserError(
            f"cannot write {what}: {error.strerror}; what OUTPUT holds stays. See to it, and run the same command "
            "again to go on"
        )

    def _foreign(self, number: int, problem: str) -> UserError:
        return UserError(
            f"OUTPUT {self.path} holds something else: line {number} is no line of a batch's output ({problem}). Give "
            "another OUTPUT, or remove this one"
        )


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Why a file cannot be opened, as a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"the folder of OUTPUT {path} does not exist; make it, or give another one") from error
    except OSError as error:
        raise UserError(f"cannot write OUTPUT {path}: {error.strerror}") from error


def _is_left_of_a_line(data: bytes) -> bool:
    """Whether it is the beginning of a line, or what a lost disk write leaves."""
    return START.startswith(data[: len(START)]) or data.strip(b"\0") == b""


def _read(data: bytes) -> tuple[Record | None, str]:
    """What a line says, None for an empty one; and what is wrong with it."""
    if not data.strip():
        return None, ""
    try:
        return read_record(data), ""
    except ValueError as error:
        return None, str(error)
