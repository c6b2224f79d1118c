# SPDX-License-Identifier: MIT OR Apache-2.0
"""`on_nodes`: one function asked on several nodes, in tasks that hold none of their resources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def on_nodes(
    function: Callable[[], object], node_ids: Iterable[str], runtime_env: Mapping[str, Any] | None
) -> dict[str, Any]:
    """By node, the reference of what `function` gives there. `node_ids` are Ray's."""
    task = ray.remote(function)
    return {
        node_id: task.options(
            num_cpus=0,
            max_retries=0,
            runtime_env=runtime_env,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote()
        for node_id in node_ids
    }
