# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is installed on the nodes of an engine: looked at and judged before an actor is there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
import sys
from typing import Any

import pytest
from ray import cloudpickle

from metrale_ray.cluster import node_versions
from metrale_ray.cluster.node_versions import check, look
from metrale_ray.errors import HandshakeError, StartError
from metrale_ray.model import identity

HERE: dict[str, str | None] = {
    "python": "3.11.4",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "metrale_ray": "0.1.0",
    "build": "aa",
    "executable": "/venv/bin/python",
}
FIRST, SECOND = "rank 0 on 10.0.0.1", "rank 1 on 10.0.0.2"


def refusal(driver: dict[str, str | None], **others: Any) -> str:
    with pytest.raises(HandshakeError) as raised:
        check(driver, {FIRST: HERE, SECOND: {**HERE, **others}})
    return raised.value.message


def test_nodes_with_the_same_versions_are_taken() -> None:
    check(HERE, {FIRST: HERE, SECOND: {**HERE, "executable": "/other/python"}})
    check(HERE, {FIRST: HERE})


@pytest.mark.parametrize(
    ("name", "there"),
    [("python", "3.11.9"), ("ray", "2.59.1"), ("torch", "2.12.1"), ("metrale_ray", "0.2.0"), ("build", "bb")],
)
def test_each_version_that_differs_names_both_nodes_and_both_values(name: str, there: str) -> None:
    assert refusal(HERE, **{name: there}).splitlines() == [
        "the nodes differ:",
        f"{name}: {FIRST} has '{HERE[name]}', {SECOND} has '{there}'",
        "install the same versions on every node",
    ]


def test_all_that_differs_is_told_at_once() -> None:
    lines = refusal(HERE, torch=None, ray="2.59.1").splitlines()
    assert lines[1:-1] == [
        f"ray: {FIRST} has '2.60.0', {SECOND} has '2.59.1'",
        f"torch: {FIRST} has '2.13.0', {SECOND} has none",
    ]


@pytest.mark.parametrize("name", ["metrale_ray", "build"])
def test_a_driver_with_another_package_is_refused(name: str) -> None:
    lines = refusal({**HERE, name: "9"}).splitlines()
    assert lines[1:-1] == [f"{name}: this process has '9', {FIRST} has '{HERE[name]}'"]


@pytest.mark.parametrize("name", ["torch", "python", "ray"])
def test_a_driver_may_differ_in_what_it_does_not_share(name: str) -> None:
    check({**HERE, name: "9"}, {FIRST: HERE, SECOND: HERE})


def test_every_node_without_the_package_is_named_with_the_command_that_installs_it() -> None:
    absent = {**HERE, "metrale_ray": None, "build": None}
    with pytest.raises(StartError) as raised:
        check(HERE, {FIRST: HERE, SECOND: absent, "rank 2 on 10.0.0.3": absent})
    told = "metrale_ray is not installed there; install it: /venv/bin/python -m pip install metrale-ray==0.1.0"
    assert raised.value.message == f"{SECOND}: {told}\nrank 2 on 10.0.0.3: {told}"


def test_a_look_tells_what_this_process_has() -> None:
    assert look() == {
        **identity.versions(),
        "torch": importlib.metadata.version("torch"),
        "metrale_ray": importlib.metadata.version("metrale-ray"),
        "build": identity.build(),
        "executable": sys.executable,
    }


def test_the_look_travels_to_a_node_that_has_nothing_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with node_versions._by_value(node_versions, identity):
        code = cloudpickle.dumps(look)
    by_name = cloudpickle.dumps(check)
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "metrale_ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "metrale_ray"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(ImportError):
        pickle.loads(by_name)  # as everything else of this package
    found = pickle.loads(code)()
    assert (found["metrale_ray"], found["build"]) == (None, None)
    assert found["ray"] == version("ray")


def test_functions_travel_by_name_again_afterwards() -> None:
    with node_versions._by_value(node_versions, identity):
        by_value = cloudpickle.dumps(look)
    assert len(cloudpickle.dumps(look)) < len(by_value)
