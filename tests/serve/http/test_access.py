# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from metrale_ray.serve.backend import Health
from metrale_ray.serve.http.metering import NoMetrics
from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.http.visit import MAX_ID_CHARACTERS
from tests.serve.http.asgi import JSON, WELL, Header, NoEngine, app_of, ask, model_of, plain_app, scope_of

LOGGER = "metrale_ray.serve.http.access"


class Counting(NoMetrics):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.engines: dict[str, Mapping[str, Any]] = {}

    def add_engine(self, model_name: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        self.engines[model_name] = figures()

    def http_began(self) -> None:
        self.told.append(("began",))

    def http_ended(self, route: str, status: int, duration_s: float) -> None:
        assert duration_s >= 0
        self.told.append((route, status))

    def rejected(self, code: str) -> None:
        self.told.append((code,))


@pytest.mark.parametrize("given", ["a", "req-1.2_3:4", "0" * MAX_ID_CHARACTERS, "YWJj+/8="])
def test_a_sane_id_is_kept_and_given_back(given: str) -> None:
    assert ask(plain_app(), "GET", "/version", [("x-request-id", given)]).header("x-request-id") == given


@pytest.mark.parametrize(
    "given", [None, "", " ", "a b", "a\r\nx: y", "a\n", "0" * (MAX_ID_CHARACTERS + 1), "\xe9", "a\x00"]
)
def test_any_other_id_is_replaced_by_a_new_one_each_time(given: str | None) -> None:
    headers = [] if given is None else [("x-request-id", given)]
    ids = [ask(plain_app(), "GET", "/version", headers).header("x-request-id") for _ in range(2)]
    assert all(one is not None and len(one) == 32 and one.isalnum() for one in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/version", [], 200),
        ("GET", "/nowhere", [], 404),
        ("POST", "/version", [], 405),
        ("POST", "/tokenize", [], 415),
        ("POST", "/tokenize", [JSON], 400),
    ],
)
def test_every_answer_has_its_id_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, method: str, path: str, headers: list[Header], status: int
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    answer = ask(plain_app(), method, path, [("x-request-id", "id-7"), *headers], b"secret text")
    assert (answer.status, answer.header("x-request-id")) == (status, "id-7")
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert len(lines) == 1
    assert lines[0].startswith(f"{method} {path} {status} ")
    assert lines[0].endswith("request id-7")
    assert "secret" not in caplog.text


def test_a_refused_key_is_logged_with_its_id_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    answer = ask(app_of(HttpSettings(api_keys=("k" * 8,))), "GET", "/v1/models", [("x-request-id", "id-8")])
    assert (answer.status, answer.header("x-request-id")) == (401, "id-8")
    assert "GET /v1/models 401 no_key" in caplog.text


def test_a_path_forges_no_line_and_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    assert ask(plain_app(), "GET", "/x\nGET /admin 200\x1b[31m" + "y" * 10_000).status == 404
    message = caplog.records[-1].getMessage()
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 1000


@pytest.mark.parametrize("is_well", [True, False])
def test_probes_are_for_debugging_only_whatever_they_find(caplog: pytest.LogCaptureFixture, is_well: bool) -> None:
    engine = NoEngine(WELL if is_well else Health(False, "it starts", False, "it hangs"))
    app = app_of(None, model_of(engine))
    caplog.set_level(logging.INFO, LOGGER)
    statuses = {
        path: ask(app, "GET", path).status
        for path in ("/health/live", "/metrics", "/health", "/health/ready", "/health/progress")
    }
    assert list(statuses.values()) == ([200] * 5 if is_well else [200, 200, 503, 503, 503])
    assert not caplog.records


def test_the_log_has_the_loss_of_readiness_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    engine = NoEngine(Health(False, "it starts", True, ""))
    app = app_of(None, model_of(engine))
    caplog.set_level(logging.INFO, "metrale_ray.serve.http")
    for health in (engine.now, WELL, Health(False, "rank 1 is silent", True, ""), WELL):
        engine.now = health
        for path in ("/health/ready", "/health"):
            ask(app, "GET", path)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "ready"),
        ("WARNING", "not ready any more: m: rank 1 is silent"),
        ("INFO", "ready"),
    ]


def test_what_breaks_is_a_500_with_the_id_and_one_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of()

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("a secret of the inside")

    answer = ask(app, "GET", "/broken", [("x-request-id", "id-9")])
    assert (answer.status, answer.code) == (500, "internal_error")
    assert "id-9" in answer.json["error"]["message"]
    assert "secret" not in answer.json["error"]["message"]
    assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [True]


def test_a_page_can_read_a_500_too() -> None:
    app = app_of(HttpSettings(cors_origins=("https://page.example",)))

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError

    answer = ask(app, "GET", "/broken", [("origin", "https://page.example")])
    assert (answer.status, answer.code) == (500, "internal_error")
    assert answer.header("access-control-allow-origin") == "https://page.example"
    assert answer.header("x-request-id") is not None
    assert (
        ask(app, "GET", "/broken", [("origin", "https://other.example")]).header("access-control-allow-origin") is None
    )


def test_what_breaks_within_an_answer_is_raised_so_that_the_server_cuts_it() -> None:
    app, metrics = app_of(metrics=(counting := Counting())), counting

    @app.get("/cut")
    async def cut() -> Any:
        from starlette.responses import StreamingResponse

        async def parts() -> Any:
            yield b"one"
            raise KeyError("two")

        return StreamingResponse(parts())

    with pytest.raises(KeyError):
        ask(app, "GET", "/cut")
    assert metrics.told == [("began",), ("/cut", 200), ("internal_error",)]


def test_each_request_is_counted_by_its_route_and_what_came_of_it() -> None:
    counting = Counting()
    app = app_of(metrics=counting)
    for method, path in (
        ("GET", "/v1/models/m"),
        ("GET", "/v1/models/other"),
        ("GET", "/nowhere/1"),
        ("POST", "/health"),
    ):
        ask(app, method, path)
    assert counting.told == [
        *(("began",), ("/v1/models/{model_id:path}", 200)),
        *(("began",), ("/v1/models/{model_id:path}", 404), ("model_not_found",)),
        *(("began",), ("other", 404), ("not_found",)),
        *(("began",), ("/health", 405), ("method_not_allowed",)),
    ]
    assert counting.engines == {"m": {"phase": "none"}}


def test_anything_but_http_is_turned_away() -> None:
    sent: list[Any] = []

    async def go() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await plain_app()(scope_of("GET", "/v1/models", type="websocket"), receive, send)

    asyncio.run(go())
    assert [message["type"] for message in sent] == ["websocket.close"]
