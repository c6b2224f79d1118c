# SPDX-License-Identifier: MIT OR Apache-2.0
"""Names of commands and statuses for people, also of those that this build does not know."""

from __future__ import annotations

from metrale_ray.protocol.commands import Cmd, Status

_CMDS = {int(cmd): cmd.name.lower() for cmd in Cmd}
_STATUSES = {int(status): status.name.lower() for status in Status}


def cmd_name(code: int) -> str:
    """The command's name, such as "decode_batch"."""
    return _CMDS.get(code, f"command code {code}")


def status_name(code: int) -> str:
    """The name of a rank's answer, such as "ok"."""
    return _STATUSES.get(code, f"status {code}")
