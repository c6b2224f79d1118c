# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LastCatch`: the middleware that makes a 500 in OpenAI's shape of what breaks below it.

Rule: it stands inside what writes headers for all answers, such as CORS, so that web pages can read a failure too.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from metrale_ray.serve.http.errors import error_response, unforeseen
from metrale_ray.serve.http.visit import visit_of


class LastCatch:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, and answer for it if it fails before an answer began."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            visit = visit_of(scope)
            failure = unforeseen(error, visit.request_id)
            if visit.status is not None:  # too late for another answer: the server cuts the connection
                visit.error_code = failure.code
                raise
            await error_response(failure, scope)(scope, receive, send)
