# SPDX-License-Identifier: MIT OR Apache-2.0
"""Faults raised on purpose, for tests: off unless the configuration lists some, and reachable in no other way.

`Faults.check` is called at each phase of a command; the collectives call it around each reduction (`at_phase`), so no
model code knows of faults. The layer of a fault is the number of the reduction in its step. `Faults.damage` is called
once a command is staged and before it runs: there the memory of this rank is damaged, if that is asked for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from metrale_ray.config import DAMAGES, FaultSpec, Phase
from metrale_ray.errors import Desync, MetraleError, SlotPoisoned
from metrale_ray.model.damage import Damage
from metrale_ray.protocol.commands import CommandFrame, FreeSlot, Slot, command_rows

OF_ROWS = ("flip_token", "flip_block", "flip_length", "flip_kv")  # for nothing but a row


class InjectedFault(MetraleError):
    """A fault that the configuration asked for. `slots` is None where it names none."""

    code = "injected_fault"

    def __init__(self, message: str, *, slots: Sequence[int] | None = None) -> None:
        super().__init__(message, slots=slots)
        self.slots = slots


class Faults:
    """The faults of one rank, and which sequence each slot holds (by its first token)."""

    def __init__(self, specs: Sequence[FaultSpec], rank: int, damage: Damage) -> None:
        self._specs = [spec for spec in specs if spec.rank == rank]
        self._damage = damage
        self._first_tokens: dict[Slot, int] = {}
        self._fired: set[FaultSpec] = set()
        self._frame: CommandFrame | None = None

    def begin(self, frame: CommandFrame) -> None:
        """A command has come: faults from now on are about it."""
        if not self._specs:
            return
        self._frame = frame
        for span in command_rows(frame.command):
            if span.start == 0:
                self._first_tokens[span.slot] = span.token_ids[0]

    def check(self, phase: Phase, layer: int = 0) -> None:
        """Raise, or do, what is asked for at this point."""
        for spec in self._specs:
            if not _is_flip(spec) and spec.phase == phase and (phase in ("validation", "reply") or spec.layer == layer):
                self._maybe_fire(spec)

    def damage(self) -> None:
        """Flip the bits that are asked for at this command, which has just been staged."""
        for spec in self._specs:
            if _is_flip(spec):
                self._maybe_fire(spec)

    def _maybe_fire(self, spec: FaultSpec) -> None:
        slots = self._matching_slots(spec)
        if slots is None or spec in self._fired:
            return
        if (spec.first_token is None and spec.command is not None) or spec.kind in DAMAGES:
            self._fired.add(spec)
        self._fire(spec, slots)

    def _matching_slots(self, spec: FaultSpec) -> list[Slot] | None:
        """The slots that the fault is about, or None when it is not about this command."""
        frame = self._frame
        if frame is None or (spec.cmd is not None and frame.command.code.name.lower() != spec.cmd):
            return None
        if not _is_due(spec, frame.envelope.seq):
            return None
        here = [span.slot for span in command_rows(frame.command) if span.start > 0 or spec.kind != "flip_kv"]
        if isinstance(frame.command, FreeSlot) and spec.cmd is not None:  # a free is no run of its sequence
            here = [frame.command.slot]
        if spec.first_token is None:
            return None if spec.kind in OF_ROWS and not here else here
        matching = [slot for slot in here if self._first_tokens.get(slot) == spec.first_token]
        return matching or None

    def _fire(self, spec: FaultSpec, slots: list[Slot]) -> None:
        match spec.kind:
            case "fail":
                raise InjectedFault(spec.message, slots=slots if spec.blame else None)
            case "poison":
                raise SlotPoisoned(spec.message, slots=slots)
            case "leave":
                raise Desync(spec.message)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(spec.seconds)
            case _:
                self._damage.do(spec, slots)


def _is_flip(spec: FaultSpec) -> bool:
    return spec.kind.startswith("flip_")


def _is_due(spec: FaultSpec, seq: int) -> bool:
    """A fault of one command is due at that command; one of a sequence from that command on."""
    if spec.command is None:
        return True
    return seq == spec.command if spec.first_token is None else seq >= spec.command
