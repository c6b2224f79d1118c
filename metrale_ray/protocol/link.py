# SPDX-License-Identifier: MIT OR Apache-2.0
"""Links: a session over a transport, one per worker on the head, one on each worker.

    HeadLink     the head's end of the link to one worker
    WorkerLink   a worker's end; it is the worker's CommandPort
    HeadPort     the head's CommandPort: one command to all workers

Rules: everything that makes a rank unreachable is LinkLost naming it: a peer that has gone, a deadline, and bytes that
are no frame, since nothing after them can be trusted. A valid frame that may not come now is SessionError. Only the
worker's wait for a command has no deadline. A link is used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from metrale_ray.errors import FrameError, LinkLost, SessionError
from metrale_ray.protocol.codec import (
    decode_command,
    decode_hello,
    decode_reply,
    decode_welcome,
    encode_hello,
    encode_reply,
    encode_welcome,
)
from metrale_ray.protocol.commands import Command, CommandFrame, Hello, Progress, Rank, Reply, Status, Welcome
from metrale_ray.protocol.session import (
    RANK_MOVES,
    Event,
    HeadSession,
    State,
    WorkerSession,
    check_reply,
    command_event,
    next_state,
    reply_event,
)
from metrale_ray.protocol.transport import Transport

HEAD_RANK = Rank(0)

OnProgress = Callable[[Progress], None]


class HeadLink:
    """The head's end of the link to worker `rank`, for one epoch."""

    def __init__(self, rank: Rank, transport: Transport, version: int, epoch: int) -> None:
        self.rank = rank
        self._transport = transport
        self._version = version
        self._epoch = epoch
        self._state = State.NEW
        self._worker_version = version
        self._frame: CommandFrame | None = None
        self._early: Reply | None = None  # the final reply, when `poll_progress` came across it

    def expect_hello(self, timeout_s: float) -> Hello:
        """The worker's first message. Raises LinkLost, SessionError when another rank speaks."""
        following = next_state(RANK_MOVES, self._state, Event.HELLO)
        data = self._receive(timeout_s, "its hello")
        try:
            hello = decode_hello(data, self.rank)
        except FrameError as error:
            raise LinkLost(str(error), rank=self.rank) from error
        if hello.rank != self.rank:
            raise SessionError(f"rank {hello.rank} said hello on the link of rank {self.rank}")
        self._state, self._worker_version = following, hello.version
        return hello

    def welcome(self, welcome: Welcome) -> None:
        """Answer the hello. Raises LinkLost, and SessionError for a welcome that this link cannot keep."""
        following = next_state(RANK_MOVES, self._state, Event.REFUSAL if welcome.refusal else Event.WELCOME)
        if (welcome.version, welcome.epoch) != (self._version, self._epoch):
            raise SessionError(f"the welcome is of another version or epoch than the link of rank {self.rank}")
        if not welcome.refusal and self._worker_version != self._version:
            raise SessionError(
                f"rank {self.rank} speaks v{self._worker_version} and the head v{int(self._version)}: refuse it"
            )
        self._send(encode_welcome(welcome))
        self._state = following

    def send(self, frame: CommandFrame) -> None:
        """Send one command. Raises LinkLost, SessionError before the last one is answered."""
        following = next_state(RANK_MOVES, self._state, command_event(frame.command))
        self._send(frame.data)
        self._state, self._frame, self._early = following, frame, None

    def collect(self, frame: CommandFrame, timeout_s: float, on_progress: OnProgress | None = None) -> Reply:
        """The worker's answer to `frame`, the command last sent. Each progress reply gives it `timeout_s` anew.

        Raises LinkLost at the deadline, when the worker has gone or sent no valid frame; SessionError for a reply that
        is not to this command.
        """
        if frame is not self._frame and frame != self._frame:
            raise SessionError(f"command {frame.envelope.seq} is not the one last sent to rank {self.rank}")
        if self._early is not None:
            reply, self._early = self._early, None
            return reply
        while True:
            reply = self._read(self._receive(timeout_s, f"its answer to command {frame.envelope.seq}"))
            if reply.status is not Status.PROGRESS:
                return reply
            _tell(reply, on_progress)

    def poll_progress(self, on_progress: OnProgress) -> Reply | None:
        """Read what has come of the command last sent, without waiting; gives the final reply if it has come.

        `collect` gives that reply too. Raises as `collect`.
        """
        while self._early is None and self._state is State.LOADING:
            try:
                data = self._transport.receive(0)
            except TimeoutError:
                return None
            except LinkLost as error:
                raise self._lost(error.message) from error
            reply = self._read(data)
            if reply.status is Status.PROGRESS:
                _tell(reply, on_progress)
            else:
                self._early = reply
        return self._early

    def lost(self) -> str | None:
        """Why the worker has gone, or None while it has not. Never waits."""
        return self._transport.lost()

    def close(self) -> None:
        """Leave. What was sent before still arrives."""
        self._transport.close()

    def _read(self, data: bytes) -> Reply:
        """One reply to the command in hand, checked."""
        try:
            reply = decode_reply(data, self.rank)
        except FrameError as error:
            raise LinkLost(str(error), rank=self.rank) from error
        following = next_state(RANK_MOVES, self._state, reply_event(reply))
        if self._frame is None:
            raise SessionError(f"rank {self.rank} answered before any command")
        check_reply(self._frame, reply, self.rank)
        self._state = following
        return reply

    def _receive(self, timeout_s: float, what: str) -> bytes:
        try:
            return self._transport.receive(timeout_s)
        except TimeoutError as error:
            raise self._lost(f"{what} did not come within {timeout_s:g} s") from error
        except LinkLost as error:
            raise self._lost(error.message) from error

    def _send(self, data: bytes) -> None:
        try:
            self._transport.send(data)
        except LinkLost as error:
            raise self._lost(error.message) from error

    def _lost(self, reason: str) -> LinkLost:
        return LinkLost(_lost_peer(f"rank {self.rank}", reason), rank=self.rank)


class WorkerLink:
    """A worker's end of its link to the head, and its CommandPort."""

    def __init__(self, rank: Rank, transport: Transport, version: int) -> None:
        self.rank = rank
        self._transport = transport
        self._session = WorkerSession(version, rank)

    def hello(self, hello: Hello) -> None:
        """Say who this is. Raises LinkLost, SessionError."""
        if (hello.rank, hello.version) != (self.rank, self._session.version):
            raise SessionError(f"the hello is of another rank or version than the link of rank {self.rank}")
        self._session.hello_sent()
        self._send(encode_hello(hello))

    def expect_welcome(self, timeout_s: float) -> Welcome:
        """The head's answer. Raises HandshakeError with the refusal, LinkLost."""
        try:
            welcome = decode_welcome(self._transport.receive(timeout_s), HEAD_RANK)
        except TimeoutError as error:
            raise _head_lost(f"its welcome did not come within {timeout_s:g} s") from error
        except LinkLost as error:
            raise _head_lost(error.message) from error
        except FrameError as error:
            raise _head_lost(str(error)) from error
        self._session.welcomed(welcome)
        return welcome

    def receive(self) -> CommandFrame:
        """Wait, without limit, for the next command. Raises LinkLost, FrameError, SessionError."""
        try:
            data = self._transport.receive(None)
        except LinkLost as error:
            raise _head_lost(error.message) from error
        frame = decode_command(data, HEAD_RANK)
        self._session.accept(frame)
        return frame

    def reply(self, reply: Reply) -> None:
        """Answer the command just received, or report progress of a load. Raises LinkLost, SessionError."""
        data = encode_reply(reply)
        self._session.replied(reply)
        self._send(data)

    def broadcast(self, command: Command) -> CommandFrame:
        """Refused: a worker gives no commands."""
        raise SessionError(f"rank {self.rank} cannot give {command.code.name}: only the head gives commands")

    def lost(self) -> str | None:
        """Why the head has gone, or None while it has not. Never waits."""
        return self._transport.lost()

    def close(self) -> None:
        """Leave. What was sent before still arrives."""
        self._transport.close()

    def _send(self, data: bytes) -> None:
        try:
            self._transport.send(data)
        except LinkLost as error:
            raise _head_lost(error.message) from error


class HeadPort:
    """The head's CommandPort. Rank 0 carries out what it broadcasts itself, without a link."""

    def __init__(self, session: HeadSession, links: Sequence[HeadLink]) -> None:
        self._session = session
        self._links = links

    def broadcast(self, command: Command) -> CommandFrame:
        """Number and encode one command, and send the same bytes to every worker.

        Raises LinkLost at the first worker that is lost, and sends no further: those that have not got the command
        then wait for no one. Raises CommandRefused and SessionError before anything is sent.
        """
        frame = self._session.frame(command)
        for link in self._links:
            link.send(frame)
        return frame

    def receive(self) -> CommandFrame:
        """Refused: the head gives commands."""
        raise SessionError("the head gives commands and receives none")

    def reply(self, reply: Reply) -> None:
        """Refused: rank 0 has no link to itself."""
        raise SessionError("the head sends no replies; rank 0 answers within its process")


def _tell(reply: Reply, on_progress: OnProgress | None) -> None:
    if on_progress is not None and reply.progress is not None:
        on_progress(reply.progress)


def _head_lost(reason: str) -> LinkLost:
    return LinkLost(_lost_peer("the head", reason), rank=HEAD_RANK)


def _lost_peer(peer: str, reason: str) -> str:
    """A transport's reason names the peer itself: "rank 1 has gone: ..."."""
    return reason if reason.startswith(f"{peer} ") else f"{peer} is lost: {reason}"
