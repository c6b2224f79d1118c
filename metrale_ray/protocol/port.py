# SPDX-License-Identifier: MIT OR Apache-2.0
"""`CommandPort`: all that a model knows of the wire. A worker's link implements it; a model's Ep part gets one."""

from __future__ import annotations

from typing import Protocol

from metrale_ray.protocol.commands import Command, CommandFrame, Reply


class CommandPort(Protocol):
    """One rank's end of the command stream."""

    def receive(self) -> CommandFrame:
        """Wait, without limit, for the next command. Raises LinkLost when the head has gone, FrameError or
        SessionError when what came is not a legal command."""
        ...

    def reply(self, reply: Reply) -> None:
        """Answer the command just received. Raises LinkLost."""
        ...

    def broadcast(self, command: Command) -> CommandFrame:
        """Send one whole command to every worker (head only). Raises LinkLost."""
        ...
