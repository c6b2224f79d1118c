# SPDX-License-Identifier: MIT OR Apache-2.0
"""The token of a Ray that a command starts for itself.

Such a Ray listens on every interface, and would do what any stranger asks. Ray reads these variables when it is
imported, so this comes before.
"""

from __future__ import annotations

import os
import secrets

RAY_AUTH_MODE = "RAY_AUTH_MODE"  # Ray's own variables
RAY_AUTH_TOKEN = "RAY_AUTH_TOKEN"


def use_ray_token(address: str | None) -> None:
    """Protect the Ray that is about to be started; one at `address` has its own rules, and so has the environment."""
    if address is None and RAY_AUTH_MODE not in os.environ:
        os.environ.update({RAY_AUTH_MODE: "token", RAY_AUTH_TOKEN: secrets.token_hex(32)})
