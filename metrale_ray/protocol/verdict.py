# SPDX-License-Identifier: MIT OR Apache-2.0
"""From the replies of all ranks to one verdict on a command. Pure.

every rank OK                          -> OK
every rank refused                     -> REJECTED    nothing ran
some refused, others did not           -> Desync      they no longer hold the same state
digests or witnesses differ            -> Desync      before anything that the statuses say; also where ranks that
                                                      succeeded do not show the same witnesses
some rank poisoned slots               -> POISONED    those slots must be dropped on every rank
some rank's memory is damaged          -> Desync
some rank failed                       -> FAILED      nothing is settled
only "a peer failed", and nobody did   -> Desync

Who differs: the first rank outside the majority where three or more ranks make one; else the first that differs from
rank 0, and which of the two is right is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from metrale_ray.errors import Desync, MemoryDamaged, PeerFailed
from metrale_ray.protocol.commands import CommandFrame, Rank, Reply, Slot, Status

Shown = TypeVar("Shown")

# What each witness is of, the one that says most first: a damaged token shows in all that is computed from it.
_WITNESS_NAMES = {
    "tokens": "the token ids",
    "blocks": "the block tables",
    "lengths": "the lengths",
    "command": "the bytes of the frame",
    "residual": "the hidden state after the last layer",
    "routing": "the choice of experts",
    "weights": "the weights that all ranks hold",
    "kv": "the cached keys and values",
}


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
    _compare_witnesses(frame, replies)
    if all(reply.status is Status.OK for reply in replies):
        return Verdict(Kind.OK)
    refused = [reply for reply in replies if reply.status is Status.REFUSED]
    if refused and len(refused) < len(replies):
        _raise_half_refused(frame, replies, refused)
    if refused:
        return _verdict(Kind.REJECTED, refused)
    poisoned = [reply for reply in replies if reply.status is Status.POISONED]
    if poisoned:
        return _verdict(Kind.POISONED, poisoned)
    return _verdict(Kind.FAILED, _originals(frame, replies))


def _compare_digests(frame: CommandFrame, replies: Sequence[Reply]) -> None:
    odd = _odd_one({reply.rank: reply.digest for reply in replies})
    if odd is not None:
        raise Desync(
            f"{odd.told} before command {_name(frame)}: digest {odd.found.hex()}, not {odd.expected.hex()}",
            rank=odd.rank,
            seq=frame.envelope.seq - 1,
            field="digest",
        )


def _compare_witnesses(frame: CommandFrame, replies: Sequence[Reply]) -> None:
    first = replies[0].witness
    if all(reply.witness == first for reply in replies):
        return
    for field_name, words in _WITNESS_NAMES.items():
        odd = _odd_one({reply.rank: reply.witness[field_name] for reply in replies if field_name in reply.witness})
        if odd is not None:
            raise Desync(
                f"{odd.told} in {words} of command {_name(frame)}: {odd.found.hex()}, not {odd.expected.hex()}",
                rank=odd.rank,
                seq=frame.envelope.seq,
                field=field_name,
            )

    _compare_names(frame, [reply for reply in replies if reply.status is Status.OK])


def _compare_names(frame: CommandFrame, succeeded: Sequence[Reply]) -> None:
    """A rank that does not show what others do could not be compared from then on, and nobody would know."""
    odd = _odd_one({reply.rank: frozenset(reply.witness) for reply in succeeded})
    if odd is not None:
        name = min(odd.found ^ odd.expected)
        raise Desync(
            f"{odd.told} in what it shows of command {_name(frame)}: {_WITNESS_NAMES[name]} "
            f"{'beside the rest' if name in odd.found else 'not'}",
            rank=odd.rank,
            seq=frame.envelope.seq,
            field=name,
        )


def _raise_half_refused(frame: CommandFrame, replies: Sequence[Reply], refused: Sequence[Reply]) -> None:
    """Name the rank that refused, or the one that did not where most did."""
    rank, did, others = refused[0].rank, "refused", "did not"
    if len(replies) > 2 and 2 * len(refused) > len(replies):
        rank = next(reply.rank for reply in replies if reply.status is not Status.REFUSED)
        did, others = "did not refuse", "did"
    raise Desync(
        f"rank {rank} {did} command {_name(frame)} and others {others}: {_message(refused[0])}",
        rank=rank,
        seq=frame.envelope.seq,
    )


class _Odd(NamedTuple, Generic[Shown]):
    """A rank that differs: what it has, what others have, and who differs from whom in words."""

    rank: Rank
    found: Shown
    expected: Shown
    told: str


def _odd_one(values: Mapping[Rank, Shown]) -> _Odd[Shown] | None:
    """The rank to name among those with these values, or None when all have the same."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    value, num_ranks = counts.most_common(1)[0]
    has_majority = num_ranks * 2 > len(values)
    expected = value if has_majority else next(iter(values.values()))
    odd = next(rank for rank, found in values.items() if found != expected)
    other = next(rank for rank, found in values.items() if found == expected)
    told = f"rank {odd} differs from rank {other}"
    if has_majority and num_ranks > 1:
        told += f", with which {num_ranks - 1} more agree{'s' * (num_ranks == 2)},"
    return _Odd(odd, values[odd], expected, told)


def _check_memory(frame: CommandFrame, failed: Sequence[Reply]) -> None:
    for reply in failed:
        if reply.error is not None and reply.error.code == MemoryDamaged.code:
            raise Desync(
                f"the memory of rank {reply.rank} is damaged, found by command {_name(frame)}: {reply.error.message}",
                rank=reply.rank,
                seq=frame.envelope.seq,
                field=MemoryDamaged.tensor_of(reply.error.message),
            )


def _originals(frame: CommandFrame, replies: Sequence[Reply]) -> list[Reply]:
    failed = [reply for reply in replies if reply.status is Status.FAILED]
    _check_memory(frame, failed)
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
