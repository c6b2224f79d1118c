# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import itertools

import pytest

from metrale_ray.errors import EngineDead, EpCommandFailed, MetraleError, RequestError
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.unsupported import NOT_SUPPORTED
from tests.serve.http.asgi import app_of, ask, plain_app


def test_a_route_that_other_servers_have_is_not_supported_yet() -> None:
    app = plain_app()
    for method, path, below in itertools.product(("GET", "POST"), NOT_SUPPORTED, ("", "/x/y")):
        answer = ask(app, method, path + below)
        assert (answer.status, answer.code) == (404, "not_supported")
        assert f"{path} is not supported yet" in answer.json["error"]["message"]


def test_any_other_path_is_not_found() -> None:
    app = plain_app()
    for path in ("/", "/v1", "/v1/", "/v1/responsesx", "/v1/models/", "/V1/models", "/version/", "/" + "x" * 9999):
        answer = ask(app, "GET", path)
        assert answer.status == 404
        assert answer.code in ("not_found", "model_not_found")
        assert len(answer.body) < 1000


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", "/v1/completions", "POST"), ("POST", "/health", "GET")]
)
def test_a_method_that_a_route_does_not_take_is_a_405_that_names_those_it_takes(
    method: str, path: str, allowed: str
) -> None:
    answer = ask(plain_app(), method, path)
    assert (answer.status, answer.code, answer.header("allow")) == (405, "method_not_allowed", allowed)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (RequestError("no", code="context_length_exceeded", param="prompt"), 400, "context_length_exceeded", None),
        (RequestError("full", code="queue_full"), 429, "queue_full", "1"),
        (EngineDead("gone", rank=1), 503, "engine_dead", "1"),
        (EpCommandFailed("the worker's text", rank=1), 500, "command_failed", None),
        (MetraleError("something"), 500, "error", None),
        (ApiError(418, "tea", code="teapot", headers={"X-Pot": "1"}), 418, "teapot", None),
    ],
)
def test_every_error_has_its_status_and_keeps_its_words(
    error: Exception, status: int, code: str, retry_after: str | None
) -> None:
    app = app_of()

    @app.get("/fails")
    async def fails() -> None:
        raise error

    answer = ask(app, "GET", "/fails")
    assert (answer.status, answer.code, answer.header("retry-after")) == (status, code, retry_after)
    assert answer.json["error"]["message"] == error.message  # type: ignore[attr-defined]
    assert answer.json["error"]["param"] == getattr(error, "param", None)
    assert answer.header("content-type") == "application/json"
