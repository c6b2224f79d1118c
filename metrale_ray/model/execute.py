# SPDX-License-Identifier: MIT OR Apache-2.0
"""Carrying out one command on one rank: one table, the same for rank 0 and for workers.

`Replica.run` settles the last command, checks the new one whole, runs it, stages its effect, and gives the reply. It
raises only what leaves the rank unable to go on: LinkLost and Desync. Whatever else goes wrong is the command's
failure: the rank tells the others in the next collective of the step, if there is one, and answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from metrale_ray.clock import Clock
from metrale_ray.errors import CommandRefused, Desync, LinkLost, MetraleError, SlotPoisoned
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.contract.model import Model
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.faults import Faults
from metrale_ray.model.slots import Slots
from metrale_ray.protocol.commands import (
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    FreeSlot,
    Load,
    MixedStep,
    Ping,
    PrefillChunk,
    Progress,
    Rank,
    Reply,
    ReplyError,
    Scrub,
    Shutdown,
    Slot,
    Span,
    Status,
    Timing,
    command_rows,
)

log = logging.getLogger(__name__)

NOTHING: Mapping[str, bytes] = MappingProxyType({})

OnProgress = Callable[["Replica", CommandFrame, Progress], None]


def execute(
    model: Model, command: Command, seqs: Sequence[SequenceState], on_progress: Callable[[int, int], None]
) -> torch.Tensor | None:
    """The table from commands to model methods. Gives rank 0's logits, None elsewhere and without rows."""
    match command:
        case Load(num_blocks):
            model.load(num_blocks, on_progress)
        case Decode(row):
            return model.decode(row, seqs[0])
        case DecodeBatch(rows):
            return model.decode_batch(rows, seqs)
        case PrefillChunk(row):
            return model.prefill_chunk(row, seqs[0])
        case MixedStep(rows):
            return model.mixed_forward_batch(rows, seqs)
        case FreeSlot() | Ping() | Shutdown() | Scrub():
            pass  # no forward: the effect is in the slots, or in the answer
    return None


class Replica:
    """One rank's model and slots under one command stream. `logits` are the last command's, on rank 0.

    `on_progress` is called while a load runs. The reply to the first step of every `agreement_interval` commands
    shows what this rank computed; 0: never. `clock` times the replies.
    """

    def __init__(
        self,
        rank: int,
        model: Model,
        slots: Slots,
        collectives: Collectives,
        faults: Faults,
        on_progress: OnProgress,
        clock: Clock = time.monotonic,
        agreement_interval: int = 0,
    ) -> None:
        self.rank = rank
        self.logits: torch.Tensor | None = None
        self._model = model
        self._slots = slots
        self._collectives = collectives
        self._faults = faults
        self._on_progress = on_progress
        self._clock = clock
        self._agreement_interval = agreement_interval
        self._watched_interval: int | None = None  # the number of the last interval of which a step was watched

    @property
    def slots(self) -> Slots:
        """This rank's mirror of the live sequences."""
        return self._slots

    def run(self, frame: CommandFrame) -> Reply:
        """Carry out one command and say how it ended. Raises LinkLost or Desync when this rank cannot go on."""
        started = self._clock()
        self.logits = None
        self._slots.settle(frame.envelope.settled)
        self._faults.begin(frame)
        rows = command_rows(frame.command)
        self._model.watch_step(bool(rows) and self._is_due(frame.envelope.seq))
        self._begin_collectives(rows)
        try:
            self._faults.check("validation")
            self._slots.check(frame.command)
            seqs = self._slots.stage(frame)
            self._faults.damage()
            self.logits = execute(self._model, self._slots.staged_command, seqs, self._progress_of(frame))
            if isinstance(frame.command, Load):
                self._slots.reserve(frame.command.num_blocks)
            observed = self._observe(frame.command)
            self._faults.check("reply")
        except (LinkLost, Desync):
            raise
        except Exception as error:  # noqa: BLE001  whatever a command raises is the command's failure
            return self._failed(frame, error, started)
        self._slots.succeeded()
        return self._reply(frame, Status.OK, None, started, observed)

    def _begin_collectives(self, rows: Sequence[Span]) -> None:
        """Which collectives this command has, and of what sizes: from its rows alone, before anything can fail."""
        if not rows:
            self._collectives.begin(0, 0)
            return
        num_tokens = sum(len(span.token_ids) for span in rows)
        self._collectives.begin(num_tokens, self._model.num_reductions(), self._model.num_gathered_rows(rows))

    def _is_due(self, seq: int) -> bool:
        """Whether this is the first step of its interval: decided by the commands' numbers, so by all ranks alike."""
        if self._agreement_interval == 0:
            return False
        before, self._watched_interval = self._watched_interval, seq // self._agreement_interval
        return before != self._watched_interval

    def _observe(self, command: Command) -> dict[str, bytes]:
        """What a command that succeeded shows beside what was staged."""
        if not isinstance(command, Scrub):
            return self._model.witness_of_step()
        observed = {"weights": self._model.weights_digest(command.part, command.num_parts)}
        if command.slot is not None:
            kv = self._model.kv_digest(self._slots.sequence(command.slot), command.start)
            observed |= {} if kv is None else {"kv": kv}
        return observed

    def _progress_of(self, frame: CommandFrame) -> Callable[[int, int], None]:
        return lambda done_bytes, total_bytes: self._on_progress(self, frame, Progress(done_bytes, total_bytes))

    def progress_reply(self, frame: CommandFrame, progress: Progress) -> Reply:
        """What a worker sends while its load runs."""
        envelope = frame.envelope
        return Reply(
            version=envelope.version,
            epoch=envelope.epoch,
            seq=envelope.seq,
            cmd=frame.command.code,
            rank=Rank(self.rank),
            status=Status.PROGRESS,
            digest=self._slots.digest,
            progress=progress,
        )

    def _failed(self, frame: CommandFrame, error: Exception, started: float) -> Reply:
        log.info("rank %d: command %d failed: %r", self.rank, frame.envelope.seq, error)
        self._collectives.report_failure()
        if self._slots.staged_seq != frame.envelope.seq:
            self._slots.refuse(frame)
        self.logits = None
        return self._reply(frame, _status(error), _describe(error), started)

    def _reply(
        self,
        frame: CommandFrame,
        status: Status,
        error: ReplyError | None,
        started: float,
        observed: Mapping[str, bytes] = NOTHING,
    ) -> Reply:
        envelope = frame.envelope
        witness = {**self._slots.witness(), **observed}
        waited_us = int(self._collectives.waited_s * 1e6)
        total_us = int((self._clock() - started) * 1e6)
        return Reply(
            version=envelope.version,
            epoch=envelope.epoch,
            seq=envelope.seq,
            cmd=frame.command.code,
            rank=Rank(self.rank),
            status=status,
            digest=self._slots.digest,
            error=error,
            timing=Timing(int(started * 1e6), max(0, total_us - waited_us), waited_us),
            witness=witness,
        )


def _status(error: Exception) -> Status:
    if isinstance(error, CommandRefused):
        return Status.REFUSED
    return Status.POISONED if isinstance(error, SlotPoisoned) else Status.FAILED


def _describe(error: Exception) -> ReplyError:
    slots = getattr(error, "slots", None)
    blamed = None if slots is None else tuple(Slot(s) for s in slots)
    if isinstance(error, MetraleError):
        return ReplyError(error.code, error.message, blamed)
    return ReplyError("command_failed", f"{type(error).__name__}: {error}", blamed)
