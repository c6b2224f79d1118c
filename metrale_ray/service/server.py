# SPDX-License-Identifier: MIT OR Apache-2.0
"""`HttpServer`: uvicorn on an event loop in a thread of its own, so that the main thread is free for Ray and signals.

Rules: the port is taken before anything else starts, so that a service that cannot have it fails at once. Beside the
server the loop runs the service's own tasks; when one of them breaks, the server ends, and says why. Closing takes a
bounded time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import uvicorn

from metrale_ray.errors import StartError

log = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 75  # more than a load balancer's usual 60, so that it is the one who closes
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`; port 0 is any free one. Raises StartError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        # Its connections inherit this. asyncio sets it only where a socket names its protocol, which this one does not,
        # and an answer's second segment would wait 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from error


class HttpServer:
    """An ASGI app at `listener`, which it closes. `tasks` run beside it on its loop, from start to end."""

    def __init__(
        self, app: Any, listener: socket.socket, tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    ) -> None:
        self._listener = listener
        self._tasks = tasks
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,  # the app logs each request with its id
                server_header=False,
                date_header=True,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                backlog=BACKLOG,
                ws="none",
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_loop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)
        self.failure: BaseException | None = None
        self.has_ended = threading.Event()

    def start(self) -> None:
        """Serve from now on. Raises StartError when the server does not come up."""
        self._thread.start()
        self._has_loop.wait(START_TIMEOUT_S)
        deadline = START_TIMEOUT_S
        while not self._server.started and not self.has_ended.wait(0.01) and deadline > 0:
            deadline -= 0.01
        if not self._server.started:
            raise StartError(f"the HTTP server did not start: {self.failure or 'it takes too long'}")

    def call(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run something on the server's loop."""
        if self._loop is None or self.has_ended.is_set():
            work.close()
            raise StartError("the HTTP server does not run")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End it: no new connection, and those that are open are cut. May be called again, and without a start."""
        self._listener.close()
        if not self._thread.is_alive():
            return
        self._server.should_exit = True
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the HTTP server does not end, and is left behind")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:  # whatever it is, the main thread is told
            self.failure = self.failure or error
            log.exception("the HTTP server failed")
        finally:
            self.has_ended.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_loop.set()
        tasks = [asyncio.ensure_future(self._watched(task())) for task in self._tasks]
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watched(self, work: Awaitable[None]) -> None:
        """A task that breaks ends the server: nothing of the service may stop working unseen."""
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await work
        except Exception as error:
            log.exception("a task of the service failed")
            self.failure = error
            self._server.should_exit = True
