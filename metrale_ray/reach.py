# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether somebody listens at an address, before Ray is asked to connect: Ray itself would try for minutes."""

from __future__ import annotations

import socket

# One connection inside a data centre takes a millisecond; a packet that is dropped is never answered.
CONNECT_TIMEOUT_S = 3.0


def why_unreachable(host: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """Why no connection to `port` on `host` can be made; None when it can."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return None
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return error.strerror or str(error)


def why_silent(address: str) -> str | None:
    """Why nobody can be reached at Ray's address HOST:PORT. None for any other form, which Ray resolves by itself."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return None
    return why_unreachable(host.strip("[]"), int(port))
