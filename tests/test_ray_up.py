# SPDX-License-Identifier: MIT OR Apache-2.0
"""A cluster by `ray up` on three machines of one's own, by the configuration that `metrale-ray cluster yaml` writes:
what does not come is named, jobs and the service run on it, a second `ray up` changes nothing, `ray down` leaves none.

The tests follow one another as a day with a cluster does. They run with `--clusters`, as root, where there is sshd;
without it they are skipped, unless the environment says HOSTS_TESTS=required.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts_rig import until
from tests.namespaces import made
from tests.service_rig import write_model
from tests.ssh_hosts import SshHost, SshHosts, end

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[1]
VENV = Path(sys.prefix)
UP_S = 120.0
WAIT_S = 25
DOWN_S = 90.0
LEFT_S = 60.0
JOB_S = 150.0
DEPLOY_S = 150.0
DASHBOARD = "http://127.0.0.1:8265"
ADMIN_KEY = "a-key-of-admins"
STATE = f"curl -s -H 'Authorization: Bearer {ADMIN_KEY}' http://127.0.0.1:8000/admin/state"
TOKEN = re.compile(r"[0-9a-f]{64}")


class RayUp:
    """The cluster of one configuration, as the launching host sees it."""

    def __init__(self, site: SshHosts, folder: Path) -> None:
        self.site = site
        self.file = folder / "cluster.yaml"
        self.model = site.home / "model"
        self.rays_before: list[set[int]] = []  # of each host, before the last one joined
        self._folder = folder

    def write(self, num_hosts: int | None = None) -> str:
        """Write the configuration of so many hosts, all if not given, and give what the command said."""
        head, *workers = [host.address for host in self.site.hosts[:num_hosts]]
        flags = ["--head-ip", head, "--worker-ips", ",".join(workers), "--ssh-user", "root", "--ssh-key"]
        flags += [str(self.site.key), "--venv", str(VENV), "--package", "none", "--model", str(self.model)]
        code, said = self.site.run("metrale-ray", "cluster", "yaml", "-o", str(self.file), "--yes", "--force", *flags)
        assert code == 0, said
        return said

    def up(self) -> str:
        """`ray up`, as a person runs it, and what it wrote."""
        code, said = self.site.run("ray", "up", "--yes", str(self.file), timeout_s=UP_S)
        assert code == 0, said
        return said

    def on_head(self, command: str, timeout_s: float = 90.0) -> tuple[int, str]:
        """A command in a shell on the head, by `ray exec`, which gives 1 for any failure: code and output."""
        code, said = self.site.run("ray", "exec", str(self.file), f"{command}; echo ended with $?", timeout_s=timeout_s)
        ended = re.findall(r"ended with (\d+)", said)
        assert code == 0, said
        assert ended, said
        return int(ended[-1]), said

    def down(self) -> str:
        """`ray down`, until nothing of Ray's is on any host."""
        code, said = self.site.run("ray", "down", "--yes", str(self.file), timeout_s=DOWN_S)
        assert code == 0, said
        assert until(lambda: not any(host.processes() for host in self.site.hosts), LEFT_S), self.left()
        assert [host.ports() for host in self.site.hosts] == [set()] * len(self.site.hosts)
        return said

    def left(self) -> dict[str, dict[int, str]]:
        """What runs on each host."""
        return {host.name: host.processes() for host in self.site.hosts}

    @contextlib.contextmanager
    def dashboard(self) -> Iterator[None]:
        """The head's dashboard at this host's port 8265, by `ray dashboard`."""
        log = self._folder / "dashboard.log"
        tunnel = self.site.start("ray", "dashboard", str(self.file), log=log)
        try:
            assert until(lambda: 8265 in self.site.launcher.ports() or tunnel.poll() is not None, UP_S)
            assert tunnel.poll() is None, log.read_text()
            yield
        finally:
            end(tunnel)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with made(SshHosts(tmp_path_factory.mktemp("site"), count=3)) as site:
        yield site


@pytest.fixture(scope="module")
def cluster(site: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> RayUp:
    """The configuration, and a checkpoint on each host."""
    made = RayUp(site, tmp_path_factory.mktemp("cluster"))
    said = made.write()
    assert re.search(rf"ray up .*{made.file}", said)  # what comes next
    model = write_model(tmp_path_factory.mktemp("model") / "model")
    for host in site.hosts:
        shutil.copytree(model, host.home / "model")
    code, said = site.run("sh", "-c", "(umask 077; ray get-auth-token --generate > /dev/null)")
    assert code == 0, said
    return made


@pytest.fixture(scope="module")
def running(cluster: RayUp) -> RayUp:
    """The cluster with all its nodes, of which the last one was added to the others."""
    for num_hosts in (2, 3):
        cluster.rays_before = [rays(host) for host in cluster.site.hosts]
        cluster.write(num_hosts)
        cluster.up()
        code, said = cluster.on_head("metrale-ray cluster wait --timeout-s 120", timeout_s=150)
        assert code == 0, said
    return cluster


def token_of(site: SshHosts) -> str:
    return (site.launcher.home / ".ray/auth_token").read_text().strip()


def rays(host: SshHost) -> set[int]:
    """Ray's own processes on a host, which a second `ray up` must leave alone."""
    kinds = ("gcs_server", "/raylet ", "monitor.py", "dashboard.py")
    return {pid for pid, command in host.processes().items() if any(kind in command for kind in kinds)}


def test_nodes_that_do_not_come_are_named_with_the_reason_and_go_with_ray_down(cluster: RayUp) -> None:
    _, without_model, without_network = cluster.site.hosts
    hidden = (without_model.home / "model").rename(without_model.home / "hidden")
    without_network.cut()
    try:
        cluster.up()
        started = time.monotonic()
        code, said = cluster.on_head(f"metrale-ray cluster wait --timeout-s {WAIT_S}")
        assert time.monotonic() - started < WAIT_S + 30  # the rest is the command's own start, twice
        assert code == 3, said
        told = " ".join(line for line in said.splitlines() if not line.startswith("Shared connection"))
        assert re.search(rf"{without_model.address}\b.{{0,200}}no checkpoint at {cluster.model}", told), said
        assert re.search(rf"{without_network.address}\b.{{0,200}}ssh", told, re.IGNORECASE), said
        cluster.down()
    finally:
        without_network.mend()
        hidden.rename(without_model.home / "model")


def test_ray_up_brings_every_node_and_shows_no_token(running: RayUp) -> None:
    site = running.site
    token = token_of(site)
    assert TOKEN.fullmatch(token)
    for host in site.hosts:
        copy = host.home / ".ray/auth_token"
        assert copy.read_text().strip() == token
        assert copy.stat().st_mode & 0o777 == 0o600
        assert not [command for command in host.processes().values() if token in command]
        logs = [path for path in host.ray.glob("session_2*/logs/*") if path.is_file()]
        assert not [path for path in logs if token in path.read_text(errors="replace")]
    code, said = running.on_head("RAY_AUTH_TOKEN=$(printf 0%.0s $(seq 64)) ray status --address 10.77.6.1:6379")
    assert code != 0, said


def test_a_node_that_was_added_has_joined_and_the_others_have_not_been_restarted(running: RayUp) -> None:
    *first, last = running.rays_before
    assert all(first)
    assert last == set()
    assert [rays(host) for host in running.site.hosts[:2]] == first
    assert rays(running.site.hosts[2])


def test_a_second_ray_up_changes_nothing(running: RayUp) -> None:
    before = [rays(host) for host in running.site.hosts]
    assert all(before)
    running.up()
    assert [rays(host) for host in running.site.hosts] == before


def test_the_doctor_finds_the_nodes_fit(running: RayUp) -> None:
    code, said = running.on_head(f"metrale-ray doctor --address auto --model {running.model} --json")
    found = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert sorted(node["name"] for node in found["nodes"]) == [host.address for host in running.site.hosts]
    assert code == 0, found


def test_a_node_with_another_checkpoint_is_named_before_weights_are_loaded(running: RayUp) -> None:
    other = running.site.hosts[2]
    weights = next((other.home / "model").glob("*.safetensors"))
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-4] + b"\0\0\0\1")
        command = f"metrale-ray generate --address auto --model {running.model} --ep-size 3 --num-cpus-per-rank 1"
        code, said = running.on_head(f"{command} --placement STRICT_SPREAD --prompt hello")
        assert code == 3, said
        assert re.search(rf"error: .*the ranks differ: file \S+safetensors: .* on {other.address} has ", said), said
        assert "loading weights" not in said
    finally:
        weights.write_bytes(whole)


def test_a_job_answers_a_file_over_two_nodes_with_progress(running: RayUp) -> None:
    head = running.site.hosts[0]
    output = running.site.home / "answers.jsonl"
    flags = [
        "--model",
        str(running.model),
        "--ep-size",
        "2",
        "--served-model-name",
        "model",
        "--num-cpus-per-rank",
        "1",
    ]
    flags += ["--placement", "STRICT_SPREAD", "--input", "prompts.jsonl", "--output", str(output)]
    with running.dashboard():
        job = ["ray", "job", "submit", "--address", DASHBOARD, "--working-dir", str(ROOT / "examples"), "--"]
        code, said = running.site.run(*job, "python", "driver.py", *flags, timeout_s=JOB_S)
    assert code == 0, said
    asked = [json.loads(line) for line in (ROOT / "examples/prompts.jsonl").read_text().splitlines()]
    answers = [json.loads(line) for line in (head.home / "answers.jsonl").read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(each["custom_id"] for each in asked)
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert f"0 of {len(asked)} requests" in said  # and so on each 10 s
    assert f"{len(asked)} requests, 0 errors" in said


def test_the_service_streams_over_two_nodes_and_a_ray_up_beside_it_disturbs_nobody(
    running: RayUp, tmp_path: Path
) -> None:
    config = yaml.safe_load((ROOT / "deploy/serve.yaml").read_text())
    (application,) = config["applications"]
    application["args"].update(
        model=str(running.model), placement="STRICT_SPREAD", num_cpus_per_rank=1, dtype="float32", max_model_len=4000
    )
    (running.site.hosts[0].home / "serve.yaml").write_text(yaml.safe_dump(config))
    environment = f"METRALE_ADMIN_KEY={ADMIN_KEY}"
    code, said = running.on_head(f"{environment} serve deploy ~/serve.yaml", timeout_s=DEPLOY_S)
    assert code == 0, said
    smoke = f"sh {ROOT}/deploy/smoke.sh --wait {DEPLOY_S:g} http://127.0.0.1:8000"
    code, said = running.on_head(smoke, timeout_s=DEPLOY_S + 60)
    assert code == 0, said
    state = stream_beside(running, STATE)
    before = ranks(state)
    assert len({rank["address"] for rank in before}) == 2
    (front,) = application["deployments"]
    front["num_replicas"] = 2
    (running.site.hosts[0].home / "serve.yaml").write_text(yaml.safe_dump(config))
    code, said = running.on_head(f"{environment} serve deploy ~/serve.yaml", timeout_s=DEPLOY_S)
    assert code == 0, said
    many = "serve status | grep -A9 Front: | grep -q 'RUNNING: 2'"
    code, said = running.on_head(f"for _ in $(seq 60); do {many} && break; sleep 1; done; {many}", timeout_s=DEPLOY_S)
    assert code == 0, said
    assert ranks(over_ssh(running.site, STATE)[1]) == before
    code, said = running.on_head("serve shutdown --yes")
    assert code == 0, said


def ranks(state: str) -> list[dict[str, Any]]:
    """The engine's ranks, with their processes and nodes, as the service tells of them."""
    (model,) = json.loads(state[state.index("{") : state.rindex("}") + 1])["models"]
    return [{name: rank[name] for name in ("rank", "pid", "address")} for rank in model["engine"]["ranks"]]


def stream_beside(running: RayUp, command: str) -> str:
    """Run `ray up` while a chat streams, which must come to its end; then a command on the head."""
    body: dict[str, Any] = {"model": "model", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "hello"}]
    (running.site.hosts[0].home / "body.json").write_text(json.dumps(body))
    chat = "curl -sN -H 'Content-Type: application/json' -d @$HOME/body.json http://127.0.0.1:8000/v1/chat/completions"
    events = running.site.hosts[0].home / "events"
    results: list[tuple[int, str]] = []
    stream = threading.Thread(target=lambda: results.append(over_ssh(running.site, f"{chat} > ~/events")))
    stream.start()
    assert until(lambda: events.exists() and b"content" in events.read_bytes(), UP_S)
    running.up()
    stream.join(UP_S)
    (answer,) = results
    assert answer[0] == 0, answer
    data = [line.removeprefix("data: ") for line in events.read_text().splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert len(data) > 100
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    return over_ssh(running.site, command)[1]


def over_ssh(site: SshHosts, command: str) -> tuple[int, str]:
    """A command on the first host, beside what else is done."""
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
    return site.run("ssh", *options, "-i", str(site.key), f"root@{site.hosts[0].address}", command, log="ssh.log")


def test_ray_down_leaves_nothing(running: RayUp) -> None:
    running.down()
    for host in running.site.hosts:
        assert not list(host.ray.glob("session_2*/sockets/raylet")) or not host.processes()
    assert running.site.launcher.processes() == {}
