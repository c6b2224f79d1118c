# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Listing`: what a journal says, gathered in one reading: commands, sequences, failures, and how ranks kept up.

Rules: of commands, sequences and failures the last `limit` are kept, as what matters is near the end, and all are
counted; so memory does not grow with the journal, but by three numbers for each answer of a rank. Nothing is run, and
a journal without clients' content is listed as far as it goes.

What is left out: how it is shown (`cli_journal`).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from metrale_ray.protocol.journal.records import (
    Admitted,
    Answered,
    Closed,
    Commanded,
    Ended,
    Gap,
    RankAnswer,
    ReadRecord,
    Refused,
    RowNote,
    Sampled,
    Snapshot,
    Started,
    Unknown,
)
from metrale_ray.replay.names import cmd_name


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of it to list; None and False: all. `front_request` is (front, number)."""

    request_id: int | None = None
    front_request: tuple[int, int] | None = None
    failures: bool = False


@dataclass(slots=True)
class CommandLine:
    """One command. `outcome` is None where the journal has no answer; `token_ids` are by request, None if redacted."""

    at_us: int
    seq: int
    cmd: int
    rows: tuple[RowNote, ...]
    outcome: str | None = None
    rank: int | None = None
    message: str = ""
    took_us: int = 0
    token_ids: dict[int, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class SequenceLine:
    """One sequence. `reason` is None while it lives. `num_starts`: how often it was computed from its beginning."""

    request_id: int
    front: int
    number: int
    admitted_us: int
    num_prompt_tokens: int
    prompt_token_ids: tuple[int, ...] | None
    seed: int
    priority: int
    deadline_s: float | None
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # empty when redacted
    num_starts: int = 0
    first_token_us: int | None = None
    ended_us: int | None = None
    reason: str | None = None
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class FailureLine:
    """Something that went wrong: `what` in a word or two, of which command or request, and what was said of it."""

    at_us: int
    what: str
    seq: int | None
    request_id: int | None
    rank: int | None
    text: str


class RankTimes:
    """What one rank's answers took, in microseconds."""

    def __init__(self) -> None:
        self.lag_us, self.computed_us, self.waited_us = array("Q"), array("Q"), array("Q")

    def note(self, answer: RankAnswer) -> None:
        """One answer more."""
        self.lag_us.append(answer.lag_us)
        self.computed_us.append(answer.computed_us)
        self.waited_us.append(answer.waited_us)


def spread(values_us: array[int]) -> dict[str, int]:
    """Mean, 99th percentile (the nearest rank) and maximum; zeros where there are no values."""
    if not values_us:
        return {"mean": 0, "p99": 0, "max": 0}
    in_order = sorted(values_us)
    p99 = in_order[math.ceil(0.99 * len(in_order)) - 1]
    return {"mean": round(sum(in_order) / len(in_order)), "p99": p99, "max": in_order[-1]}


class Listing:
    """Filled by `add`, record by record. `limit` of None keeps everything."""

    def __init__(self, wanted: Wanted, limit: int | None) -> None:
        self.started: Started | None = None
        self.snapshot_seq: int | None = None  # the journal begins with one behind this command
        self.closed: Closed | None = None
        self.num_commands = self.num_sequences = self.num_failures = self.num_gaps = self.num_unknown = 0
        self.outcomes: Counter[str] = Counter()
        self.by_cmd: Counter[int] = Counter()
        self.commands: deque[CommandLine] = deque(maxlen=limit)
        self.ended: deque[SequenceLine] = deque(maxlen=limit)
        self.live: dict[int, SequenceLine] = {}
        self.failures: deque[FailureLine] = deque(maxlen=limit)
        self.ranks: dict[int, RankTimes] = {}
        self._wanted = wanted
        self._limit = limit
        self._open: CommandLine | None = None  # the last command, wanted or not

    @property
    def sequences(self) -> list[SequenceLine]:
        """The last ones: those that ended, in that order, then those that live."""
        found = [*self.ended] if self._wanted.failures else [*self.ended, *self.live.values()]
        return found if self._limit is None else found[-self._limit :]

    def add(self, record: ReadRecord) -> None:
        """The next record."""
        match record:
            case Started():
                self.started = record
            case Snapshot():
                self._add_snapshot(record)
            case Admitted():
                self._admit(record)
            case Refused(at_us, front, number, code, message):
                if self._wanted.request_id is None and self._wanted.front_request in (None, (front, number)):
                    text = f"request {number} of front {front}: {message} ({code})"
                    self._fail(FailureLine(at_us, "refused", None, None, None, text))
            case Commanded():
                self._command(record)
            case Answered():
                self._answer(record)
            case Sampled():
                self._sample(record)
            case Ended():
                self._end(record)
            case Gap(at_us, num_records):
                self.num_gaps += 1
                text = f"{num_records} records" if num_records else "nobody knows how many records"
                self._fail(FailureLine(at_us, "gap", None, None, None, f"{text} are missing here"))
            case Closed():
                self.closed = record
                if record.failure is not None:
                    self._fail(FailureLine(record.at_us, "end", None, None, None, record.failure))
            case Unknown():
                self.num_unknown += 1

    def _add_snapshot(self, snapshot: Snapshot) -> None:
        if self.started is None:
            self.started, self.snapshot_seq = snapshot.started, snapshot.seq
        notes = {note.request_id: note for note in snapshot.live}
        for request_id in self.live.keys() - notes.keys():  # they ended where records are missing
            self.ended.append(self.live.pop(request_id))
        new = notes.keys() - self.live.keys()
        for admitted in snapshot.admitted:
            self._admit(admitted, new)
        for request_id in new & self.live.keys():
            line, note = self.live[request_id], notes[request_id]
            line.token_ids = list(note.tokens[note.num_prompt_tokens :])
            line.num_tokens = len(line.token_ids)

    def _admit(self, record: Admitted, among: Collection[int] | None = None) -> None:
        for request_id in record.request_ids:
            if among is not None and request_id not in among:
                continue
            if self._is_wanted_sequence(request_id, record.front, record.number):
                self.num_sequences += 1
                self.live[request_id] = SequenceLine(
                    request_id,
                    record.front,
                    record.number,
                    record.at_us,
                    record.num_prompt_tokens,
                    record.prompt_token_ids,
                    record.seed,
                    record.priority,
                    record.deadline_s,
                )

    def _command(self, record: Commanded) -> None:
        self._open = CommandLine(record.at_us, record.seq, record.cmd, record.rows)
        self.num_commands += 1
        self.by_cmd[record.cmd] += 1
        for row in record.rows:
            line = self.live.get(row.request_id)
            if line is not None and row.start == 0:
                line.num_starts += 1
        if self._is_wanted_command(self._open) and not self._wanted.failures:
            self.commands.append(self._open)

    def _answer(self, record: Answered) -> None:
        self.outcomes[record.kind] += 1
        for answer in record.answers:
            self.ranks.setdefault(answer.rank, RankTimes()).note(answer)
        line = self._open
        if line is None or line.seq != record.seq:
            return
        line.outcome, line.rank, line.message = record.kind, record.rank, record.message
        line.took_us = record.at_us - line.at_us
        if record.kind != "ok" and self._is_wanted_command(line):
            text = f"{cmd_name(line.cmd)}: {record.message}"
            self._fail(FailureLine(record.at_us, record.kind, record.seq, None, record.rank, text))
            if self._wanted.failures:
                self.commands.append(line)

    def _sample(self, record: Sampled) -> None:
        if self._open is not None and self._open.seq == record.seq:
            self._open.token_ids.update((note.request_id, note.token_id) for note in record.tokens)
        for note in record.tokens:
            line = self.live.get(note.request_id)
            if line is not None:
                line.num_tokens += 1
                line.first_token_us = record.at_us if line.first_token_us is None else line.first_token_us
                if note.token_id is not None:
                    line.token_ids.append(note.token_id)

    def _end(self, record: Ended) -> None:
        line = self.live.pop(record.request_id, None)
        if line is None:
            return
        line.ended_us, line.reason, line.code, line.message = record.at_us, record.reason, record.code, record.message
        is_error = record.reason == "error"
        if is_error:
            text = f"{record.message} ({record.code})" if record.message else record.code
            self._fail(FailureLine(record.at_us, "request", None, record.request_id, None, text))
        if is_error or not self._wanted.failures:
            self.ended.append(line)

    def _fail(self, line: FailureLine) -> None:
        self.num_failures += 1
        self.failures.append(line)

    def _is_wanted_sequence(self, request_id: int, front: int, number: int) -> bool:
        wanted = self._wanted
        if wanted.request_id is not None and wanted.request_id != request_id:
            return False
        return wanted.front_request is None or wanted.front_request == (front, number)

    def _is_wanted_command(self, line: CommandLine) -> bool:
        """Whether it has a row of a wanted sequence, or all are wanted."""
        wanted = self._wanted
        if wanted.request_id is None and wanted.front_request is None:
            return True
        return any(row.request_id in self.live for row in line.rows)
