# SPDX-License-Identifier: MIT OR Apache-2.0
"""Names of commands for people, also of those that this build does not know."""

from __future__ import annotations

from metrale_ray.protocol.commands import Cmd

FIELD_NAMES = {
    "tokens": "the token ids that the rank had",
    "blocks": "the block tables",
    "lengths": "the lengths",
    "command": "the command's bytes",
    "residual": "the hidden state after the last layer",
    "routing": "the experts that were chosen",
    "weights": "the weights",
    "kv": "the KV rows",
    "digest": "the digest of what was settled before",
}
"""What a witness or a digest is of, in words, the most specific first."""


def cmd_name(code: int) -> str:
    """The command's name, such as "decode_batch"."""
    try:
        return Cmd(code).name.lower()
    except ValueError:
        return f"command code {code}"
