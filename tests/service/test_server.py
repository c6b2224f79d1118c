# SPDX-License-Identifier: MIT OR Apache-2.0
"""The HTTP server's thread: it serves, runs the service's tasks, says why it ended, and ends within a bounded time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from metrale_ray.errors import StartError
from metrale_ray.service.server import HttpServer, listen

TIMEOUT_S = 20.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Says hello."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_it_serves_on_a_thread_of_its_own_and_runs_the_tasks_beside() -> None:
    began, ended = threading.Event(), threading.Event()

    async def task() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    listener = listen("127.0.0.1", 0)
    server = HttpServer(app, listener, [task])
    server.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert httpx.get(url, timeout=TIMEOUT_S).text == "hello"
        assert began.wait(TIMEOUT_S)
        assert server.call(asyncio.sleep(0, "done")).result(TIMEOUT_S) == "done"
    finally:
        server.close()
    assert ended.is_set()
    assert server.has_ended.is_set()
    assert server.failure is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=TIMEOUT_S)
    with pytest.raises(StartError, match="does not run"):
        server.call(asyncio.sleep(0))


def test_a_task_that_breaks_ends_the_server_and_says_why() -> None:
    async def task() -> None:
        raise ValueError("broken")

    server = HttpServer(app, listen("127.0.0.1", 0), [task])
    server.start()
    assert server.has_ended.wait(TIMEOUT_S)
    assert repr(server.failure) == "ValueError('broken')"
    server.close()


def test_a_port_that_is_taken_is_refused_with_what_to_do() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(StartError, match=r"cannot listen on 127.0.0.1:\d+: .*--port"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(StartError, match=r"cannot listen on nowhere\.invalid:0"):
        listen("nowhere.invalid", 0)


def test_closing_before_the_start_frees_the_port() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    HttpServer(app, listener).close()
    listen("127.0.0.1", port).close()
