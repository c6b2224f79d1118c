# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray serve` as a process of its own, with ranks on a Ray: its health, its end in order, and its losses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import Run, check_nothing_left, until
from tests.service_rig import write_model

COMMAND = [sys.executable, "-m", "metrale_ray", "serve"]
START_S = 120.0
SOON_S = 60.0
KEY, ADMIN_KEY = "a-key-of-clients", "a-key-of-admins"

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


class Serve(Run):
    """One run of `metrale-ray serve` on a free port."""

    def __init__(self, model: Path, *argv: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = ["--port", str(port), "--served-model-name", "succ", "--dtype", "float32", "--max-model-len", "4000"]
        super().__init__(
            [*COMMAND, str(model), *flags, "--ep-size", "2", *argv],
            METRALE_API_KEY=KEY,
            METRALE_ADMIN_KEY=ADMIN_KEY,
            OMP_NUM_THREADS="1",
        )
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=SOON_S, trust_env=False
        )

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        if self.process.stdout is not None and not self.process.stdout.closed:  # the test has not waited for its end
            self.process.kill()
            self.wait()

    def status(self, path: str) -> int:
        """0 while nobody listens."""
        with contextlib.suppress(httpx.TransportError):
            return self.client.get(path).status_code
        return 0

    def wait_ready(self) -> None:
        ready = until(lambda: self.status("/health/ready") == 200 or self.process.poll() is not None, START_S)
        assert ready, self.errors()
        assert self.process.poll() is None, self.errors()

    def ranks(self) -> list[dict[str, Any]]:
        """As the admin route tells them."""
        state = self.client.get("/admin/state", headers={"Authorization": f"Bearer {ADMIN_KEY}"})
        assert state.status_code == 200, state.text
        found: list[dict[str, Any]] = state.json()["models"][0]["engine"]["ranks"]
        return found


class Stream(threading.Thread):
    """One streamed completion, read in a thread of its own."""

    def __init__(self, serve: Serve, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{serve.url}/v1/completions"
        self._body = {"model": "succ", "prompt": [3], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self.events: list[str] = []
        self.began = threading.Event()
        self.start()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {**self._body, "stream": True}
        options: dict[str, Any] = {"json": body, "headers": headers, "timeout": SOON_S, "trust_env": False}
        with contextlib.suppress(httpx.TransportError), httpx.stream("POST", self._url, **options) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.began.set()

    def last(self) -> list[str]:
        self.join(SOON_S)
        assert not self.is_alive()
        return self.events[-2:]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("succ"))


@pytest.fixture
def ready(model: Path) -> Iterator[Serve]:
    with Serve(model, "--drain-timeout-s", "4") as serve:
        serve.wait_ready()
        yield serve


def test_it_is_live_before_it_is_ready_and_sigterm_lets_what_runs_finish(model: Path) -> None:
    with Serve(model, "--drain-timeout-s", "4") as serve:
        assert until(lambda: serve.status("/health/live") == 200, START_S), serve.errors()
        assert serve.status("/health/ready") == 503
        assert serve.status("/health/progress") == 200  # its start is no hang
        serve.wait_ready()
        assert [rank["rank"] for rank in serve.ranks()] == [0, 1]
        check_keys_stay_here(serve)
        quick, endless = Stream(serve, 40), Stream(serve, 3900)
        assert quick.began.wait(SOON_S)
        assert endless.began.wait(SOON_S)
        serve.process.send_signal(signal.SIGTERM)
        assert until(lambda: serve.status("/health/ready") == 503, SOON_S)
        refused = serve.client.post("/v1/completions", json={"model": "succ", "prompt": [1], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        assert quick.last()[-1] == "[DONE]"
        assert json.loads(endless.last()[-1])["error"]["code"] == "shutting_down"
        done = serve.wait()
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"serving succ at http://127\.0\.0\.1:\d+/v1\n", done.stdout)
        assert KEY not in done.stderr
        check_nothing_left(serve)


def check_keys_stay_here(serve: Serve) -> None:
    """The keys are in the environment of the process that was given them, and of none that it started."""
    started = {pid: environment for pid in serve.left() if (environment := environment_of(pid))}
    assert {rank["pid"] for rank in serve.ranks()} <= started.keys()
    for key in (KEY, ADMIN_KEY):
        assert [pid for pid, environment in started.items() if key.encode() in environment] == [serve.process.pid]


def environment_of(pid: int) -> bytes:
    """Empty for a process that has just ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


@pytest.mark.nightly
def test_a_second_signal_ends_it_at_once(ready: Serve) -> None:
    endless = Stream(ready, 3900)
    assert endless.began.wait(SOON_S)
    ready.process.send_signal(signal.SIGTERM)
    assert until(lambda: "draining" in ready.errors(), SOON_S)
    ready.process.send_signal(signal.SIGTERM)
    assert ready.wait().returncode == 143
    check_nothing_left(ready)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_stopped_rank_is_not_ready_within_10_s_and_ends_the_service_with_the_reason(ready: Serve, rank: int) -> None:
    pid = ready.ranks()[rank]["pid"]
    stopped_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: ready.status("/health/ready") != 200, 10), "a stopped rank is ready"
    assert time.monotonic() - stopped_s < 10
    done = ready.wait()
    assert done.returncode == 4, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert ("the head" if rank == 0 else "rank 1") in error
    check_nothing_left(ready)


def test_a_rank_that_dies_is_told_to_who_waits_and_ends_the_service(ready: Serve) -> None:
    endless = Stream(ready, 3900)
    assert endless.began.wait(SOON_S)
    os.kill(ready.ranks()[1]["pid"], signal.SIGKILL)
    error = json.loads(endless.last()[-1])["error"]
    assert error["code"] == "engine_dead"
    assert "rank 1" in error["message"]
    done = ready.wait()
    assert done.returncode == 4, done.stderr
    assert "rank 1" in done.stderr
    check_nothing_left(ready)


def test_a_port_that_is_taken_is_told_before_anything_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = Run([*COMMAND, str(model), "--port", port])
        done = run.wait()
    assert done.returncode == 3
    assert f"error: cannot listen on 127.0.0.1:{port}" in done.stderr
    assert not run.left()
