# SPDX-License-Identifier: MIT OR Apache-2.0
"""The names that an engine's actors have on a Ray: `ENGINE/rank-N`, in a namespace of ours.

An engine's name is taken as long as a rank of it runs.
"""

from __future__ import annotations

import ray

from metrale_ray.errors import StartError

NAMESPACE = "metrale_ray"


def actor_name(engine: str, rank: int) -> str:
    return f"{engine}/rank-{rank}"


def is_taken(actor_name: str) -> bool:
    try:
        ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:  # nobody has it
        return False
    return True


def name_taken(name: str) -> StartError:
    return StartError(
        f"an engine named {name!r} runs on this Ray already; end it, choose another name (--name), or give none"
    )
