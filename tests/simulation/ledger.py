# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Ledger`: the journal of one life that checks each record as it comes, on the head's own thread.

It checks what the head orders, hears, decides and tells: numbers and outcomes of commands, whose tokens rows hold, one
token for each row that samples and none of a step that failed, nothing of a request whose time is up, one end for each
sequence. After each command it compares every rank, and before each step the head's pools, with the `mirror`. What is
wrong goes to `complaints`; nothing is raised into the engine.

It keeps all records, for a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from metrale_ray.model.slots import Slots
from metrale_ray.protocol.codec import decode_command
from metrale_ray.protocol.commands import CommandFrame, Rank, Settled, Status, command_rows
from metrale_ray.protocol.journal.journal import JournalState
from metrale_ray.protocol.journal.records import Admitted, Answered, Commanded, Ended, Record, Sampled, Started
from metrale_ray.scheduler.request import RequestId
from metrale_ray.scheduler.scheduler import Scheduler
from tests.simulation.mirror import Mirror
from tests.simulation.oracle import derived_seed

MAX_COMPLAINTS = 20

Unwanted = tuple[int, int | None, int | None]
"""What the head was told to end: all of a front's, a request of it, or one sequence of that."""


@dataclass(slots=True)
class Known:
    """One sequence: its tokens so far, whose it is (front, number, index), its place among all, how it ended, and when
    its time was up (microseconds)."""

    tokens: list[int]
    whose: tuple[int, int, int] = (0, 0, 0)
    order: tuple[int, int] = (0, 0)
    late_at_us: float | None = None
    end: str | None = None


@dataclass(slots=True)
class Ledger:
    """Of the life with this epoch. `slots_of` gives each rank's live slots, `scheduler` the head's, once there are;
    `unwanted` what the head was told to end until now."""

    epoch: int
    slots_of: Callable[[], Mapping[int, Slots]]
    scheduler: Callable[[], Scheduler | None]
    unwanted: Callable[[], Sequence[Unwanted]] = tuple
    is_on: bool = True
    records: list[Record] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    mirror: Mirror = field(default_factory=Mirror)
    sequences: dict[int, Known] = field(default_factory=dict)
    closed: tuple[str, str | None] | None = None
    is_snapshot_due: bool = False
    _seq: int | None = None  # of the last command
    _settled: Settled | None = None  # what the next command must say of it
    _step_over_us: int = 0  # when the last command with rows was answered
    _heard: tuple[int, int] = (0, 0)  # how much was unwanted at the last two steps
    _ran: tuple[frozenset[int], int] = (frozenset(), 0)  # who ran at the last step, and preemptions until then
    _owed: dict[int, int] = field(default_factory=dict)  # rows of the last successful command that sample, by request

    # What a Journal is ----------------------------------------------------------------------------------------------

    def note(self, record: Record) -> None:
        """Check one record and keep it."""
        self.records.append(record)
        if len(self.complaints) < MAX_COMPLAINTS:
            self.complaints += self._check(record)

    def note_later(self, make: Callable[[], Record], num_bytes: int) -> None:
        """As `note`, at once."""
        self.note(make())

    def state(self) -> JournalState | None:
        """As one in memory."""
        return JournalState(True)

    def wants_snapshot(self) -> bool:
        """Whether `is_snapshot_due` was set since the last Snapshot."""
        return self.is_snapshot_due

    def close(self, reason: str, failure: str | None) -> None:
        """The life has ended."""
        self.closed = self.closed or (reason, failure)

    # What is checked ------------------------------------------------------------------------------------------------

    def _check(self, record: Record) -> Iterator[str]:
        match record:
            case Started():
                if record.epoch != self.epoch:
                    yield f"the engine started in epoch {record.epoch}, and this is epoch {self.epoch}"
            case Admitted():
                yield from self._admitted(record)
            case Commanded():
                yield from self._commanded(record)
            case Answered():
                yield from self._answered(record)
            case Sampled():
                yield from self._sampled(record)
            case Ended():
                yield from self._ended(record)

    def _admitted(self, record: Admitted) -> Iterator[str]:
        prompt = record.prompt_token_ids
        assert prompt is not None, "this journal is not redacted"
        seed = record.params.get("seed")
        if record.seed != (derived_seed(0, record.request_ids[0]) if seed is None else seed):
            yield f"request {record.request_ids[0]} asks for the seed {seed} and got {record.seed}"
        for index, request_id in enumerate(record.request_ids):
            if request_id in self.sequences:
                yield f"request id {request_id} is used twice"
            late_at_us = None if record.deadline_s is None else record.at_us + record.deadline_s * 1e6
            self.sequences[request_id] = Known(
                list(prompt), (record.front, record.number, index), (record.priority, request_id), late_at_us
            )

    def _commanded(self, record: Commanded) -> Iterator[str]:
        assert record.data is not None, "this journal is not redacted"
        frame = decode_command(record.data, Rank(0))
        envelope = frame.envelope
        if self._owed:
            yield f"no token was sampled for {sorted(self._owed)} after command {self._seq}"
            self._owed = {}
        if (record.epoch, envelope.epoch) != (self.epoch, self.epoch):
            yield f"command {envelope.seq} is of epoch {envelope.epoch} in epoch {self.epoch}"
        if self._seq is not None:
            if (record.seq, envelope.seq) != (self._seq + 1, self._seq + 1):
                yield f"command {envelope.seq} follows command {self._seq}"
            if envelope.settled != self._settled:
                yield f"command {envelope.seq} says {envelope.settled}; what happened is {self._settled}"
        self._seq = envelope.seq
        yield from self.mirror.sent(frame)
        yield from self._check_rows(record, frame)
        scheduler = self.scheduler()
        if record.rows and scheduler is not None:
            yield from self.mirror.compare_head(scheduler)
            yield from self._check_turns(record, scheduler)
        if record.rows:
            yield from self._check_unwanted(record)

    def _check_turns(self, record: Commanded, scheduler: Scheduler) -> Iterator[str]:
        """Who begins to run comes before everyone who waits, and comes in no step that preempts."""
        ran, num_preemptions = self._ran
        self._ran = frozenset(scheduler._running), scheduler.num_preemptions
        begun = [row.request_id for row in record.rows if row.start == 0 and row.request_id not in ran]
        if not begun:
            return
        if scheduler.num_preemptions > num_preemptions:
            yield f"requests {begun} begin to run in command {record.seq}, for which others were preempted"
        last = max(self.sequences[request_id].order for request_id in begun)
        for sequence in scheduler._waiting._sequences:
            order = self.sequences[sequence.request_id].order
            if order < last:
                yield f"request {sequence.request_id} waits at {order}, and one at {last} runs in command {record.seq}"

    def _check_unwanted(self, record: Commanded) -> Iterator[str]:
        """What the head heard of two steps ago has ended."""
        unwanted = self.unwanted()
        known = set(unwanted[: self._heard[0]])
        self._heard = self._heard[1], len(unwanted)
        for row in record.rows:
            front, number, index = self.sequences[row.request_id].whose
            if known.intersection({(front, None, None), (front, number, None), (front, number, index)}):
                yield f"request {row.request_id} runs in command {record.seq}, long after it was to end"

    def _check_rows(self, record: Commanded, frame: CommandFrame) -> Iterator[str]:
        """The rows are of live sequences, and hold their very tokens."""
        spans = command_rows(frame.command)
        if [row.slot for row in record.rows] != [span.slot for span in spans]:
            yield f"the journal notes {record.rows} for the rows {spans}"
            return
        for row, span in zip(record.rows, spans, strict=True):
            known = self.sequences.get(row.request_id)
            if known is None or known.end is not None:
                yield f"a row of command {record.seq} is for request {row.request_id}, which does not live: {known}"
            elif tuple(known.tokens[span.start : span.end]) != span.token_ids:
                yield (
                    f"request {row.request_id} has {known.tokens[span.start : span.end]} from {span.start} on, and "
                    f"command {record.seq} {span.token_ids}"
                )
            elif known.late_at_us is not None and known.late_at_us < self._step_over_us:
                yield f"request {row.request_id} runs in command {record.seq}, and its time was up before"
            elif row.samples != (span.end == len(known.tokens)):
                yield f"whether request {row.request_id} samples in command {record.seq} is said to be {row.samples}"

    def _answered(self, record: Answered) -> Iterator[str]:
        if record.seq != self._seq:
            yield f"an answer to command {record.seq} came after command {self._seq}"
        statuses = {answer.rank: Status(answer.status) for answer in record.answers}
        is_ok = bool(statuses) and all(status is Status.OK for status in statuses.values())
        if record.kind == "ok" and not is_ok:
            yield f"command {record.seq} is taken to have succeeded, and the ranks said {statuses}"
        if record.kind not in ("lost", "desync"):
            yield from self._compare_ranks(record)
        self._settled = Settled(record.seq, record.kind == "ok")
        last = next((r for r in reversed(self.records) if isinstance(r, Commanded)), None)
        if last is not None and last.rows:
            self._step_over_us = record.at_us
        if record.kind == "ok" and last is not None:
            self._owed = {row.request_id: row.slot for row in last.rows if row.samples}
        self.mirror.settle(record.kind == "ok")

    def _compare_ranks(self, record: Answered) -> Iterator[str]:
        ranks = self.slots_of()
        if sorted(ranks) != sorted(answer.rank for answer in record.answers):
            who = [answer.rank for answer in record.answers]
            yield f"command {record.seq} was answered by ranks {who} of {sorted(ranks)}"
        for rank, slots in ranks.items():
            for line in self.mirror.compare_rank(rank, slots):
                yield f"after command {record.seq}: {line}"

    def _sampled(self, record: Sampled) -> Iterator[str]:
        for note in record.tokens:
            known = self.sequences[note.request_id]
            if self._owed.pop(note.request_id, None) is None:
                yield f"request {note.request_id} gets a token after command {record.seq}, which owes it none"
            assert note.token_id is not None, "this journal is not redacted"
            known.tokens.append(note.token_id)

    def _ended(self, record: Ended) -> Iterator[str]:
        known = self.sequences.get(record.request_id)
        if known is None or known.end is not None:
            yield f"request {record.request_id} ends by {record.reason} and does not live: {known}"
            return
        known.end = record.reason
        scheduler = self.scheduler()
        sequence = None if scheduler is None else scheduler._live.get(RequestId(record.request_id))
        if record.code == "slot_poisoned" and sequence is not None and sequence.num_generated_at_resume is None:
            yield f"request {record.request_id} ends by its first poisoned slot, and was not tried again"
        self._owed.pop(record.request_id, None)

    def counted(self) -> dict[str, int]:
        """What the engine's counters must say when nothing is under way."""
        ends = [record for record in self.records if isinstance(record, Ended)]
        sampled = [record for record in self.records if isinstance(record, Sampled)]
        answered = [record for record in self.records if isinstance(record, Answered)]
        rows = {record.seq: bool(record.rows) for record in self.records if isinstance(record, Commanded)}
        return {
            "finished_requests": sum(end.reason in ("stop", "length") for end in ends),
            "failed_requests": sum(end.reason == "error" for end in ends),
            "expired_requests": sum(end.code == "deadline_exceeded" for end in ends),
            "tokens": sum(len(record.tokens) for record in sampled),
            "commands": len(answered),
            "failed_commands": sum(record.kind != "ok" for record in answered),
            "steps": sum(record.kind == "ok" and rows[record.seq] for record in answered),
        }

    def at_rest(self) -> Iterator[str]:
        """What is wrong when nothing is left to do: something lives, or is held."""
        living = [number for number, known in self.sequences.items() if known.end is None]
        if living:
            yield f"requests {living} never ended"
        if self.mirror.slots:
            yield f"the ranks still hold {self.mirror.slots}"
