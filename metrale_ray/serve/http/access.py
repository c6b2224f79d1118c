# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Access`: the outermost middleware: a request's id, its line in the log and its figures.

Rules: one line for each request, with its id, what was asked, what came of it and how much; never a body, a query, a
header or a key. Probes are for debugging only: what they find out is logged where it changes (`routes_health`). The id
goes back with every answer. Anything but HTTP is turned away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metrale_ray.serve.http.errors import CLIENT_GONE_STATUS
from metrale_ray.serve.http.metering import HttpMetrics
from metrale_ray.serve.http.settings import LIVE_PATH
from metrale_ray.serve.http.visit import Visit, begin_visit

log = logging.getLogger(__name__)

MAX_PATH_CHARACTERS = 200
ID_HEADER = "x-request-id"
OTHER_ROUTE = "other"
PROBED_ROUTES = (LIVE_PATH, "/health", "/health/ready", "/health/progress", "/metrics")
"""Asked every second by machines: a line for each would hide the others."""


class Access:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, and note what came of it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._visit(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = self._clock()
        visit = begin_visit(scope, Headers(scope=scope).get(ID_HEADER))
        self._metrics.http_began()
        try:
            await self._app(scope, receive, _with_id(visit, send))
        finally:
            visit.route = getattr(scope.get("route"), "path", None)
            self._note(visit, scope, self._clock() - began_s)

    def _note(self, visit: Visit, scope: Scope, duration_s: float) -> None:
        status = CLIENT_GONE_STATUS if visit.status is None else visit.status
        self._metrics.http_ended(visit.route or OTHER_ROUTE, status, duration_s)
        if visit.error_code is not None:
            self._metrics.rejected(visit.error_code)
        is_probe = visit.route in PROBED_ROUTES
        log.log(
            logging.DEBUG if is_probe else logging.INFO,
            "%s %s %d %s in %.3f s, %d prompt tokens, %d tokens, request %s",
            scope["method"],
            quote(scope["path"][:MAX_PATH_CHARACTERS], safe="/:"),
            status,
            visit.error_code or "ok",
            duration_s,
            visit.num_prompt_tokens,
            visit.num_tokens,
            visit.request_id,
        )


def _with_id(visit: Visit, send: Send) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            visit.status = message["status"]
            headers = [*message.get("headers", []), (ID_HEADER.encode(), visit.request_id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return send_with_id
