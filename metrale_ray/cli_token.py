# SPDX-License-Identifier: MIT OR Apache-2.0
"""The token of a Ray that a command starts for itself, and of one that runs on this machine already.

A Ray listens on every interface, and would do what any stranger asks. Ray reads these variables when it is imported, so
this comes before.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

RAY_AUTH_MODE = "RAY_AUTH_MODE"  # Ray's own variables
RAY_AUTH_TOKEN = "RAY_AUTH_TOKEN"
RAY_AUTH_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
TOKEN_FILE = "~/.ray/auth_token"  # where Ray itself keeps it


OWN = (None, "local")  # addresses with which a Ray is started


def use_ray_token(address: str | None) -> None:
    """Protect the Ray that is about to be started; one at `address` has its own rules, and so has the environment."""
    if address in OWN and RAY_AUTH_MODE not in os.environ:
        os.environ.update({RAY_AUTH_MODE: "token", RAY_AUTH_TOKEN: secrets.token_hex(32)})


def use_cluster_token() -> None:
    """Show the token that this user has, as `ray start` does: without a mode, Ray's drivers do not look for one.

    For commands that only look: with a Ray that wants no token, what a driver with one starts does not live.
    """
    has_token = RAY_AUTH_TOKEN in os.environ or RAY_AUTH_TOKEN_PATH in os.environ
    if RAY_AUTH_MODE not in os.environ and (has_token or Path(TOKEN_FILE).expanduser().is_file()):
        os.environ[RAY_AUTH_MODE] = "token"
