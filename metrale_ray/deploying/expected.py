# SPDX-License-Identifier: MIT OR Apache-2.0
"""Which nodes a cluster should have: out of the YAML that `ray up` was given, or out of a flag.

Rules. Nodes of one's own have names: the addresses in the YAML. Nodes of a cloud have none before they are there, so
they are a number: the head, and of each kind as many as are always kept (`min_workers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from metrale_ray.errors import UserError

BOOTSTRAP_CONFIG = "~/ray_bootstrap_config.yaml"
"""Where `ray up` leaves the cluster's YAML on the head."""


@dataclass(frozen=True, slots=True)
class ExpectedNodes:
    """`names` of nodes as the user wrote them, empty where they are not known; `num_nodes` with the head.

    `cluster_name`: under which the autoscaler keeps its notes; None when only a flag was given.
    """

    names: tuple[str, ...]
    num_nodes: int
    cluster_name: str | None = None


def from_file(path: str) -> ExpectedNodes:
    """The nodes of the cluster YAML at `path`. Raises UserError."""
    try:
        config = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a home, or too many brackets
        raise UserError(f"--file is {path!r}, which cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--file is {path!r}, which is no YAML: {' '.join(str(error).split())}") from error
    try:
        return _from_config(config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        advice = "give the YAML that `ray up` was given, or --nodes"
        raise UserError(f"--file is {path!r}, which is no cluster YAML of Ray's: {advice}") from error


def from_flag(text: str) -> ExpectedNodes:
    """`3`: so many nodes, or `10.0.0.1,10.0.0.2`: these. Raises UserError."""
    if text.isascii() and text.isdigit() and int(text) > 0:
        return ExpectedNodes((), int(text))
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(names) or text.lstrip("+-").isdigit():
        raise UserError(f"--nodes is {text!r}; give their number, such as 3, or addresses with commas between them")
    return ExpectedNodes(names, len(names))


def _from_config(config: Mapping[str, Any]) -> ExpectedNodes:
    provider, name = config["provider"], str(config["cluster_name"])
    if "worker_ips" in provider:
        if not isinstance(provider["worker_ips"], list):
            raise TypeError(provider["worker_ips"])
        names = (provider["head_ip"], *provider["worker_ips"])
        if not all(isinstance(each, str) and each for each in names):
            raise TypeError(names)
        return ExpectedNodes(tuple(dict.fromkeys(names)), len(set(names)), name)
    head, kinds = config["head_node_type"], config["available_node_types"]
    least = {kind: int(settings.get("min_workers", 0)) for kind, settings in kinds.items()}
    if head not in least or min(least.values()) < 0:
        raise ValueError(least)
    return ExpectedNodes((), 1 + sum(least.values()), name)
