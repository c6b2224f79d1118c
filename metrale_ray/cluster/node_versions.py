# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is installed on the nodes that ranks are placed on, looked at before an actor is there.

Rules. An actor is code of this package: where that is missing, or is another version, the actor cannot start, or cannot
read what it is given, and Ray's error tells neither which node nor which version. So a small task goes first, whose
code travels with it and needs Python alone. Nodes must agree in everything; the driver must have the same package.

What it leaves out: what only a rank can tell (kernels, threads, the checkpoint), which the handshake compares.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ray.cloudpickle import register_pickle_by_value, unregister_pickle_by_value

from metrale_ray.cluster.node_tasks import on_nodes
from metrale_ray.errors import HandshakeError, StartError
from metrale_ray.model import identity
from metrale_ray.model.identity import source_digest

Versions = Mapping[str, str | None]
DRIVER = "this process"
OF_NODES = ("python", "ray", "torch", "metrale_ray", "build")
OF_DRIVER = ("metrale_ray", "build")  # Ray itself compares the others, but torch, which computes nothing there


def look() -> dict[str, str | None]:
    """Versions by name, None for what is not there; `build` is the digest of this package's files.

    `executable` is the Python that was asked. Runs on nodes that may lack this package.
    """
    found: dict[str, str | None] = {"python": platform.python_version(), "executable": sys.executable}
    for name in ("ray", "torch", "metrale_ray"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    package = importlib.util.find_spec("metrale_ray")
    folders = (package.submodule_search_locations if package is not None else None) or []
    found["build"] = next((source_digest(Path(folder)) for folder in folders), None)
    return found


def ask(node_ids: Mapping[str, str], runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """By place, the reference of what is installed there. `node_ids` are Ray's, by place."""
    with _by_value(sys.modules[__name__], identity):
        asked = on_nodes(look, set(node_ids.values()), runtime_env)
    return {place: asked[node_id] for place, node_id in node_ids.items()}


def check(driver: Versions, by_place: Mapping[str, Versions]) -> None:
    """Raises StartError where this package is not installed, HandshakeError where nodes differ: all of them, each with
    both places and both values."""
    lacking = [f"{place}: {_lack(found, driver)}" for place, found in by_place.items() if found["build"] is None]
    if lacking:
        raise StartError("\n".join(lacking))
    first, *others = by_place
    lines = _differing(OF_DRIVER, DRIVER, driver, first, by_place[first])
    for place in others:
        lines += _differing(OF_NODES, first, by_place[first], place, by_place[place])
    if lines:
        raise HandshakeError("\n".join(["the nodes differ:", *lines, "install the same versions on every node"]))


def _lack(found: Versions, driver: Versions) -> str:
    version = driver["metrale_ray"]
    package = "metrale-ray" if version is None else f"metrale-ray=={version}"
    return f"metrale_ray is not installed there; install it: {found['executable']} -m pip install {package}"


def _differing(names: tuple[str, ...], here: str, mine: Versions, there: str, others: Versions) -> list[str]:
    return [
        f"{name}: {here} has {_shown(mine[name])}, {there} has {_shown(others[name])}"
        for name in names
        if mine[name] != others[name]
    ]


def _shown(version: str | None) -> str:
    return "none" if version is None else repr(version)


@contextmanager
def _by_value(*modules: ModuleType) -> Iterator[None]:
    """Functions of these modules travel as code, not as names to be imported."""
    for module in modules:
        register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            unregister_pickle_by_value(module)
