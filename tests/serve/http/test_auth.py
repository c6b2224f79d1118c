# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from metrale_ray.errors import ConfigError
from metrale_ray.serve.http.auth import by_digest
from metrale_ray.serve.http.settings import LIVE_PATH, HttpSettings
from tests.serve.http.asgi import Header, app_of, ask

KEY, OTHER_KEY, ADMIN_KEY, WRONG_KEY = "key-of-users", "key-of-others", "key-of-admins", "key-of-nobody"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "POSSUM")


def bearer(key: str, scheme: str = "Bearer") -> Header:
    return ("authorization", f"{scheme} {key}")


NO_KEY: list[list[Header]] = [
    [],
    [bearer(WRONG_KEY)],
    [bearer("")],
    [bearer(KEY[:-1])],
    [bearer(KEY + "x")],
    [bearer(KEY.upper())],
    [bearer(f"{KEY} {KEY}")],
    [bearer(f"{WRONG_KEY},{KEY}")],
    [("authorization", KEY)],
    [bearer(KEY, "Basic")],
    [bearer(KEY), bearer(KEY)],
    [bearer(WRONG_KEY), bearer(KEY)],
    [("x-api-key", KEY)],
    [("proxy-authorization", f"Bearer {KEY}")],
    [("cookie", f"authorization=Bearer {KEY}")],
    [bearer("k\xe9y")],
]


@functools.cache
def keyed(**more: Any) -> Any:
    return app_of(HttpSettings(api_keys=(OTHER_KEY, KEY), admin_keys=(ADMIN_KEY,), **more))


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Every path and method that the app itself knows, a path's parameters filled in."""
    for route in app.routes:
        for method in route.methods:
            yield method, route.path.replace("{model_id:path}", "m")


def test_every_route_of_the_app_needs_a_key_but_liveness() -> None:
    app = keyed()
    known = set(routes(app))
    assert {("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", LIVE_PATH)} <= known
    for (method, path), headers in itertools.product(known, NO_KEY):
        answer = ask(app, method, path, headers)
        if (method, path) == ("GET", LIVE_PATH):
            assert answer.status == 200
        else:
            assert answer.status == 401, (method, path, headers)
            assert answer.header("www-authenticate") == "Bearer"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_every_path_needs_a_key(method: str) -> None:
    app = keyed()
    for path in {path for _, path in routes(app)} | {"/", "/nowhere", "/docs", "/redoc", "/openapi.json", "*", ""}:
        expected = 200 if (method, path) == ("GET", LIVE_PATH) else 401
        assert ask(app, method, path).status == expected, path


@pytest.mark.parametrize(
    "path",
    [
        *(
            "//v1/models",
            "/v1/../v1/models",
            "/V1/models",
            "/v1/models/",
            "/v1//models",
            "/v1/models\n",
            "/v1/models%20",
        ),
        *(
            "/HEALTH/live",
            "//health/live",
            "/health/live/",
            "/health/live\n",
            "/health/./live",
            "/health/live?",
            "health/live",
        ),
        *("/health/live/../../v1/models", "/health/live;/v1/models", "/health/live\x00", "/health", "/health/ready"),
        *("/metrics", "/version", "/admin/state", "/admin/state\n", "/admin//state"),
    ],
)
def test_no_spelling_of_a_path_leads_past_the_key(path: str) -> None:
    assert ask(keyed(), "GET", path).status == 401


def test_no_mount_leads_past_the_key() -> None:
    app = keyed(open_paths=("/metrics",))
    assert ask(app, "GET", "/app/health/live", root_path="/app").status == 200
    assert ask(app, "GET", "/app/metrics", root_path="/app").status == 200
    assert ask(app, "GET", "/app/v1/models", root_path="/app").status == 401
    assert ask(app, "GET", "/v1/models", root_path="/v1").status == 401
    assert ask(app, "GET", "/app/admin/state", [bearer(KEY)], root_path="/app").status == 403
    assert ask(app, "GET", "/app/admin/state", [bearer(ADMIN_KEY)], root_path="/app").status == 200
    assert ask(app, "GET", "/appmetrics", root_path="/app").status == 401


@pytest.mark.parametrize("header", [bearer(KEY), bearer(OTHER_KEY), bearer(KEY, "bearer"), bearer(KEY, "BEARER  ")])
def test_each_of_the_keys_opens_in_any_case_of_the_scheme(header: Header) -> None:
    assert ask(keyed(), "GET", "/v1/models", [header]).status == 200


def test_only_the_listed_gets_are_open_besides() -> None:
    app = keyed(open_paths=("/metrics", "/health/ready"))
    for path, status in (("/metrics", 200), ("/health/ready", 200), ("/health", 401), ("/metrics/", 401)):
        assert ask(app, "GET", path).status == status
    assert ask(app, "POST", "/metrics").status == 401
    assert ask(app, "HEAD", "/metrics").status == 401


@pytest.mark.parametrize(
    ("api_keys", "admin_keys", "headers", "status"),
    [
        ((), (), [], 200),
        ((), (), [bearer(WRONG_KEY)], 200),
        ((KEY,), (), [], 401),
        ((KEY,), (), [bearer(KEY)], 403),
        ((KEY,), (ADMIN_KEY,), [bearer(KEY)], 403),
        ((KEY,), (ADMIN_KEY,), [bearer(WRONG_KEY)], 401),
        ((KEY,), (ADMIN_KEY,), [bearer(ADMIN_KEY)], 200),
        ((), (ADMIN_KEY,), [], 401),
        ((), (ADMIN_KEY,), [bearer(WRONG_KEY)], 401),
        ((), (ADMIN_KEY,), [bearer(ADMIN_KEY)], 200),
    ],
)
def test_admin_routes_ask_for_an_admin_key(
    api_keys: tuple[str, ...], admin_keys: tuple[str, ...], headers: list[Header], status: int
) -> None:
    app = app_of(HttpSettings(api_keys=api_keys, admin_keys=admin_keys))
    admin = {path for _, path in routes(app) if path.startswith("/admin")}
    assert admin == {"/admin/state"}
    for path in admin:
        assert ask(app, "GET", path, headers).status == status


def test_an_admin_key_opens_the_rest_too_and_without_api_keys_all_but_admin_is_open() -> None:
    assert ask(keyed(), "GET", "/v1/models", [bearer(ADMIN_KEY)]).status == 200
    app = app_of(HttpSettings(admin_keys=(ADMIN_KEY,)))
    assert ask(app, "GET", "/v1/models").status == 200
    assert ask(app, "GET", "/v1/models", [bearer("sk-anything")]).status == 200


def test_keys_are_neither_logged_nor_answered_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = keyed()
    for headers in (*NO_KEY, [bearer(KEY)], [bearer(ADMIN_KEY)]):
        answer = ask(app, "GET", "/v1/models", headers, query_string=f"key={KEY}".encode())
        assert not any(key.encode() in answer.body for key in (KEY, ADMIN_KEY, WRONG_KEY))
    assert not any(key in caplog.text for key in (KEY, ADMIN_KEY, WRONG_KEY))
    assert "key-of" not in repr(HttpSettings(api_keys=(KEY,), admin_keys=(ADMIN_KEY,)))


def test_nothing_is_read_of_a_body_before_the_key_is_right() -> None:
    import asyncio

    from tests.serve.http.asgi import Client, asked

    async def go() -> None:
        client = Client([b"{}"] * 3)
        assert (await asked(keyed(), "POST", "/v1/completions", client=client)).status == 401
        assert client.num_read == 0

    asyncio.run(go())


def test_a_web_page_of_a_listed_origin_may_ask_before_it_has_a_key() -> None:
    app = keyed(cors_origins=("https://page.example",))
    question = [("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")]
    allowed = ask(app, "OPTIONS", "/v1/completions", [("origin", "https://page.example"), *question])
    assert (allowed.status, allowed.header("access-control-allow-origin")) == (200, "https://page.example")
    refused = ask(app, "OPTIONS", "/v1/completions", [("origin", "https://other.example"), *question])
    assert (refused.status, refused.header("access-control-allow-origin")) == (400, None)
    assert ask(app, "GET", "/v1/models", [("origin", "https://page.example")]).status == 401
    got = ask(app, "GET", "/v1/models", [("origin", "https://page.example"), bearer(KEY)])
    assert got.header("access-control-allow-origin") == "https://page.example"


def test_without_listed_origins_no_web_page_may_ask() -> None:
    question = [("origin", "https://page.example"), ("access-control-request-method", "POST")]
    answer = ask(app_of(), "OPTIONS", "/v1/completions", question)
    assert answer.status == 405
    assert answer.header("access-control-allow-origin") is None


@pytest.mark.parametrize(
    "wrong", [{"api_keys": ("",)}, {"open_paths": ("metrics",)}, {"open_paths": ("/admin/state",)}]
)
def test_settings_that_would_open_too_much_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HttpSettings(**wrong)


def test_a_key_may_be_given_as_its_digest_which_itself_opens_nothing() -> None:
    digest = by_digest(KEY)
    app = app_of(HttpSettings(api_keys=(digest,), admin_keys=(by_digest(ADMIN_KEY),)))
    assert ask(app, "GET", "/version", [bearer(KEY)]).status == 200
    assert ask(app, "GET", "/admin/state", [bearer(ADMIN_KEY)]).status == 200
    assert ask(app, "GET", "/version", [bearer(digest)]).status == 401
    assert by_digest(digest) == digest
    assert KEY not in digest
