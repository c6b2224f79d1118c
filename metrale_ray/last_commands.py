# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LastCommands`: the commands that a rank saw last and what it knows of their answers, as records of a journal.

Rules: it only keeps what is there anyway; records are made when somebody asks. The head has every rank's answers, a
worker its own: `RememberingPort` is between its model and its link.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.clock import Clock
from metrale_ray.config import EngineConfig
from metrale_ray.protocol.commands import Command, CommandFrame, Hello, Reply, Status, command_rows
from metrale_ray.protocol.journal.records import (
    JOURNAL_FORMAT,
    Answered,
    Closed,
    Commanded,
    ErrorNote,
    Outcome,
    RankAnswer,
    Record,
    RowNote,
    Started,
)
from metrale_ray.protocol.port import CommandPort
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.version import __version__

MAX_COMMANDS = 64
"""Commands that are remembered: some seconds of steps, and at most some megabytes of long prompts."""

_OUTCOMES: dict[Status, Outcome] = {Status.OK: "ok", Status.REFUSED: "rejected", Status.POISONED: "poisoned"}


@dataclass(slots=True)
class Heard:
    """One command and what came back of it so far, rank 0's own answer first. `at_us`: when it was sent or received.

    `outcome` is how it ended over all ranks, or on this one; None while it has not.
    """

    frame: CommandFrame
    rows: Sequence[PlanRow]
    at_us: int
    replies: list[Reply] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    outcome: Outcome | None = None
    rank: int | None = None
    message: str = ""

    def ended(self, outcome: Outcome, rank: int | None, message: str) -> None:
        """How it ended over all ranks, or what ended the engine."""
        self.outcome, self.rank, self.message = outcome, rank, message

    def commanded(self) -> Commanded:
        """The command's record. Rows that nobody owns here are of request 0."""
        envelope = self.frame.envelope
        rows = (
            [RowNote(r.request_id, r.span.slot, r.span.start, len(r.span.token_ids), r.samples) for r in self.rows]
            if self.rows
            else [RowNote(0, s.slot, s.start, len(s.token_ids), False) for s in command_rows(self.frame.command)]
        )
        cmd = int(self.frame.command.code)
        return Commanded(self.at_us, envelope.epoch, envelope.seq, cmd, tuple(rows), self.frame.data)

    def answered(self, at_us: int) -> Answered:
        """The answers' record, once it has ended."""
        assert self.outcome is not None, "it has ended"
        answers = tuple(map(_rank_answer, self.replies, self.lags_s))
        return Answered(at_us, self.frame.envelope.seq, self.outcome, self.rank, self.message, answers)


class LastCommands:
    """The last MAX_COMMANDS of one rank."""

    def __init__(self) -> None:
        self._heard: deque[Heard] = deque(maxlen=MAX_COMMANDS)

    def add(self, heard: Heard) -> None:
        """One more; the oldest may go."""
        self._heard.append(heard)

    @property
    def last(self) -> Heard | None:
        """The newest, or None."""
        return self._heard[-1] if self._heard else None

    def records(self, started: Started | None, now_us: int, failure: str) -> list[Record]:
        """All of it, for a file of its own: how the engine was started, the commands, and why it ended."""
        records: list[Record] = [] if started is None else [started]
        for heard in self._heard:
            records.append(heard.commanded())
            if heard.outcome is not None:
                records.append(heard.answered(heard.at_us))
        return [*records, Closed(now_us, "these are the last commands", failure)]


class RememberingPort:
    """A worker's CommandPort that remembers what passes through it. Times are `clock`'s, from its making."""

    def __init__(self, port: CommandPort, clock: Clock) -> None:
        self.last_commands = LastCommands()
        self._port = port
        self._clock = clock
        self._began_s = clock()

    @property
    def now_us(self) -> int:
        """Microseconds since this was made."""
        return int((self._clock() - self._began_s) * 1e6)

    def receive(self) -> CommandFrame:
        """See CommandPort."""
        frame = self._port.receive()
        self.last_commands.add(Heard(frame, (), self.now_us))
        return frame

    def reply(self, reply: Reply) -> None:
        """See CommandPort."""
        heard = self.last_commands.last
        if heard is not None and reply.status is not Status.PROGRESS:
            heard.replies.append(reply)
            heard.lags_s.append(0.0)
            error = reply.error
            heard.ended(
                _OUTCOMES.get(reply.status, "failed"), reply.rank if error else None, error.message if error else ""
            )
        self._port.reply(reply)

    def broadcast(self, command: Command) -> CommandFrame:
        """See CommandPort."""
        return self._port.broadcast(command)


def started_record(
    config: EngineConfig,
    hellos: Sequence[Hello],
    num_blocks: int,
    epoch: int,
    eos_token_ids: Iterable[int],
    wall_time_s: float,
) -> Started:
    """How an engine was started, by what its ranks said of themselves."""
    settings: dict[str, Any] = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    del settings["faults"]
    return Started(
        format=JOURNAL_FORMAT,
        wall_time_s=wall_time_s,
        package=__version__,
        epoch=epoch,
        version=int(config.protocol_version),
        redacted=config.journal_redact,
        config=settings,
        must_equal=dict(hellos[0].must_equal),
        ranks=tuple(dict(hello.told) for hello in hellos),
        num_blocks=num_blocks,
        seed=config.seed,
        eos_token_ids=tuple(sorted(eos_token_ids)),
    )


def _rank_answer(reply: Reply, lag_s: float) -> RankAnswer:
    timing, error = reply.timing, reply.error
    return RankAnswer(
        reply.rank,
        int(reply.status),
        reply.digest,
        reply.witness,
        timing.computed_us,
        timing.waited_us,
        int(lag_s * 1e6),
        None if error is None else ErrorNote(error.code, error.message, error.slots),
    )
