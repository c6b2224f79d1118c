# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every failure of a request as an answer in OpenAI's shape.

Rules: a status, a code and a sentence for all of them, 404 and 405 of the router too. What nobody foresaw is a 500
that says where to look, and its traceback is in the log, once.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from metrale_ray.errors import MetraleError
from metrale_ray.serve.failures import ApiError, of_error
from metrale_ray.serve.http.unsupported import not_found
from metrale_ray.serve.http.visit import visit_of

log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
"""Nobody reads it: it is for the log and the metrics, as other servers write it."""


def error_response(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """The answer to a request that failed."""
    visit_of(scope).error_code = error.code
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return Response(to_json(error.body()), error.status, headers, media_type="application/json")


def client_gone() -> ApiError:
    """The client has closed the connection."""
    return ApiError(CLIENT_GONE_STATUS, "the client has closed the connection", code="client_gone")


def unforeseen(error: Exception, request_id: str) -> ApiError:
    """A mistake in the service itself, which is logged here."""
    log.error("request %s failed by a mistake of the service", request_id, exc_info=error)
    message = f"the service made a mistake ({type(error).__name__}); its log has it under request {request_id}"
    return ApiError(500, message, code="internal_error")


def api_error(error: Exception, request_id: str) -> ApiError:
    """What any failure is over HTTP."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MetraleError):
        return of_error(error)
    if isinstance(error, ClientDisconnect):
        return client_gone()
    return unforeseen(error, request_id)


def add_handlers(app: FastAPI) -> None:
    """Let `app` answer failures in OpenAI's shape."""
    for kind in (ApiError, MetraleError, ClientDisconnect):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(HTTPException, _answer_router)


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(api_error(error, visit_of(request.scope).request_id), request.scope)


async def _answer_router(request: Request, error: Exception) -> Response:
    """The router knows no such path, or not with this method."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        return error_response(not_found(request.method, request.url.path), request.scope)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another one")
        message = f"{request.url.path} takes no {request.method}; use {allowed}"
        headers = dict(error.headers or {})
        return error_response(ApiError(405, message, code="method_not_allowed", headers=headers), request.scope)
    return error_response(ApiError(error.status_code, str(error.detail), code="http_error"), request.scope)
