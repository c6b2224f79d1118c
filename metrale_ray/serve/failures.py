# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ApiError`: how a request over HTTP fails: a status, and OpenAI's error object.

Rules: every failure of the engine and every refusal has one status here, by its stable code; what no table names is a
500 with its message. `code` names the failure class for programs.
"""

from __future__ import annotations

from typing import Any

from metrale_ray.errors import EngineDead, MetraleError, RequestError, UserError

RETRY_AFTER_S = 1
"""What a client that was turned away is told to wait. A queue moves within a step or two."""

STATUS_BY_CODE = {
    "queue_full": 429,
    "too_many_requests": 429,
    "not_ready": 503,
    "draining": 503,
    "engine_dead": 503,
    "engine_unavailable": 503,
    "deadline_exceeded": 504,
    "command_failed": 500,
    "bad_logits": 500,
    "no_token_left": 400,
    "grammar_failed": 400,  # a form that costs too much is the caller's
    "model_not_found": 404,
    "not_found": 404,
}
"""Codes that are not plain 400 (from RequestError) or 500 (from anything else)."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """One failed request. `retry_after_s` becomes the header Retry-After; `headers` go with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.retry_after_s = RETRY_AFTER_S if retry_after_s is None and status in (429, 503) else retry_after_s
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """The caller's mistake: 400."""
    return ApiError(400, message, code=code, param=param)


def of_code(code: str, message: str, *, param: str | None = None, default: int = 500) -> ApiError:
    """What a sequence's error (code, message) is over HTTP. `default`: the status of a code that no table names."""
    return ApiError(STATUS_BY_CODE.get(code, default), message, code=code, param=param)


def of_output(code: str, message: str, *, form: str | None = None) -> ApiError:
    """The error with which the head, or the front before it, ended a sequence.

    `form`: the client's field that the output's form came from.
    """
    param = form if code in _OF_FORMS else None
    return of_code(code, message, param=param, default=400 if code in _REFUSALS else 500)


def of_error(error: MetraleError) -> ApiError:
    """What an error of the engine or a refusal is over HTTP."""
    if isinstance(error, RequestError):
        return of_code(error.code, error.message, param=error.param, default=400)
    if isinstance(error, EngineDead):
        return ApiError(503, error.message, code=error.code)
    return of_code(error.code, error.message, default=400 if isinstance(error, UserError) else 500)


_OF_FORMS = ("grammar_failed", "invalid_grammar")
_REFUSALS = ("invalid_request", "empty_prompt", "context_length_exceeded", "invalid_grammar", "no_chat_template")
