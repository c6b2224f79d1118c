# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part Ep: how a model takes part in a group of ranks.

The head's side sends commands through the port it was given at construction; each call sends one whole frame. The
worker's side is `ep_worker_step`. Rank 0 runs the same `execute` directly, with no link to itself.

`ep_worker_step` returns True after a command that succeeded, False on shutdown, and raises EpCommandFailed, after the
failed reply was sent, for a command that was received, ran (or was refused) and failed: the worker stays up. Anything
else that it raises means that the rank cannot go on, and the worker leaves.
"""

from __future__ import annotations

from typing import Protocol

from metrale_ray.errors import EpCommandFailed
from metrale_ray.protocol.commands import (
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    FreeSlot,
    MixedStep,
    PrefillChunk,
    Reply,
    Shutdown,
    Slot,
    Status,
)
from metrale_ray.protocol.port import CommandPort


class StepRunner(Protocol):
    """What carries out one command on this rank; `model.execute.Replica` is the one there is."""

    rank: int

    def run(self, frame: CommandFrame) -> Reply:
        """Carry out one command and say how it ended. Raises what leaves this rank unable to go on."""
        ...


class Ep:
    """One rank's part in the group. `port` is None for a group of one."""

    def __init__(self, port: CommandPort | None) -> None:
        self._port = port

    def ep_worker_step(self, replica: StepRunner) -> bool:
        """Receive one command, carry it out, answer it. What comes back and is raised: see the top of this file."""
        port = self._required_port()
        frame = port.receive()
        reply = replica.run(frame)
        port.reply(reply)
        if reply.status is not Status.OK:
            error = reply.error
            message = error.message if error else "failed without a reason"
            raise EpCommandFailed(
                message, rank=replica.rank, slots=error.slots if error else None, cmd=frame.command.code.name.lower()
            )
        return not isinstance(frame.command, Shutdown)

    def ep_broadcast_cmd(self, command: Command) -> CommandFrame:
        """Send a command that changes no single slot: load, ping, scrub, shutdown. Raises LinkLost."""
        return self._required_port().broadcast(command)

    def ep_broadcast_cmd_for_seq(self, command: FreeSlot | Decode, slot: Slot) -> CommandFrame:
        """Send a command that concerns `slot`. Raises LinkLost."""
        named = command.slot if isinstance(command, FreeSlot) else command.row.slot
        if named != slot:
            raise AssertionError(f"a command for slot {named} was sent for slot {slot}")
        return self._required_port().broadcast(command)

    def ep_broadcast_tokens(self, command: PrefillChunk | DecodeBatch | MixedStep) -> CommandFrame:
        """Send a command with tokens of one or several slots, all in one frame. Raises LinkLost."""
        return self._required_port().broadcast(command)

    def _required_port(self) -> CommandPort:
        if self._port is None:
            raise AssertionError("this rank was built without a port")
        return self._port
