# SPDX-License-Identifier: MIT OR Apache-2.0
"""`InputFile`: INPUT, read line by line as often as is needed, never all of it at once.

Rules. Lines are counted from 1 as editors do; empty ones are skipped. A line that is too long is passed over without
being held. The file stays open, so that another one of its name changes nothing; one that is itself written to between
two readings is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from metrale_ray.batch.line import Line, most_bytes, read_line, too_long
from metrale_ray.errors import UserError
from metrale_ray.serve.limits import ServeLimits

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BUFFER_BYTES = 2**20


class InputFile:
    """The file at `path`. Raises UserError where it cannot be read. Close it."""

    def __init__(self, path: Path, limits: ServeLimits) -> None:
        self.path = path
        self._limits = limits
        self._most_bytes = most_bytes(limits)
        try:
            kind = path.stat().st_mode
            if not stat.S_ISREG(kind):  # opening a pipe would wait for its writer
                what = "a folder" if stat.S_ISDIR(kind) else "no regular file"
                raise UserError(f"INPUT {path} is {what}; it is read more than once, so give a file")
            self._file: BinaryIO = path.open("rb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise UserError(f"cannot read INPUT {path}: {error.strerror}") from error
        self._seen = self._state()

    def close(self) -> None:
        """Done with it."""
        self._file.close()

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Every line, from the first on: its number, and what `read` takes. Raises UserError."""
        if self._state() != self._seen:
            raise self.changed()
        try:
            self._file.seek(0)
            for number, data in enumerate(self._raw_lines(), start=1):
                if data != b"":
                    yield number, data
        except OSError as error:
            raise UserError(f"cannot read INPUT {self.path}: {error.strerror}") from error

    def read(self, number: int, data: bytes | None) -> Line:
        """What stands in a line. It takes twenty times as long as finding the line."""
        return too_long(number, self._limits) if data is None else read_line(number, data, self._limits)

    def changed(self) -> UserError:
        """It is not any more what it was."""
        return UserError(f"INPUT {self.path} was changed meanwhile; run the command again once it stays as it is")

    def _raw_lines(self) -> Iterator[bytes | None]:
        """Every line without white space around it; None for one that is too long."""
        is_first = True
        while data := self._file.readline(self._most_bytes + 1):
            if is_first:
                data, is_first = data.removeprefix(BYTE_ORDER_MARK), False
            is_whole = data.endswith(b"\n") or len(data) <= self._most_bytes
            if not is_whole:
                self._pass_over()
            yield data.strip() if is_whole else None

    def _pass_over(self) -> None:
        """Read on to the end of this line."""
        while (data := self._file.readline(BUFFER_BYTES)) and not data.endswith(b"\n"):
            pass

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns
