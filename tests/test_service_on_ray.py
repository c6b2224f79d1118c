# SPDX-License-Identifier: MIT OR Apache-2.0
"""The service on Ray Serve, as `serve run` starts it by a configuration: it answers, and comes back from its losses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from metrale_ray.errors import ConfigError
from metrale_ray.serve.deployment import build_app
from metrale_ray.serve.http.auth import by_digest
from tests.processes import Run, check_nothing_left, until
from tests.service_rig import write_model

START_S = 200.0
SOON_S = 60.0
ADMIN_KEY = "a-key-of-admins"


class ServeRun(Run):
    """One run of `serve run` with a Ray of its own."""

    def __init__(self, folder: Path, args: dict[str, Any]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {
                    "name": "llm",
                    "route_prefix": "/",
                    "import_path": "metrale_ray.serve.deployment:build_app",
                    "args": args,
                }
            ],
        }
        file = folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        super().__init__(
            [str(Path(sys.executable).with_name("serve")), "run", str(file)],
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN="t" * 32,
            METRALE_ADMIN_KEY=ADMIN_KEY,
            OMP_NUM_THREADS="1",
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SOON_S, trust_env=False)

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health/ready").status_code == 200
        return False

    def wait_ready(self) -> None:
        assert until(lambda: self.is_ready() or self.process.poll() is not None, START_S), self.errors()
        assert self.process.poll() is None, self.errors()

    def count(self, first: int) -> None:
        """A right answer: the model counts up."""
        body = {"model": "succ", "prompt": [first], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == list(range(first + 1, first + 6))

    def ranks(self) -> list[dict[str, Any]]:
        state = self.client.get("/admin/state", headers={"Authorization": f"Bearer {ADMIN_KEY}"}).json()
        found: list[dict[str, Any]] = state["models"][0]["engine"]["ranks"]
        return found

    def processes(self, name: str) -> list[int]:
        return [pid for pid, command in self.left().items() if name in command]

    def stream(self, max_tokens: int) -> list[str]:
        """The events of one streamed completion, as far as they came."""
        events: list[str] = []
        body = {"model": "succ", "prompt": [3], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        url = f"{self.client.base_url}/v1/completions"
        options: dict[str, Any] = {"json": body, "timeout": SOON_S, "trust_env": False}
        with contextlib.suppress(httpx.TransportError), httpx.stream("POST", url, **options) as answer:
            events += [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        return events


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServeRun]:
    args = {"model": str(write_model(tmp_path / "succ")), "ep_size": 2, "served_model_name": "succ", "num_fronts": 2}
    run = ServeRun(tmp_path, {**args, "dtype": "float32", "max_model_len": 4000})
    try:
        run.wait_ready()
        yield run
    finally:
        run.client.close()
        if run.process.stdout is not None and not run.process.stdout.closed:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.wait()


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.timeout(500)
def test_it_answers_comes_back_from_a_lost_rank_and_a_lost_front_and_leaves_nothing(service: ServeRun) -> None:
    service.count(7)
    assert service.stream(30)[-1] == "[DONE]"
    # A lost rank: no answer for a while, then another engine.
    lost = service.ranks()[1]["pid"]
    os.kill(lost, signal.SIGKILL)
    assert until(lambda: not service.is_ready(), SOON_S)
    service.wait_ready()
    assert until(lambda: lost not in [rank["pid"] for rank in service.ranks()], SOON_S)
    service.count(20)
    # A lost front: streams of the other one go on.
    assert until(lambda: len(service.processes("ServeReplica:llm:Front")) == 2, SOON_S)
    results: list[list[str]] = []
    streams = [threading.Thread(target=lambda: results.append(service.stream(600)), daemon=True) for _ in range(6)]
    for stream in streams:
        stream.start()
    os.kill(service.processes("ServeReplica:llm:Front")[0], signal.SIGKILL)
    for stream in streams:
        stream.join(SOON_S)
    assert any(events and events[-1] == "[DONE]" for events in results)
    assert until(lambda: len(service.processes("ServeReplica:llm:Front")) == 2, SOON_S)
    service.count(30)
    # Its end.
    service.process.send_signal(signal.SIGINT)
    done = service.wait()
    assert "Traceback" not in done.stdout
    check_nothing_left(service)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "no model given"),
        ({"model": "m", "prot": 1}, "unknown option 'prot'; did you mean 'port'"),
        ({"model": "m", "port": 1}, "port is Ray Serve's own here"),
        ({"model": "m", "num_fronts": 0}, "num_fronts is 0"),
        ({"models": []}, "models must be a list of mappings"),
        ({"models": [{"model": "m"}], "model": "m"}, "model stands beside models"),
        ({"models": [{"model": "m", "strict": True}]}, "strict is for all models"),
        ({"models": [{"model": "m", "ep_size": 0}]}, "ep_size is 0"),
        ({"model": "m", "max_n": 1000}, "max_n is 1000; the engine allows at most 64"),
    ],
)
def test_arguments_that_are_wrong_are_refused_before_anything_is_deployed(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_app(args)


def test_arguments_of_a_command_line_are_texts_and_become_numbers() -> None:
    app = build_app({"model": "5", "ep_size": "2", "strict": "true", "drain_timeout_s": "2.5", "num_fronts": "2"})
    models, service, _ = app._bound_deployment.init_args
    assert models == [{"model": "5", "ep_size": 2}]
    assert service == {"strict": True, "drain_timeout_s": 2.5}
    assert app._bound_deployment.num_replicas == 2
    with pytest.raises(ConfigError, match="ep_size is 'two'"):
        build_app({"model": "m", "ep_size": "two"})


def test_ray_serve_is_given_keys_as_digests_alone_and_engines_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_API_KEY", "key-of-the-environment")
    front = build_app({"model": "m", "api_key": "key-of-clients", "admin_key": "key-of-admins", "max_n": 2})
    _, service, (engine,) = front._bound_deployment.init_args
    digests = [by_digest(key) for key in ("key-of-clients", "key-of-the-environment")]
    assert service == {"max_n": 2, "api_key": digests, "admin_key": [by_digest("key-of-admins")]}
    assert engine._bound_deployment.init_args == ({"model": "m"}, {})


def test_an_app_has_one_engine_for_each_model_and_as_many_fronts_as_asked() -> None:
    app = build_app({"models": [{"model": "a", "served_model_name": "x"}, {"model": "b"}], "num_fronts": 3})
    front = app._bound_deployment
    assert front.name == "Front"
    assert front.num_replicas == 3
    engines = front.init_args[2]
    assert [engine._bound_deployment.name for engine in engines] == ["Engine-0", "Engine-1"]
    assert build_app({"model": "a"})._bound_deployment.init_args[2][0]._bound_deployment.name == "Engine"
