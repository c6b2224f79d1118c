# SPDX-License-Identifier: MIT OR Apache-2.0
"""A process that looks at a Ray from outside: which engines' actors, groups and resources are there. Questions come as
lines on standard input, answers go as lines of JSON to standard output.

    ranks NAME N    the process ids of the engine's N ranks and the head's phase; null while it is not there
    left            what there is of any engine: names of actors, placement groups, resources in use
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.util import list_named_actors, placement_group_table

from metrale_ray.cluster import NAMESPACE

ANSWER_S = 5.0


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
    for line in sys.stdin:
        question, *words = line.split()
        answer = ranks(words[0], int(words[1])) if question == "ranks" else left()
        print(json.dumps(answer), flush=True)


def ranks(name: str, count: int) -> dict[str, Any] | None:
    try:
        actors = [ray.get_actor(f"{name}/rank-{rank}", namespace=NAMESPACE) for rank in range(count)]
        places = ray.get([actor.whoami.remote() for actor in actors], timeout=ANSWER_S)
        state = ray.get(actors[0].state.remote(), timeout=ANSWER_S)
    except (ValueError, ray.exceptions.RayError, TimeoutError):
        return None
    return {"pids": [place["pid"] for place in places], "phase": state.phase}


def left() -> dict[str, Any]:
    total, free = ray.cluster_resources(), ray.available_resources()
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return {"actors": names, "groups": groups, "used": total.get("CPU", 0.0) - free.get("CPU", 0.0)}


if __name__ == "__main__":
    main()
