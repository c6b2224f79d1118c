# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ranks get of the driver's environment: listed variables, and nothing else. And what Ray makes of it.

A Ray that was started for this engine alone is a child of the driver and has its environment, as any child has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from metrale_ray.control_groups import ROOT

# What of the driver's environment goes to the ranks on other nodes: where libraries find models and interfaces. Nothing
# else does, least of all keys and tokens.
FORWARDED_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
)


def runtime_env(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What a rank gets of the driver's environment; None, which costs nothing, where there is nothing to give."""
    variables = {name: environment[name] for name in FORWARDED_VARIABLES if name in environment}
    return {"env_vars": variables} if variables else None


def given_environment(environment: Mapping[str, str]) -> Mapping[str, str]:
    """This process's environment as whoever started it gave it: in an actor and a task, Ray sets OMP_NUM_THREADS.

    An engine that is started there, as by Ray Serve, computes in processes of its own, and is not meant.
    """
    context = ray.get_runtime_context()
    if context.get_actor_id() is None and context.get_task_id() is None:
        return environment
    return first_environment()


def first_environment(root: Path = ROOT) -> dict[str, str]:
    """What this process began with, as the kernel has it; empty where it does not tell."""
    try:
        entries = (root / "proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (entry.decode("utf-8", "surrogateescape").partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}
