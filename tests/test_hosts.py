# SPDX-License-Identifier: MIT OR Apache-2.0
"""An engine over two hosts: two nodes of a Ray that needs a token, each in a network namespace of its own.

Where namespaces cannot be made these tests are skipped, unless the environment says HOSTS_TESTS=required.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metrale_ray import SamplingParams
from tests.fixtures.tiny import write_tiny
from tests.harness import Driver, run_engine
from tests.hosts_rig import RAYS_PORTS, HostsDriver, RayNodes, until
from tests.namespaces import Host, TwoHosts, cut, deafen, hear, made, mend

pytestmark = [pytest.mark.hosts, pytest.mark.clusters, pytest.mark.timeout(240)]

PROMPTS = [[11, *range(20, 60)], [12, 50, 51], [15]]
NUM_TOKENS = 24
MANY_TOKENS = 3000  # more than there can be before the link is cut
SETTINGS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "max_model_len": 4000,
    "num_cpus_per_rank": 1,
}
ON_RAY: dict[str, Any] = {"dtype": "float32", "device": "cpu", "ep_size": 2, "placement": "STRICT_SPREAD"}
START_TIMEOUT_S = 40.0
OUR_PORTS = (20000, 65000)
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE")
NOTICED_S = 8.0  # heartbeats tell of a cut link within 4 s; the rest is for a busy machine
LEFT_S = 15.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with made(TwoHosts(tmp_path_factory.mktemp("hosts"))) as both:
        yield both


@pytest.fixture(scope="module")
def whole(hosts: tuple[Host, Host]) -> Path:
    """A checkpoint that is the same on both hosts."""
    here, there = hosts
    folder = write_tiny(here.folder / "whole", "qwen3_moe", max_position_embeddings=4096)
    shutil.copytree(folder, there.folder / "whole")
    return here.same / "whole"


@pytest.fixture(scope="module")
def nodes(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with RayNodes(hosts, tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture(scope="module")
def driver(nodes: RayNodes, hosts: tuple[Host, Host]) -> Iterator[HostsDriver]:
    """A driver on the first host, for all tests whose end it survives."""
    with nodes.driver(hosts[0], "driver") as running:
        assert running.answer() == {"nodes": [host.address for host in hosts]}
        yield running


def settings(model: Path, **changes: Any) -> dict[str, Any]:
    return {"model": str(model), **SETTINGS, **ON_RAY, "start_timeout_s": START_TIMEOUT_S, **changes}


def tokens_in_one_process(model: Path) -> list[list[int]]:
    def script(driver: Driver) -> None:
        for prompt in PROMPTS:
            driver.submit(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
        driver.run()

    return run_engine(model, script, **SETTINGS).tokens()


def ranks_left(hosts: tuple[Host, Host]) -> dict[int, str]:
    """Processes of an engine, on either host."""
    found = {pid: name for host in hosts for pid, name in host.named("ray::").items()}
    return {pid: name for pid, name in found.items() if not name.startswith(RAYS_OWN)}


def test_two_hosts_give_the_tokens_of_one_process_and_listen_on_their_own_addresses_only(
    hosts: tuple[Host, Host], driver: HostsDriver, whole: Path
) -> None:
    here, there = hosts
    before = [host.listeners() for host in hosts]
    started = driver.order("start", settings=settings(whole), head_on=here.address)
    try:
        assert [rank["address"] for rank in started["ranks"]] == [here.address, there.address]
        answers = driver.order("generate", prompts=PROMPTS, max_tokens=NUM_TOKENS)
        assert answers == {"tokens": tokens_in_one_process(here.folder / whole.name)}
        new = [host.listeners() - known for host, known in zip(hosts, before, strict=True)]
        ours = [{one for one in found if one.port not in RAYS_PORTS} for found in new]
        assert [{one.address for one in found} for found in ours] == [{here.address}, {there.address}]
        # The head: its worker's link, the fronts' door, the collectives' store, and its end of the collectives.
        assert [len(found) for found in ours] == [4, 1]
    finally:
        assert "error" not in driver.order("close")
    assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)


@pytest.mark.parametrize(
    "what", [pytest.param("lacks a file", marks=pytest.mark.nightly), "has other values in a file"]
)
def test_a_node_with_another_checkpoint_is_named_with_the_file_before_anything_loads(
    hosts: tuple[Host, Host], driver: HostsDriver, whole: Path, what: str
) -> None:
    here, there = hosts
    name = what.replace(" ", "-")
    shutil.copytree(here.folder / whole.name, here.folder / name)
    if what == "lacks a file":
        shutil.copytree(here.folder / name, there.folder / name, ignore=lambda *_: ["model.safetensors"])
    else:
        write_tiny(there.folder / name, "qwen3_moe", seed=1, max_position_embeddings=4096)
    answer = driver.order("start", settings=settings(here.same / name), head_on=here.address)
    assert answer["error"] in ("CheckpointError", "HandshakeError"), answer
    assert there.address in answer["message"]
    assert "model.safetensors" in answer["message"]
    assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)


@pytest.mark.nightly
def test_the_doctor_names_the_host_that_has_another_checkpoint_and_the_one_that_cannot_be_reached(
    hosts: tuple[Host, Host], driver: HostsDriver, whole: Path
) -> None:
    here, there = hosts
    shutil.copytree(here.folder / whole.name, here.folder / "examined")
    write_tiny(there.folder / "examined", "qwen3_moe", seed=1, max_position_embeddings=4096)
    deafen(there, here, OUR_PORTS)
    try:
        answer = driver.order("doctor", model=str(here.same / "examined"))
    finally:
        hear(there, OUR_PORTS)
    assert sorted(answer["nodes"]) == [host.address for host in hosts]
    problems = {finding["subject"]: finding for finding in answer["findings"] if finding["level"] == "problem"}
    assert problems.keys() == {"model.safetensors", "connections"}
    assert all(host.address in problems["model.safetensors"]["text"] for host in hosts)
    assert problems["connections"]["node"] in (here.address, there.address)
    assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)


@pytest.mark.nightly
def test_a_node_that_cannot_reach_the_head_is_named_within_the_start_limit(
    hosts: tuple[Host, Host], driver: HostsDriver, whole: Path
) -> None:
    here, there = hosts
    deafen(there, here, OUR_PORTS)
    try:
        answer = driver.order("start", settings=settings(whole), head_on=here.address)
    finally:
        hear(there, OUR_PORTS)
    assert answer["error"] == "StartError", answer
    assert there.address in answer["message"]
    assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)


def test_a_rank_that_does_not_come_within_the_start_limit_is_named_with_its_node(
    hosts: tuple[Host, Host], driver: HostsDriver, whole: Path
) -> None:
    answer = driver.order("start", settings=settings(whole, start_timeout_s=0.01), head_on=hosts[0].address)
    assert answer["error"] == "StartError", answer
    assert answer["message"] == f"rank 0 on {hosts[0].address} did not answer within the start limit of 0.01 s"
    assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)


def test_a_worker_that_is_cut_off_ends_the_call_leaves_by_itself_and_the_same_driver_starts_anew(
    hosts: tuple[Host, Host], driver: HostsDriver, whole: Path
) -> None:
    with cut_off_in_the_middle(driver, hosts, whole, head_on=hosts[0], lost_rank=1):
        assert "error" not in driver.order("close")
        assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)
    assert "error" not in driver.order("start", settings=settings(whole), head_on=hosts[0].address)
    assert "error" not in driver.order("close")


@pytest.mark.nightly
def test_a_head_that_is_cut_off_ends_the_call_and_leaves_by_itself_and_so_does_the_driver(
    hosts: tuple[Host, Host], nodes: RayNodes, whole: Path
) -> None:
    here, there = hosts
    with nodes.driver(here, "cut") as driver:
        driver.answer()
        with cut_off_in_the_middle(driver, hosts, whole, head_on=there, lost_rank=0):
            assert driver.leave(LEFT_S) == 0
            assert until(lambda: not ranks_left(hosts), LEFT_S), ranks_left(hosts)


@contextlib.contextmanager
def cut_off_in_the_middle(
    driver: HostsDriver, hosts: tuple[Host, Host], model: Path, *, head_on: Host, lost_rank: int
) -> Iterator[None]:
    """Cut the second host off in the middle of an answer, see the call's end, and leave the link down meanwhile."""
    there = hosts[1]
    started = driver.order("start", settings=settings(model), head_on=head_on.address)
    assert "ranks" in started, started
    assert started["ranks"][lost_rank]["address"] == there.address
    driver.send("stream", prompt=[11, 2], max_tokens=MANY_TOKENS, tell_after=20)
    assert driver.answer() == {"num_tokens": 20}
    cut(there)
    try:
        end = driver.answer(NOTICED_S)
        assert end["error"] == "EngineDead", end
        assert end["rank"] == lost_rank, end
        assert there.address in end["message"]
        yield
    finally:
        mend(there)
