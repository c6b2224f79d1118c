# SPDX-License-Identifier: MIT OR Apache-2.0
"""The names that an engine's actors have on a Ray: `ENGINE/rank-N`, in a namespace of ours.

An engine's name is taken as long as a rank of it runs.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util import list_named_actors

from metrale_ray.errors import StartError, UserError

NAMESPACE = "metrale_ray"


def actor_name(engine: str, rank: int) -> str:
    return f"{engine}/rank-{rank}"


def is_taken(actor_name: str) -> bool:
    try:
        ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:  # nobody has it
        return False
    return True


def head_of(engine: str) -> Any:
    """The head's actor of the engine with this name. Raises UserError, which names those that run."""
    try:
        return ray.get_actor(actor_name(engine, 0), namespace=NAMESPACE)
    except ValueError as error:  # nobody has it
        running = ", ".join(map(repr, running_engines()))
        known = f"those that run are {running}" if running else "none runs there at all"
        raise UserError(f"no engine named {engine!r} runs on this Ray; {known}. Give the name of one.") from error


def running_engines() -> list[str]:
    """The names of all engines on this Ray, of which the head has begun to start and has not ended."""
    head = actor_name("", 0)
    actors = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removesuffix(head) for name in names if name.endswith(head))


def name_taken(name: str) -> StartError:
    return StartError(
        f"an engine named {name!r} runs on this Ray already; end it, choose another name (--name), or give none"
    )
