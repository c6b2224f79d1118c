# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LastCommands`: the commands that a rank saw last and what it knows of their answers, as records of a journal.

Rules: it only keeps what is there anyway; records are made when somebody asks. The head has every rank's answers, a
worker its own: `RememberingPort` is between its model and its link. A worker knows neither whose rows are nor which of
them give a token.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.clock import Clock
from metrale_ray.config import EngineConfig
from metrale_ray.errors import MetraleError
from metrale_ray.protocol.commands import Cmd, Command, CommandFrame, Hello, Load, Reply, Status, command_rows
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

ROW_BYTES = 256
BYTES_PER_BYTE = 6
"""What is held for each row, and for each byte of a frame: the tokens are there as numbers too."""

ANSWER_BYTES = 1024
MAX_COMMANDS = 64
"""Commands that are remembered: some seconds of steps, and at most some megabytes of long prompts."""

_UNEVENTFUL = (Cmd.PING, Cmd.SCRUB)  # once they have succeeded

_OUTCOMES: dict[Status, Outcome] = {Status.OK: "ok", Status.REFUSED: "rejected", Status.POISONED: "poisoned"}


@dataclass(slots=True)
class Heard:
    """One command and what came back of it so far, rank 0's own answer first. `at_us`: when it was sent or received.

    `outcome` is how it ended over all ranks, or on this one, at `ended_at_us`; None while it has not. Nothing changes
    after that, so that the records may be made on another thread.
    """

    frame: CommandFrame
    rows: Sequence[PlanRow]
    at_us: int
    replies: list[Reply] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    outcome: Outcome | None = None
    rank: int | None = None
    message: str = ""
    ended_at_us: int = 0

    @property
    def is_uneventful(self) -> bool:
        """Whether nobody will ask for it: a ping or a scrub that found nothing."""
        return self.outcome == "ok" and self.frame.command.code in _UNEVENTFUL

    def ended(self, outcome: Outcome, rank: int | None, message: str, at_us: int) -> None:
        """How it ended over all ranks, or what ended the engine, at `at_us`."""
        self.outcome, self.rank, self.message, self.ended_at_us = outcome, rank, message, at_us

    @property
    def num_bytes(self) -> int:
        """About what the command takes in memory."""
        return BYTES_PER_BYTE * len(self.frame.data) + ROW_BYTES * len(self.rows)

    @property
    def num_answer_bytes(self) -> int:
        """About what the answers take in memory."""
        return ANSWER_BYTES * len(self.replies)

    def commanded(self) -> Commanded:
        """The command's record. Rows that nobody owns here are of request 0."""
        envelope = self.frame.envelope
        rows = (
            [
                RowNote._make((row.request_id, (span := row.span).slot, span.start, len(span.token_ids), row.samples))
                for row in self.rows
            ]
            if self.rows
            else [RowNote(0, s.slot, s.start, len(s.token_ids), False) for s in command_rows(self.frame.command)]
        )
        cmd = int(self.frame.command.code)
        return Commanded(self.at_us, envelope.epoch, envelope.seq, cmd, tuple(rows), self.frame.data)

    def answered(self) -> Answered:
        """The answers' record, once it has ended."""
        assert self.outcome is not None, "it has ended"
        answers = tuple(map(_rank_answer, self.replies, self.lags_s))
        return Answered(self.ended_at_us, self.frame.envelope.seq, self.outcome, self.rank, self.message, answers)


class LastCommands:
    """The last MAX_COMMANDS of one rank.

    A ping or a scrub that found nothing gives way to the next command: an idle engine's do not push out what it did.
    """

    def __init__(self) -> None:
        self._heard: deque[Heard] = deque(maxlen=MAX_COMMANDS)

    def add(self, heard: Heard) -> None:
        """One more; the oldest may go."""
        if self._heard and self._heard[-1].is_uneventful:
            self._heard.pop()
        self._heard.append(heard)

    @property
    def last(self) -> Heard | None:
        """The newest, or None."""
        return self._heard[-1] if self._heard else None

    def records(self, started: Started | None, now_us: int, rank: int, error: BaseException) -> list[Record]:
        """All of it, for a file of its own: how the engine was started, the commands, and what ended it on `rank`."""
        records: list[Record] = [] if started is None else [started]
        for heard in self._heard:
            records.append(heard.commanded())
            if heard.outcome is not None:
                records.append(heard.answered())
        reason = f"the last commands of rank {rank}, ended by {_named(error)}"
        return [*records, Closed(now_us, reason, str(error))]


class RememberingPort:
    """A worker's CommandPort that remembers what passes through it. Times are `clock`'s, from its making.

    `num_blocks` are those of the load; 0 before it.
    """

    def __init__(self, port: CommandPort, clock: Clock) -> None:
        self.last_commands = LastCommands()
        self.num_blocks = 0
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
        if isinstance(frame.command, Load):
            self.num_blocks = frame.command.num_blocks
        return frame

    def reply(self, reply: Reply) -> None:
        """See CommandPort."""
        heard = self.last_commands.last
        if heard is not None and reply.status is not Status.PROGRESS:
            heard.replies.append(reply)
            heard.lags_s.append(0.0)
            outcome, error = _OUTCOMES.get(reply.status, "failed"), reply.error
            heard.ended(outcome, reply.rank if error else None, error.message if error else "", self.now_us)
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
    """How an engine was started, by what its ranks said of themselves: those of `hellos`, one at least, are known."""
    settings: dict[str, Any] = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    del settings["faults"]
    told = {int(hello.rank): hello.told for hello in hellos}
    return Started(
        format=JOURNAL_FORMAT,
        wall_time_s=wall_time_s,
        package=__version__,
        epoch=epoch,
        version=int(config.protocol_version),
        redacted=config.journal_redact,
        config=settings,
        must_equal=dict(hellos[0].must_equal),
        ranks=tuple(dict(told.get(rank, {})) for rank in range(config.ep_size)),
        num_blocks=num_blocks,
        seed=config.seed,
        eos_token_ids=tuple(sorted(eos_token_ids)),
    )


def _named(error: BaseException) -> str:
    """What kind of error it is, and of what, in words that quote nothing: a redacted dump keeps them."""
    name = error.code if isinstance(error, MetraleError) else type(error).__name__
    rank, field_name = getattr(error, "rank", None), getattr(error, "field", None)
    of = [text for text in (f"rank {rank}" if rank is not None else "", field_name) if text]
    return f"{name} ({', '.join(of)})" if of else name


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
