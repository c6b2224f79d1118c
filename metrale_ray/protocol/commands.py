# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the head orders and what a rank answers, as plain frozen values.

Rules: a command carries everything it needs; every row carries its start position; nothing here packs bytes (see
`codec`) or knows what moves are legal (see `session`). Handshake messages are at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, NewType

Rank = NewType("Rank", int)
Slot = NewType("Slot", int)
BlockId = NewType("BlockId", int)


class Cmd(IntEnum):
    """Command codes on the wire (u32). A code is never reused for another meaning."""

    LOAD = 1
    DECODE = 2
    DECODE_BATCH = 3
    PREFILL_CHUNK = 4
    MIXED_STEP = 5
    FREE_SLOT = 6
    PING = 7
    SHUTDOWN = 8
    SCRUB = 9


class Logits(IntEnum):
    """Which rows of a span rank 0 computes logits for."""

    NONE = 0
    LAST = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in one step.

    `start` is the position of the first token and must equal the slot's settled length on every rank. `new_blocks`
    are appended to the slot's block table before the tokens are written.
    """

    slot: Slot
    start: int
    token_ids: tuple[int, ...]
    new_blocks: tuple[BlockId, ...] = ()
    logits: Logits = Logits.LAST

    @property
    def end(self) -> int:
        """The slot's length once this span is settled."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Load:
    """Load this rank's shard and reserve a KV cache of `num_blocks` blocks (the minimum over the ranks)."""

    code: ClassVar[Cmd] = Cmd.LOAD
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Decode:
    """One token of one sequence."""

    code: ClassVar[Cmd] = Cmd.DECODE
    row: Span


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each of several sequences, in the order given."""

    code: ClassVar[Cmd] = Cmd.DECODE_BATCH
    rows: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One chunk of one prompt."""

    code: ClassVar[Cmd] = Cmd.PREFILL_CHUNK
    row: Span


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Several prompt chunks, with or without decode rows, in one pass. Decode rows come first."""

    code: ClassVar[Cmd] = Cmd.MIXED_STEP
    rows: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """Release everything of a slot, exactly once."""

    code: ClassVar[Cmd] = Cmd.FREE_SLOT
    slot: Slot


@dataclass(frozen=True, slots=True)
class Ping:
    """Answer with the digest."""

    code: ClassVar[Cmd] = Cmd.PING


@dataclass(frozen=True, slots=True)
class Shutdown:
    """`ep_worker_step` returns False."""

    code: ClassVar[Cmd] = Cmd.SHUTDOWN


@dataclass(frozen=True, slots=True)
class Scrub:
    """Read part `part` of `num_parts` of the weights again, and some settled cache rows of `slot` where one is named.

    The rows are MAX_SCRUB_ROWS at most, from `start` on, which is below the slot's settled length.

    The reply's witness says what was found; memory that no longer holds what was loaded fails the command.
    """

    code: ClassVar[Cmd] = Cmd.SCRUB
    part: int
    num_parts: int
    slot: Slot | None = None
    start: int = 0


Command = Load | Decode | DecodeBatch | PrefillChunk | MixedStep | FreeSlot | Ping | Shutdown | Scrub


def command_rows(command: Command) -> tuple[Span, ...]:
    """The spans that a command runs; empty for a command without rows."""
    match command:
        case Decode(row) | PrefillChunk(row):
            return (row,)
        case DecodeBatch(rows) | MixedStep(rows):
            return rows
        case _:
            return ()


@dataclass(frozen=True, slots=True)
class Settled:
    """Whether command number `seq` of this epoch succeeded on every rank."""

    seq: int
    ok: bool


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every command carries beside its own fields. `seq` grows by one per command in an epoch, from 1."""

    version: int
    epoch: int
    seq: int
    settled: Settled | None


@dataclass(frozen=True, slots=True)
class CommandFrame:
    """One command as it is on the wire: the envelope, the command, and the very bytes (for the digest)."""

    envelope: Envelope
    command: Command
    data: bytes = field(repr=False)


class Status(IntEnum):
    """How a command ended on one rank."""

    OK = 0
    FAILED = 1
    REFUSED = 2
    POISONED = 3
    PROGRESS = 4  # not an end: a load under way reports how far it is


@dataclass(frozen=True, slots=True)
class ReplyError:
    """`code` is the error's stable code, `slots` the slots it blames (None: unknown)."""

    code: str
    message: str
    slots: tuple[Slot, ...] | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds: `received_us` on the rank's own monotonic clock, then durations."""

    received_us: int = 0
    computed_us: int = 0
    waited_us: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is, in bytes."""

    done_bytes: int
    total_bytes: int


WITNESSES = ("command", "tokens", "blocks", "lengths", "residual", "routing", "weights", "kv")
"""All that a rank can be asked to show beside its digest. Each is 8 bytes that must be equal on every rank.

"command" is of the frame as it came; "tokens", "blocks" and "lengths" are of the rows as this rank has staged them;
"residual" and "routing" are of what it computed for their last tokens; "weights" and "kv" of what a scrub read.
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """One rank's answer. `digest` is 8 bytes; `progress` only with Status.PROGRESS, `error` only with a failure.

    `witness` has those of WITNESSES that this rank can show of the command.
    """

    version: int
    epoch: int
    seq: int
    cmd: Cmd
    rank: Rank
    status: Status
    digest: bytes
    error: ReplyError | None = None
    timing: Timing = Timing()
    progress: Progress | None = None
    witness: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message. Everything in `must_equal` has to be the same on every rank; `told` is for the log.

    `num_blocks` is what this rank can hold; the head takes the minimum. Values are short texts.
    """

    rank: Rank
    version: int
    must_equal: dict[str, str]
    told: dict[str, str]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The head's answer to a hello. `refusal` is empty, or lists every difference, and then the start has failed."""

    version: int
    epoch: int
    refusal: str
