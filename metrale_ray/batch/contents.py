# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Contents`: what INPUT asks and OUTPUT answers, as both were read to their ends.

Rules. Of each line only the digest of its key is kept (`key_table`): by it an answered line is passed over unread, and
any other is known again at the second reading. OUTPUT must answer lines of this INPUT, each once. What it has as an
error is answered, unless errors are to be asked again: then they are taken out of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator

from metrale_ray.batch.input_file import InputFile
from metrale_ray.batch.key_table import KeyTable
from metrale_ray.batch.line import BadLine, BatchRequest, Line, duplicate, key_of
from metrale_ray.batch.output_file import OutputFile
from metrale_ray.batch.record import Record
from metrale_ray.errors import UserError

IS_REQUEST, IS_ANSWERED = 1, 2
MAX_NOTES = 3


class Contents:
    """Counts of lines. `num_answered`: those that OUTPUT keeps, `num_errors` of them errors."""

    def __init__(self, given: InputFile) -> None:
        self.num_answered = 0
        self.num_errors = 0
        self.num_to_ask = 0  # requests that OUTPUT does not answer
        self._given = given
        self._keys = KeyTable()
        self._digests = array("Q")  # of each line
        self._bad: list[BadLine] = []
        self._num_bad = 0
        for number, data in given.lines():
            self._add(given.read(number, data))
        if not self.num_lines:
            raise UserError(f"INPUT {given.path} is empty; write one request in each line")

    @property
    def num_lines(self) -> int:
        """Of INPUT, empty ones left out."""
        return len(self._digests)

    def notes(self) -> list[str]:
        """What is wrong with lines of INPUT, a line for each of the first ones."""
        shown = [f"line {line.number} of INPUT is no request: {line.message}" for line in self._bad]
        more = self._num_bad - len(shown)
        return [*shown, f"{more} more lines of INPUT are no requests"] if more else shown

    def open_lines(self) -> Generator[Line | None, None, None]:
        """The lines that have no answer, in their order; None in place of one that has. Raises UserError."""
        num_read = 0
        for number, data in self._given.lines():
            if num_read == self.num_lines:
                raise self._given.changed()
            digest = self._digests[num_read]
            num_read += 1
            is_answered = (self._keys.mark(digest, 0) or 0) & IS_ANSWERED
            yield None if is_answered else self._known(self._given.read(number, data), digest)
        if num_read < self.num_lines:
            raise self._given.changed()

    def note_answered(self, record: Record) -> None:
        """OUTPUT keeps this. Raises ValueError, saying what is wrong with that."""
        flags = self._keys.mark(self._keys.digest(record.key), IS_ANSWERED)
        if flags is None:
            raise ValueError(f"answers {record.place}, which INPUT does not have")
        if flags & IS_ANSWERED:
            raise ValueError(f"answers {record.place} for the second time")
        self.num_answered += 1
        self.num_errors += record.is_error
        self.num_to_ask -= flags & IS_REQUEST

    def _add(self, line: Line) -> None:
        digest = self._digest(line)
        if not self._keys.add(digest, IS_REQUEST if isinstance(line, BatchRequest) else 0):
            line = duplicate(line)
            digest = self._digest(line)
            self._keys.add(digest)
        self._digests.append(digest)
        if isinstance(line, BatchRequest):
            self.num_to_ask += 1
            return
        self._num_bad += 1
        if len(self._bad) < MAX_NOTES:
            self._bad.append(line)

    def _known(self, line: Line, digest: int) -> Line:
        """The line as it was the first time, when this was its digest."""
        for same in (line, duplicate(line)):
            if self._digest(same) == digest:
                return same
        raise self._given.changed()

    def _digest(self, line: Line) -> int:
        return self._keys.digest(key_of(line))


def read_contents(given: InputFile, output: OutputFile, *, retry_errors: bool) -> Contents:
    """Read both, and take the errors out of OUTPUT if they are to be asked again. Raises UserError."""
    contents, are_errors_out = Contents(given), False
    for record in output.records():
        if record.is_error and retry_errors:
            are_errors_out = True
            continue
        try:
            contents.note_answered(record)
        except ValueError as error:
            corrected = "; or --retry-errors, if a line that was wrong is right now" if record.is_error else ""
            raise UserError(
                f"OUTPUT {output.path} is not of this INPUT ({given.path}): it {error}. Give the INPUT that it is "
                f"of, or another OUTPUT{corrected}"
            ) from error
    if are_errors_out:
        output.drop_errors()
    return contents
