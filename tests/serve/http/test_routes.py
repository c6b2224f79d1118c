# SPDX-License-Identifier: MIT OR Apache-2.0
"""The routes that ask no engine: health, models, state."""

from __future__ import annotations

import dataclasses

import pytest

import metrale_ray
from metrale_ray.errors import ConfigError
from metrale_ray.serve.backend import Health
from metrale_ray.serve.http.settings import HttpSettings
from tests.serve.http.asgi import WELL, NoEngine, app_of, ask, model_of, plain_app

LOADING = Health(False, "the engine loads", True, "")
STUCK = Health(False, "no command has completed for 91 s", False, "no command has completed for 91 s")


def statuses(backend: NoEngine) -> tuple[int | None, ...]:
    app = app_of(None, model_of(backend))
    paths = ("/health/live", "/health/ready", "/health", "/health/progress", "/v1/models", "/v1/models/m")
    return tuple(ask(app, "GET", path).status for path in paths)


def test_health_follows_the_engine_from_its_load_to_its_end() -> None:
    backend = NoEngine(LOADING)
    assert statuses(backend) == (200, 503, 503, 200, 503, 503)
    backend.now = WELL
    assert statuses(backend) == (200, 200, 200, 200, 200, 200)
    backend.now = STUCK
    assert statuses(backend) == (200, 503, 503, 503, 503, 503)
    backend.now = Health(False, "rank 1 was lost", True, "")
    assert statuses(backend) == (200, 503, 503, 200, 503, 503)


def test_what_is_not_well_says_which_model_and_why_and_when_to_ask_again() -> None:
    app = app_of(
        None, model_of(NoEngine(), "one"), model_of(NoEngine(STUCK), "two"), model_of(NoEngine(LOADING), "three")
    )
    ready, progress = ask(app, "GET", "/health"), ask(app, "GET", "/health/progress")
    assert (ready.code, progress.code) == ("not_ready", "no_progress")
    assert ready.json["error"]["message"] == f"two: {STUCK.ready_reason}; three: the engine loads"
    assert progress.json["error"]["message"] == f"two: {STUCK.moving_reason}"
    assert ready.header("retry-after") == progress.header("retry-after") == "1"


def test_a_service_that_drains_is_not_ready_and_still_live_and_moving() -> None:
    app = app_of()
    app.state.drain.begin()
    assert [ask(app, "GET", f"/health/{name}").status for name in ("live", "ready", "progress")] == [200, 503, 200]
    assert ask(app, "GET", "/health").code == "draining"


def test_models_that_answer_are_listed_under_each_of_their_names() -> None:
    app = app_of(None, model_of(NoEngine(), "org/one", "short"), model_of(NoEngine(LOADING), "two"))
    listed = ask(app, "GET", "/v1/models").json
    assert listed["object"] == "list"
    assert [(entry["id"], entry["root"]) for entry in listed["data"]] == [("org/one", "org/one"), ("short", "org/one")]
    assert (
        ask(app, "GET", "/v1/models/org/one").json
        == listed["data"][0]
        == {
            "id": "org/one",
            "object": "model",
            "created": 5,
            "owned_by": "metrale_ray",
            "root": "org/one",
            "parent": None,
            "max_model_len": 100,
        }
    )
    assert ask(app, "GET", "/v1/models/two").code == "not_ready"
    unknown = ask(app, "GET", "/v1/models/three")
    assert (unknown.status, unknown.code) == (404, "model_not_found")
    assert "org/one, short, two" in unknown.json["error"]["message"]


def test_versions_are_what_the_owner_says_and_the_packages_own_by_default() -> None:
    assert ask(plain_app(), "GET", "/version").json == {"version": metrale_ray.__version__}
    versions = {"version": "9", "torch": "2"}
    assert ask(app_of(HttpSettings(versions=versions)), "GET", "/version").json == versions


def test_the_admin_state_has_the_front_and_every_model_with_its_engines_own_figures() -> None:
    state = ask(app_of(None, model_of(NoEngine(STUCK), "m", "n")), "GET", "/admin/state").json
    assert state == {
        "front": {"draining": False, "running_requests": 0},
        "models": [
            {"names": ["m", "n"], "max_model_len": 100, **dataclasses.asdict(STUCK), "engine": {"phase": "none"}}
        ],
    }


def test_metrics_come_as_prometheus_reads_them() -> None:
    assert str(ask(plain_app(), "GET", "/metrics").header("content-type")).startswith("text/plain; version=")


@pytest.mark.parametrize("names", [[("a",), ("b", "a")], [("a", "a")]])
def test_a_name_of_two_models_is_refused(names: list[tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match="'a'"):
        app_of(None, *(model_of(NoEngine(), *each) for each in names))
