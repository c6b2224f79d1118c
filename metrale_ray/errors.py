# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every error of metrale_ray, in one tree.

    MetraleError
    ├── UserError              the caller's mistake                       exit code 2
    │   ├── ConfigError        a setting is wrong
    │   ├── RequestError       one request is refused; the engine goes on
    │   └── JournalError       a journal cannot be read
    ├── StartError             the engine could not start                 exit code 3
    │   ├── PlacementError     the cluster cannot hold the ranks
    │   ├── HandshakeError     the ranks differ in something that must be equal
    │   └── CheckpointError    a tensor or a file is missing, extra, damaged or of another kind
    ├── ProtocolError          a frame or a move that the protocol does not allow
    │   ├── FrameError         the bytes are not one valid frame
    │   ├── SessionError       a valid frame at a moment or of an epoch that forbids it
    │   └── CommandRefused     Rejected: a rank refused a command before running it
    ├── EpCommandFailed        received, ran, failed; the worker stays up
    ├── PeerFailed             this rank is fine, another one raised the failure flag
    ├── MemoryDamaged          a tensor of this rank no longer holds what was loaded
    ├── SlotPoisoned           ran, and the state of some slots is unknown
    ├── LinkLost               a rank cannot be reached any more
    ├── Desync                 the ranks are no longer in step
    └── EngineDead             the engine has ended                       exit code 4

Rules: each class has a stable `code`; every field survives pickling (Ray) and `code` and message survive the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar


class MetraleError(Exception):
    """Base of every error here. `code` is stable and may be matched by programs; the message is for people."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(kind: type[MetraleError], message: str, fields: dict[str, Any]) -> MetraleError:
    return kind(message, **fields)


class UserError(MetraleError):
    """The caller asked for something that cannot be given."""

    code = "user_error"
    exit_code = 2


class ConfigError(UserError):
    """A setting is wrong: the message says what was given, what is allowed and what to change."""

    code = "config_error"


class RequestError(UserError):
    """One request is refused at once. `param` names the field at fault where there is one."""

    code = "invalid_request"

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)
        self.code = code  # type: ignore[misc]  # each refusal carries its own stable code
        self.param = param


class JournalError(UserError):
    """A journal cannot be read: the message names the file, the byte at fault where one is, and what to do."""

    code = "journal_error"


class StartError(MetraleError):
    """The engine could not start. Nothing of it is left running. `rank` is the one at fault, if one is."""

    code = "start_error"
    exit_code = 3

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.rank = rank


class PlacementError(StartError):
    """The cluster cannot hold the ranks: the message says what was asked, offered and missing."""

    code = "placement_error"


class HandshakeError(StartError):
    """The ranks differ in something that must be equal; the message names each entry and both values."""

    code = "handshake_error"


class CheckpointError(StartError):
    """The checkpoint cannot be served; the message names the file and the tensor."""

    code = "checkpoint_error"


class ProtocolError(MetraleError):
    """A frame or a move that the protocol does not allow."""

    code = "protocol_error"


class FrameError(ProtocolError):
    """The bytes are not one valid frame. `num_bytes` is the length of what came, `rank` who sent it, if known."""

    code = "frame_error"

    def __init__(self, message: str, *, num_bytes: int | None = None, rank: int | None = None) -> None:
        super().__init__(message, num_bytes=num_bytes, rank=rank)
        self.num_bytes = num_bytes
        self.rank = rank

    def __str__(self) -> str:
        origin = "" if self.rank is None else f" from rank {self.rank}"
        size = "" if self.num_bytes is None else f" ({self.num_bytes} bytes)"
        return f"bad frame{origin}{size}: {self.message}"


class SessionError(ProtocolError):
    """A valid frame at a moment, or of an epoch, that forbids it."""

    code = "session_error"


class CommandRefused(ProtocolError):
    """A rank refused a command before running it. `slots` are the ones at fault, or None when that is not known."""

    code = "command_refused"

    def __init__(self, message: str, *, slots: Sequence[int] | None = None) -> None:
        super().__init__(message, slots=slots)
        self.slots = slots


class EpCommandFailed(MetraleError):
    """A command was received, ran, and failed. The worker that raises it stays up.

    `rank` is where it failed, `slots` the slots it blames (None: unknown), `cmd` the command's name.
    """

    code = "command_failed"

    def __init__(
        self, message: str, *, rank: int | None = None, slots: Sequence[int] | None = None, cmd: str | None = None
    ) -> None:
        super().__init__(message, rank=rank, slots=slots, cmd=cmd)
        self.rank = rank
        self.slots = slots
        self.cmd = cmd

    @staticmethod
    def find(exc: BaseException | None) -> EpCommandFailed | None:
        """The first EpCommandFailed in `exc` or in anything it was raised from or during, or None."""
        return next((e for e in _chain(exc) if isinstance(e, EpCommandFailed)), None)


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    todo, seen = [exc], set[int]()
    while todo:
        here = todo.pop(0)
        if not isinstance(here, BaseException) or id(here) in seen:
            continue
        seen.add(id(here))
        yield here
        # Ray wraps the worker's exception and keeps it in `cause`.
        todo += [here.__cause__, here.__context__, getattr(here, "cause", None)]


class PeerFailed(MetraleError):
    """This rank is fine; another rank raised the failure flag in a collective, so all leave the command."""

    code = "peer_failed"


class MemoryDamaged(MetraleError):
    """A tensor of this rank no longer holds what was loaded. The message begins with the tensor's name."""

    code = "memory_damaged"

    @staticmethod
    def tensor_of(message: str) -> str:
        """The tensor that such a message is about."""
        return message.partition(" ")[0]


class SlotPoisoned(MetraleError):
    """A command ran and the state of `slots` is unknown on this rank, so it drops them."""

    code = "slot_poisoned"

    def __init__(self, message: str, *, slots: Sequence[int]) -> None:
        super().__init__(message, slots=slots)
        self.slots = slots


class LinkLost(MetraleError):
    """A rank cannot be reached: its process has gone, a receive failed, or a deadline has passed."""

    code = "link_lost"

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.rank = rank


class Desync(MetraleError):
    """The ranks are no longer in step. `rank` and `seq` name the first difference.

    `field` is what differs: "digest", one of the protocol's WITNESSES, or the name of a tensor that is damaged; None
    where the ranks differ in what they did.
    """

    code = "desync"

    def __init__(
        self, message: str, *, rank: int | None = None, seq: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(message, rank=rank, seq=seq, field=field)
        self.rank = rank
        self.seq = seq
        self.field = field


class EngineDead(MetraleError):
    """The engine has ended; every waiting and later call gets this. `rank` is the one at fault, if one is."""

    code = "engine_dead"
    exit_code = 4

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.rank = rank
