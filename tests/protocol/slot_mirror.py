# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Mirror`: what a rank's slots must be after a stream of commands, worked out anew from the protocol's page."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from metrale_ray.protocol.commands import CommandFrame, FreeSlot, Settled, command_rows


@dataclass(frozen=True)
class Row:
    """One sequence: its settled length, and its block table."""

    length: int = 0
    blocks: tuple[int, ...] = ()


@dataclass
class Mirror:
    """The settled sequences by slot, the digest, and the last command if it succeeded on the rank."""

    rows: dict[int, Row] = field(default_factory=dict)
    digest: bytes = bytes(8)
    staged: CommandFrame | None = None

    def take(self, frame: CommandFrame, succeeded: bool) -> None:
        """A command has come, which settles the one before, and has succeeded on the rank or had no effect."""
        self._settle(frame.envelope.settled)
        self.staged = frame if succeeded else None

    def after(self, settled: Settled | None) -> Mirror:
        """What it will be once the last command is settled so."""
        copy = Mirror(dict(self.rows), self.digest, self.staged)
        copy._settle(settled)
        return copy

    def shown(self) -> dict[int, tuple[int, tuple[int, ...]]]:
        """What the rank holds now: settled lengths, and block tables with the staged blocks."""
        live = {slot: (row.length, row.blocks) for slot, row in self.rows.items()}
        for span in command_rows(self.staged.command) if self.staged else ():
            row = self.rows.get(span.slot, Row())
            live[span.slot] = (row.length, row.blocks + span.new_blocks)
        return live

    def _settle(self, settled: Settled | None) -> None:
        frame, self.staged = self.staged, None
        if frame is None or settled is None or not settled.ok:
            return
        touched: list[int] = []
        for span in command_rows(frame.command):
            old = self.rows.get(span.slot, Row())
            self.rows[span.slot] = Row(span.end, old.blocks + span.new_blocks)
            touched.append(span.slot)
        if isinstance(frame.command, FreeSlot):
            del self.rows[frame.command.slot]
            touched.append(frame.command.slot)
        digest = hashlib.blake2b(self.digest + frame.data, digest_size=8)
        for slot in touched:
            row = self.rows.get(slot, Row())
            digest.update(struct.pack(f"<II{len(row.blocks)}I", slot, row.length, *row.blocks))
        self.digest = digest.digest()
