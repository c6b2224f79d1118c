# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which message may come when, as tables of legal moves: (state, event) -> state. A pair that is not there is illegal.

Rules: `seq` grows by one per command in an epoch, from 1. One command at a time: the next one says how the last one
ended on all ranks (`settled`). A reply answers the command in hand and none else; only a load reports progress.
Whatever breaks a rule raises SessionError and changes nothing.

What is left out: bytes (`codec`), waiting and deadlines (`link`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from metrale_ray.errors import HandshakeError, SessionError
from metrale_ray.protocol.codec import encode_command
from metrale_ray.protocol.commands import (
    Cmd,
    Command,
    CommandFrame,
    Envelope,
    Load,
    Reply,
    Settled,
    Shutdown,
    Status,
    Welcome,
)


class State(Enum):
    """Where a stream of commands is."""

    NEW = "new"  # a rank before its hello
    GREETED = "greeted"  # its hello has been said
    IDLE = "idle"  # the next command may come
    BUSY = "busy"  # a command is being carried out
    LOADING = "loading"  # a load, which may report progress
    ENDING = "ending"  # a shutdown
    ENDED = "ended"


class Event(Enum):
    """What can happen on the stream."""

    HELLO = "hello"
    WELCOME = "welcome"
    REFUSAL = "refusal"
    COMMAND = "command"
    LOAD = "load"
    SHUTDOWN = "shutdown"
    PROGRESS = "progress"
    REPLY = "reply"
    SETTLE = "settle"


Moves = Mapping[tuple[State, Event], State]

HEAD_MOVES: Moves = {
    (State.IDLE, Event.COMMAND): State.BUSY,
    (State.IDLE, Event.LOAD): State.LOADING,
    (State.IDLE, Event.SHUTDOWN): State.ENDING,
    (State.BUSY, Event.SETTLE): State.IDLE,
    (State.LOADING, Event.SETTLE): State.IDLE,
    (State.ENDING, Event.SETTLE): State.ENDED,
}
"""The head's stream to all ranks."""

RANK_MOVES: Moves = {
    (State.NEW, Event.HELLO): State.GREETED,
    (State.GREETED, Event.WELCOME): State.IDLE,
    (State.GREETED, Event.REFUSAL): State.ENDED,
    (State.IDLE, Event.COMMAND): State.BUSY,
    (State.IDLE, Event.LOAD): State.LOADING,
    (State.IDLE, Event.SHUTDOWN): State.ENDING,
    (State.BUSY, Event.REPLY): State.IDLE,
    (State.LOADING, Event.PROGRESS): State.LOADING,
    (State.LOADING, Event.REPLY): State.IDLE,
    (State.ENDING, Event.REPLY): State.ENDED,
}
"""The stream of one rank: the worker and the head's link to it both follow this."""


def next_state(moves: Moves, state: State, event: Event) -> State:
    """Where `event` leads from `state`. Raises SessionError when the table has no such move."""
    following = moves.get((state, event))
    if following is None:
        allowed = ", ".join(sorted(e.value for s, e in moves if s is state)) or "nothing"
        raise SessionError(f"{event.value} is not allowed while {state.value}; allowed is {allowed}")
    return following


def command_event(command: Command) -> Event:
    """The move that a command is."""
    match command:
        case Load():
            return Event.LOAD
        case Shutdown():
            return Event.SHUTDOWN
        case _:
            return Event.COMMAND


def reply_event(reply: Reply) -> Event:
    """The move that a reply is."""
    return Event.PROGRESS if reply.status is Status.PROGRESS else Event.REPLY


def check_reply(frame: CommandFrame, reply: Reply, rank: int) -> None:
    """Raise SessionError unless `reply` is the answer of `rank` to `frame`."""
    sent, cmd = frame.envelope, frame.command.code
    if reply.epoch < sent.epoch:
        raise SessionError(f"rank {rank} answered in epoch {reply.epoch}, which is over; this is epoch {sent.epoch}")
    expected = (sent.version, sent.epoch, sent.seq, cmd, rank)
    found = (reply.version, reply.epoch, reply.seq, reply.cmd, reply.rank)
    if expected == found:
        _check_progress(cmd, reply)
        return
    names = ("version", "epoch", "seq", "cmd", "rank")
    wrong = [
        f"{n} {_shown(f)} instead of {_shown(e)}" for n, e, f in zip(names, expected, found, strict=True) if e != f
    ]
    raise SessionError(f"rank {rank} answered with {', '.join(wrong)} to command {sent.seq} ({cmd.name})")


def _check_progress(cmd: Cmd, reply: Reply) -> None:
    if reply.status is Status.PROGRESS and cmd is not Cmd.LOAD:
        raise SessionError(f"rank {reply.rank} reported progress of {cmd.name}; only LOAD may")


def _shown(value: int) -> str:
    return value.name if isinstance(value, Cmd) else str(int(value))


class HeadSession:
    """The head's numbered stream of commands of one epoch."""

    def __init__(self, version: int, epoch: int) -> None:
        self.version = version
        self.epoch = epoch
        self._state = State.IDLE
        self._last_seq = 0
        self._settled: Settled | None = None

    @property
    def last_seq(self) -> int:
        """The number of the last command framed; 0 before the first."""
        return self._last_seq

    @property
    def state(self) -> State:
        """Where the stream is."""
        return self._state

    @property
    def settled(self) -> Settled | None:
        """How the last command ended on all ranks, as the next one will say it; None before the first."""
        return self._settled

    def frame(self, command: Command) -> CommandFrame:
        """The next command, numbered and encoded. Nothing changes when it is refused.

        Raises SessionError before the last command is settled and after a shutdown, CommandRefused when the command
        does not fit the wire.
        """
        following = next_state(HEAD_MOVES, self._state, command_event(command))
        envelope = Envelope(self.version, self.epoch, self._last_seq + 1, self._settled)
        frame = CommandFrame(envelope, command, encode_command(envelope, command))
        self._state, self._last_seq = following, envelope.seq
        return frame

    def settle(self, ok: bool) -> None:
        """Say whether the last command succeeded on every rank, once per command. Raises SessionError."""
        self._state = next_state(HEAD_MOVES, self._state, Event.SETTLE)
        self._settled = Settled(self._last_seq, ok)


class WorkerSession:
    """A worker's view of the stream, and the check of everything that the head sends."""

    def __init__(self, version: int, rank: int) -> None:
        self.version = version
        self.rank = rank
        self._state = State.NEW
        self._epoch: int | None = None
        self._last_seq = 0
        self._frame: CommandFrame | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch that the welcome named; None before it."""
        return self._epoch

    @property
    def state(self) -> State:
        """Where the stream is."""
        return self._state

    def hello_sent(self) -> None:
        """The worker has said hello. Raises SessionError when it had before."""
        self._state = next_state(RANK_MOVES, self._state, Event.HELLO)

    def welcomed(self, welcome: Welcome) -> None:
        """The head has answered. Raises HandshakeError with the refusal, SessionError at the wrong moment."""
        refusal = welcome.refusal or self._refusal_of_version(welcome)
        self._state = next_state(RANK_MOVES, self._state, Event.REFUSAL if refusal else Event.WELCOME)
        if refusal:
            raise HandshakeError(refusal)
        self._epoch = welcome.epoch

    def accept(self, frame: CommandFrame) -> None:
        """A command has come. Raises SessionError unless it is the next one of this epoch."""
        following = next_state(RANK_MOVES, self._state, command_event(frame.command))
        envelope = frame.envelope
        if envelope.version != self.version:
            raise SessionError(f"the head sent a v{int(envelope.version)} command in a v{int(self.version)} session")
        if envelope.epoch != self._epoch:
            raise SessionError(f"a command of epoch {envelope.epoch} came in epoch {self._epoch}")
        if envelope.seq != self._last_seq + 1:
            raise SessionError(f"command {envelope.seq} came after command {self._last_seq}; one was lost or repeated")
        self._check_settled(envelope)
        self._state, self._last_seq, self._frame = following, envelope.seq, frame

    def replied(self, reply: Reply) -> None:
        """The worker is about to answer. Raises SessionError unless the reply is one to the command in hand."""
        following = next_state(RANK_MOVES, self._state, reply_event(reply))
        if self._frame is None:
            raise SessionError(f"rank {self.rank} has no command to answer")
        check_reply(self._frame, reply, self.rank)
        self._state = following

    def _refusal_of_version(self, welcome: Welcome) -> str:
        if welcome.version == self.version:
            return ""
        return f"protocol version: the head has v{welcome.version}, rank {self.rank} has v{int(self.version)}"

    def _check_settled(self, envelope: Envelope) -> None:
        found = None if envelope.settled is None else envelope.settled.seq
        expected = envelope.seq - 1 or None
        if found != expected:
            raise SessionError(f"command {envelope.seq} settles command {found}; it must settle {expected}")
