# SPDX-License-Identifier: MIT OR Apache-2.0
"""Names of commands for people, also of those that this build does not know."""

from __future__ import annotations

from metrale_ray.protocol.commands import Cmd


def cmd_name(code: int) -> str:
    """The command's name, such as "decode_batch"."""
    try:
        return Cmd(code).name.lower()
    except ValueError:
        return f"command code {code}"
