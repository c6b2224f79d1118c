# SPDX-License-Identifier: MIT OR Apache-2.0
"""`open_session`: the HTTP client of a run, set so that it is never what a request waits for.

aiohttp and not httpx, because one piece of a stream costs it about a quarter of the time (100 instead of 360
microseconds, measured with 32 streams on one core), and a benchmark shares the machine with what it measures.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

Session = aiohttp.ClientSession


def open_session(headers: Mapping[str, str], timeout_s: float) -> Session:
    """A client that sends `headers` with every request. `timeout_s`: without a byte until a request has failed."""
    return Session(
        headers=headers,
        # Without a limit, or a client of the load would wait for another one's connection.
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s),
    )
