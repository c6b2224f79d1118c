# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Player`: gives the commands of a journal to the ranks of a replay, in order, each with its very bytes.

Rules: a command waits for the record of its answers, and is carried out then; what the next one says of it (`settled`)
settles it. A journal that begins with a snapshot, or goes on with one behind a gap, is taken up there: each slot is
prefilled anew, and the digest is the one that the next answer tells. Rows computed from such slots, and all that ran
with them, are `approximate`: the same tokens are expected, not the same last bits, as a prefill adds up in another
order than the steps that it stands for.

What is left out: requests (`requests`), and comparing (`comparison`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metrale_ray.errors import FrameError, JournalError
from metrale_ray.protocol.codec import decode_command
from metrale_ray.protocol.commands import (
    BlockId,
    CommandFrame,
    FreeSlot,
    Load,
    Logits,
    PrefillChunk,
    Reply,
    Scrub,
    Settled,
    Slot,
    Span,
    Status,
    command_rows,
)
from metrale_ray.protocol.journal.records import (
    Answered,
    Commanded,
    Gap,
    LiveNote,
    ReadRecord,
    Snapshot,
    Started,
)
from metrale_ray.replay.ranks import ReplayRanks


@dataclass(frozen=True, slots=True)
class Played:
    """A command that was carried out. `answered` is None where the journal ends before its answers.

    `is_approximate`: its rows stand on others than the recorded ones. `takes_digest`: its digest was taken over from
    its own record, so it proves nothing.
    """

    commanded: Commanded
    frame: CommandFrame
    answered: Answered | None
    replies: list[Reply]
    is_approximate: bool
    takes_digest: bool


class Player:
    """Over `ranks`, which it loads. `is_lost`: records are missing, and no snapshot has come since."""

    def __init__(self, ranks: ReplayRanks) -> None:
        self.is_lost = False
        self.num_skipped = 0  # commands between a gap and the next snapshot
        self._ranks = ranks
        self._has_begun = self._is_loaded = False
        self._held: tuple[Commanded, CommandFrame] | None = None
        self._last: Settled | None = None  # the last command, whose effect is staged
        self._approximate: set[Slot] = set()
        self._needs_digest = False

    @property
    def last_seq(self) -> int:
        """The number of the last command that was carried out; 0 before the first."""
        return 0 if self._last is None else self._last.seq

    @property
    def takes_up(self) -> bool:
        """Whether the next snapshot is one to begin anew at; others say what is known already."""
        return self.is_lost or not self._has_begun

    def take(self, record: ReadRecord) -> Played | None:
        """The next record of the journal; what was carried out for it. Raises JournalError, LinkLost or Desync."""
        match record:
            case Started():
                self._begin()
            case Snapshot() if self.takes_up:
                self._take_up(record)
            case Gap():
                self.is_lost, self._held = True, None
            case Commanded() if self.is_lost:
                self.num_skipped += 1
            case Commanded():
                self._held = (record, _frame(record))
            case Answered() if self._held is not None and self._held[0].seq == record.seq:
                return self._run(*self._held, record)
        return None

    def finish(self) -> Played | None:
        """The journal has ended. The command whose answers it does not have is carried out all the same."""
        return None if self._held is None else self._run(*self._held, None)

    def _begin(self) -> None:
        if self._has_begun:
            raise JournalError("a second engine's life begins in the middle of this journal; replay each by itself")
        self._has_begun = True

    def _run(self, commanded: Commanded, frame: CommandFrame, answered: Answered | None) -> Played:
        if not self._has_begun:
            raise JournalError("this journal begins with neither the start of an engine nor a snapshot")
        self._held = None
        if not self._is_loaded and not isinstance(frame.command, Load):
            raise JournalError(
                f"command {commanded.seq} comes before any load, and no snapshot says what the ranks held; a dump of "
                "last commands, as this may be, is for inspect-journal and bisect"
            )
        self._check_settled(frame)
        takes_digest = self._needs_digest and answered is not None and bool(answered.answers)
        if takes_digest:
            assert answered is not None
            self._ranks.take_digest(answered.answers[0].digest)
            self._needs_digest = False
        replies = self._ranks.run(frame)
        self._is_loaded = True
        self._last = Settled(commanded.seq, False)
        return Played(commanded, frame, answered, replies, self._note_slots(frame), takes_digest)

    def _check_settled(self, frame: CommandFrame) -> None:
        """What the command settles must be what was carried out last here."""
        settled = frame.envelope.settled
        if self._last is not None and (settled is None or settled.seq != self._last.seq):
            raise JournalError(
                f"command {frame.envelope.seq} settles {'none' if settled is None else f'command {settled.seq}'}, and "
                f"the last one before it here is command {self._last.seq}: records are missing in between"
            )

    def _note_slots(self, frame: CommandFrame) -> bool:
        """Whether what this command computes is approximate; if so, everything in it is from now on."""
        if isinstance(frame.command, FreeSlot):
            self._approximate.discard(frame.command.slot)
        if isinstance(frame.command, Scrub):
            return frame.command.slot in self._approximate
        rows = command_rows(frame.command)
        self._approximate -= {row.slot for row in rows if row.start == 0}
        slots = {row.slot for row in rows}
        if not slots & self._approximate:
            return False
        self._approximate |= slots
        return True

    # Snapshots -------------------------------------------------------------------------------------------------------

    def _take_up(self, snapshot: Snapshot) -> None:
        """Bring the slots of all ranks to where they were. Raises JournalError when that cannot be done."""
        if self._last is not None:
            self._ranks.settle(self._last)
            self._last = None
        if self._is_loaded:
            for slot in range(self._ranks.config.max_batch_size):
                self._ranks.arrange(FreeSlot(Slot(slot)))  # refused where it is free already
        else:
            self._arrange(snapshot, Load(snapshot.started.num_blocks))
        self._approximate = set()
        for note in snapshot.live:
            if note.slot is not None and note.length:
                self._approximate.add(Slot(note.slot))
                for span in _prefill(note, Slot(note.slot), self._ranks.config.max_num_batched_tokens):
                    self._arrange(snapshot, PrefillChunk(span))
        self._has_begun = self._is_loaded = self._needs_digest = True
        self.is_lost = False

    def _arrange(self, snapshot: Snapshot, command: Load | PrefillChunk) -> None:
        for reply in self._ranks.arrange(command):
            if reply.status is not Status.OK:
                reason = "no reason given" if reply.error is None else reply.error.message
                raise JournalError(
                    f"the snapshot at command {snapshot.seq} cannot be taken up: rank {reply.rank}: {reason}"
                )


def _prefill(note: LiveNote, slot: Slot, max_tokens: int) -> Sequence[Span]:
    """The chunks that bring an empty slot to `note`. One that only waits to be freed gets a token that says nothing."""
    tokens = note.tokens[: note.length] or (0,)
    starts = range(0, len(tokens), max_tokens)
    blocks = tuple(map(BlockId, note.block_table))
    return [
        Span(slot, start, tokens[start : start + max_tokens], blocks if start == 0 else (), Logits.NONE)
        for start in starts
    ]


def _frame(record: Commanded) -> CommandFrame:
    if record.data is None:
        raise JournalError(f"command {record.seq} has no frame: this journal leaves clients' content out")
    try:
        frame = decode_command(record.data)
    except FrameError as error:
        raise JournalError(f"the frame of command {record.seq} cannot be read here: {error.message}") from error
    if len(command_rows(frame.command)) != len(record.rows):
        raise JournalError(
            f"command {record.seq} has {len(command_rows(frame.command))} rows and is noted with {len(record.rows)}"
        )
    return frame
