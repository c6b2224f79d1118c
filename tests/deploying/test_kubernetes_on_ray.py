# SPDX-License-Identifier: MIT OR Apache-2.0
"""A RayService's Serve configuration on nodes as its pods are: deployed before they come, with a front on each."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from metrale_ray.deploying.kubernetes import KubernetesOptions, render_rayservice
from tests.processes import Run, until
from tests.service_rig import write_model

START_S = 240.0
SOON_S = 60.0
TRIES = 3  # `ray start` gives up after 30 s, which a busy machine may need
STARTED = "Ray runtime started"
POD = "POD_NAME"
KEY = "a-key-of-clients"


class Cluster:
    """A Ray of one head, to which nodes are added: each by `ray start` with a group's own parameters."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        token = folder / "token"
        token.write_text("t" * 32)
        self.entry = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "OMP_NUM_THREADS": "1"}
        self._folder = folder
        self._sessions = tempfile.mkdtemp(prefix="mk-", dir="/tmp")  # sockets have short names
        self._cluster = manifest["spec"]["rayClusterConfig"]
        self._nodes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"

    def start_head(self) -> None:
        port = self.address.rpartition(":")[2]
        temporary = f"--temp-dir={self._sessions}"
        self._start(self._cluster["headGroupSpec"], "--head", f"--port={port}", "--include-dashboard=false", temporary)

    def start_node(self) -> None:
        self._start(self._cluster["workerGroupSpecs"][0], f"--address={self.address}")

    def _start(self, group: dict[str, Any], *more: str) -> None:
        """As KubeRay does it: the parameters become flags on a shell's command line, and what ends is started again."""
        parameters = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        ray = shlex.quote(str(Path(sys.executable).with_name("ray")))
        command = f"exec {ray} start --block --node-ip-address=127.0.0.1 {' '.join([*more, *parameters])}"
        for _ in range(TRIES):
            log = self._folder / f"node-{len(self._nodes)}.log"
            node = self._run(command, log)
            self._nodes.append(node)
            assert until(lambda: STARTED in log.read_text() or node.poll() is not None, START_S), log.read_text()  # noqa: B023
            if node.poll() is None:
                return
            self._kill(node)
        raise AssertionError(log.read_text())

    def _run(self, command: str, log: Path) -> subprocess.Popen[bytes]:
        with log.open("w") as stream:
            shell = ["/bin/bash", "-c", "--", command]
            environment = {**os.environ, **self.entry, POD: self._pod(len(self._nodes))}
            return subprocess.Popen(shell, stdout=stream, stderr=stream, env=environment, start_new_session=True)

    def _pod(self, node: int) -> str:
        return f"{self._sessions}:{node}"

    def pods_of(self, deployment: str) -> list[int]:
        """The number of each replica's node, the head's being 0: its processes have it in their environment."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                name = (folder / "cmdline").read_text() if folder.name.isdigit() else ""
                if f"ServeReplica:llm:{deployment}" not in name:
                    continue
                variables = (folder / "environ").read_text().split("\0")
            except OSError:
                continue  # it ended meanwhile, or is not ours
            found += [node for node in range(len(self._nodes)) if f"{POD}={self._pod(node)}" in variables]
        return found

    def _kill(self, node: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def end(self) -> None:
        for node in reversed(self._nodes):
            self._kill(node)
        shutil.rmtree(self._sessions, ignore_errors=True)


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    """A RayService of two small pods, with this machine's model, keys and port."""
    made, _ = yaml.safe_load_all(render_rayservice(KubernetesOptions(cpus_per_rank=1, shm="256Mi", memory="1Gi")))
    config = yaml.safe_load(made["spec"]["serveConfigV2"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        # All nodes have this machine's address, so that there can be one proxy of the port.
        config |= {"http_options": {"host": "127.0.0.1", "port": free.getsockname()[1]}, "proxy_location": "HeadOnly"}
    (tmp_path / "keys").write_text(KEY)
    args = config["applications"][0]["args"]
    args |= {"model": str(write_model(tmp_path / "succ")), "api_key_file": str(tmp_path / "keys"), "dtype": "float32"}
    made["spec"]["serveConfigV2"] = config
    found: dict[str, Any] = made
    return found


@pytest.fixture
def started(tmp_path: Path, manifest: dict[str, Any]) -> Iterator[tuple[Cluster, Run]]:
    """The head alone, and the configuration deployed on it."""
    cluster = Cluster(tmp_path, manifest)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(manifest["spec"]["serveConfigV2"]))
    with ExitStack() as ending:
        ending.callback(cluster.end)
        cluster.start_head()
        command = [str(Path(sys.executable).with_name("serve")), "run", "--address", cluster.address, str(file)]
        run = Run(command, **cluster.entry)
        ending.callback(run.wait)
        ending.callback(run.process.kill)
        yield cluster, run


@pytest.mark.ray
@pytest.mark.clusters
@pytest.mark.timeout(600)
def test_the_service_waits_for_its_pods_and_has_a_front_on_each(
    started: tuple[Cluster, Run], manifest: dict[str, Any]
) -> None:
    cluster, run = started
    port = manifest["spec"]["serveConfigV2"]["http_options"]["port"]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SOON_S, trust_env=False) as client:
        check(cluster, run, client)


def check(cluster: Cluster, run: Run, client: httpx.Client) -> None:
    def status(path: str) -> int:
        try:
            return client.get(path).status_code
        except httpx.TransportError:
            return 0

    assert until(lambda: status("/-/routes") != 0 or run.process.poll() is not None, START_S), run.errors()
    cluster.start_node()
    assert until(lambda: status("/health/live") == 200 or run.process.poll() is not None, START_S), run.errors()
    assert status("/health/ready") == 503  # the engine waits for the second pod
    assert status("/health/progress") == 200
    cluster.start_node()
    assert until(lambda: status("/health/ready") == 200 or run.process.poll() is not None, START_S), run.errors()
    assert run.process.poll() is None, run.errors()
    assert status("/v1/models") == 401
    body = {"model": "model", "prompt": [7], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = client.post(
        "/v1/completions", json={**body, "return_token_ids": True}, headers={"Authorization": f"Bearer {KEY}"}
    )
    assert answer.json()["choices"][0]["token_ids"] == [8, 9, 10]
    fronts, (engine,) = cluster.pods_of("Front"), cluster.pods_of("Engine")
    assert len(fronts) == len(set(fronts)) == 2
    assert engine in fronts
    assert 0 not in fronts
