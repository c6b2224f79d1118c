# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Contents`: what INPUT asks and OUTPUT answers, as both were read to their ends.

Rules. Of each line only its key is kept (`key_table`). OUTPUT must answer lines of this INPUT, each once. What it has
as an error is answered, unless errors are to be asked again: then they are taken out of it.
"""

from __future__ import annotations

from collections.abc import Generator

from metrale_ray.batch.input_file import InputFile
from metrale_ray.batch.key_table import KeyTable
from metrale_ray.batch.line import BadLine, BatchRequest, Line, duplicate, key_of
from metrale_ray.batch.output_file import OutputFile
from metrale_ray.batch.record import Record
from metrale_ray.errors import UserError

IS_REQUEST, IS_ANSWERED, WAS_MET = 1, 2, 4
MAX_NOTES = 3


class Contents:
    """Counts of lines. `num_answered`: those that OUTPUT keeps, `num_errors` of them errors."""

    def __init__(self, given: InputFile) -> None:
        self.num_lines = 0
        self.num_answered = 0
        self.num_errors = 0
        self.num_to_ask = 0  # requests that OUTPUT does not answer
        self._given = given
        self._keys = KeyTable()
        self._bad: list[BadLine] = []
        self._num_bad = 0
        for line in given.lines():
            self._add(line)
        if not self.num_lines:
            raise UserError(f"INPUT {given.path} is empty; write one request in each line")

    def notes(self) -> list[str]:
        """What is wrong with lines of INPUT, a line for each of the first ones."""
        shown = [f"line {line.number} of INPUT is no request: {line.message}" for line in self._bad]
        more = self._num_bad - len(shown)
        return [*shown, f"{more} more lines of INPUT are no requests"] if more else shown

    def open_lines(self) -> Generator[Line | None, None, None]:
        """The lines that have no answer, in their order; None in place of one that has. Raises UserError."""
        for line in self._given.lines():
            flags = self._keys.mark(key_of(line), WAS_MET)
            if flags is not None and flags & WAS_MET:
                line = duplicate(line)
                flags = self._keys.mark(key_of(line), WAS_MET)
            if flags is None:
                raise UserError(f"INPUT {self._given.path} was changed meanwhile; run the command again")
            yield None if flags & IS_ANSWERED else line

    def note_answered(self, record: Record) -> None:
        """OUTPUT keeps this. Raises ValueError, saying what is wrong with that."""
        flags = self._keys.mark(record.key, IS_ANSWERED)
        if flags is None:
            raise ValueError(f"answers {record.place}, which INPUT does not have")
        if flags & IS_ANSWERED:
            raise ValueError(f"answers {record.place} for the second time")
        self.num_answered += 1
        self.num_errors += record.is_error
        self.num_to_ask -= flags & IS_REQUEST

    def _add(self, line: Line) -> None:
        self.num_lines += 1
        if not self._keys.add(key_of(line), IS_REQUEST if isinstance(line, BatchRequest) else 0):
            line = duplicate(line)
            self._keys.add(key_of(line))
        if isinstance(line, BatchRequest):
            self.num_to_ask += 1
            return
        self._num_bad += 1
        if len(self._bad) < MAX_NOTES:
            self._bad.append(line)


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
            raise UserError(
                f"OUTPUT {output.path} is not of this INPUT ({given.path}): it {error}. Give the INPUT that it is "
                "of, or another OUTPUT"
            ) from error
    if are_errors_out:
        output.drop_errors()
    return contents
