# SPDX-License-Identifier: MIT OR Apache-2.0
"""From the replies of all ranks to one verdict on a command. Pure.

every rank OK                          -> OK
every rank refused                     -> REJECTED    nothing ran
some refused, others did not           -> Desync      they no longer hold the same state
digests differ                         -> Desync
some rank poisoned slots               -> POISONED    those slots must be dropped on every rank
some rank failed                       -> FAILED      nothing is settled
only "a peer failed", and nobody did   -> Desync
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from metrale_ray.errors import Desync, PeerFailed
from metrale_ray.protocol.commands import CommandFrame, Rank, Reply, Slot, Status


class Kind(Enum):
    """How a command ended over all ranks."""

    OK = "ok"
    REJECTED = "rejected"
    FAILED = "failed"
    POISONED = "poisoned"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`rank`, `code`, `message` are of the first rank at fault; `slots` are all that were blamed, None if unknown.

    `blames` has what the rank that blames a slot says of it, where that is not the first rank at fault.
    """

    kind: Kind
    rank: Rank | None = None
    code: str = ""
    message: str = ""
    slots: tuple[Slot, ...] | None = None
    blames: Mapping[Slot, Verdict] = field(default_factory=dict)

    def of_slot(self, slot: Slot) -> Verdict:
        """The verdict in the words of the rank that blames `slot`; this one where none does."""
        return self.blames.get(slot, self)

    @property
    def ok(self) -> bool:
        """Whether the command succeeded on every rank."""
        return self.kind is Kind.OK


def judge(frame: CommandFrame, replies: Sequence[Reply]) -> Verdict:
    """The verdict on `frame`, given every rank's reply in rank order. Raises Desync."""
    _compare_digests(frame, replies)
    if all(reply.status is Status.OK for reply in replies):
        return Verdict(Kind.OK)
    refused = [reply for reply in replies if reply.status is Status.REFUSED]
    if refused and len(refused) < len(replies):
        raise Desync(
            f"rank {refused[0].rank} refused command {_name(frame)} and others did not: {_message(refused[0])}",
            rank=refused[0].rank,
            seq=frame.envelope.seq,
        )
    if refused:
        return _verdict(Kind.REJECTED, refused)
    poisoned = [reply for reply in replies if reply.status is Status.POISONED]
    if poisoned:
        return _verdict(Kind.POISONED, poisoned)
    return _verdict(Kind.FAILED, _originals(frame, replies))


def _compare_digests(frame: CommandFrame, replies: Sequence[Reply]) -> None:
    first = replies[0]
    for reply in replies:
        if reply.digest != first.digest:
            raise Desync(
                f"rank {reply.rank} differs from rank {first.rank} before command {_name(frame)}: "
                f"digest {reply.digest.hex()}, not {first.digest.hex()}",
                rank=reply.rank,
                seq=frame.envelope.seq - 1,
            )


def _originals(frame: CommandFrame, replies: Sequence[Reply]) -> list[Reply]:
    failed = [reply for reply in replies if reply.status is Status.FAILED]
    originals = [reply for reply in failed if reply.error is None or reply.error.code != PeerFailed.code]
    if not originals:
        raise Desync(
            f"rank {failed[0].rank} saw the failure flag in command {_name(frame)} and no rank reported a failure",
            rank=failed[0].rank,
            seq=frame.envelope.seq,
        )
    return originals


def _verdict(kind: Kind, replies: Sequence[Reply]) -> Verdict:
    blames: dict[Slot, Verdict] = {}
    for reply in replies:
        for slot in (reply.error.slots if reply.error else None) or ():
            blames.setdefault(slot, _said_by(kind, reply))
    return replace(_said_by(kind, replies[0]), slots=tuple(sorted(blames)) or None, blames=blames)


def _said_by(kind: Kind, reply: Reply) -> Verdict:
    return Verdict(kind, reply.rank, reply.error.code if reply.error else "", _message(reply))


def _message(reply: Reply) -> str:
    return reply.error.message if reply.error else "no reason given"


def _name(frame: CommandFrame) -> str:
    return f"{frame.envelope.seq} ({frame.command.code.name.lower()})"
