# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is known of a machine and of a cluster, as plain data: collected in one place, judged in another.

Rules. A fact is what was seen, never an opinion. None means that it could not be seen, which is no problem by itself.
Facts travel as plain mappings, so that a node with another version of this package can still answer: what it says more
is dropped, what it leaves out is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One machine, seen by one process on it. Sizes are bytes, `cores` what the process may use of `machine_cores`.

    `versions` are of packages, None where one is not installed. `build` is the digest of this package's source files,
    `instructions` what kernels are chosen by. `addresses` are interfaces with their addresses, `ray_address` is what
    Ray knows the node by, `bind_error` why no port could be bound there. `memory` is what the process can still get,
    its control group's limit counted in. `gpus` are names; `torch_cuda` is the CUDA that torch was built for.
    `native_core` is what the native core was built for and with, and which kernels run; `native_core_missing` says why
    there is none. `checkpoint_digests` are of the checkpoint's files by name, `checkpoint_error` says why it cannot be
    served here, `checkpoint_absent` what a start would fetch first.
    """

    name: str
    host: str | None = None
    node_id: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    import_errors: dict[str, str] = field(default_factory=dict)
    build: str | None = None
    instructions: str | None = None
    has_curve: bool | None = None
    native_core: str | None = None
    native_core_missing: str | None = None
    addresses: dict[str, list[str]] = field(default_factory=dict)
    ray_address: str | None = None
    bind_error: str | None = None
    port_range: list[int] | None = None
    shared_memory: int | None = None
    shared_memory_free: int | None = None
    cores: float | None = None
    machine_cores: int | None = None
    ray_cores: float | None = None
    memory: int | None = None
    memory_limit: int | None = None
    open_files: int | None = None
    open_files_hard: int | None = None
    gpus: list[str] = field(default_factory=list)
    torch_cuda: str | None = None
    ray_gpus: float | None = None
    checkpoint_digests: dict[str, str] = field(default_factory=dict)
    checkpoint_error: str | None = None
    checkpoint_absent: str | None = None

    @staticmethod
    def read(name: str, values: Mapping[str, Any]) -> NodeFacts:
        """The facts that a node sent."""
        known = {f.name for f in dataclasses.fields(NodeFacts)} - {"name"}
        return NodeFacts(name, **{key: value for key, value in values.items() if key in known})


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All that was seen. Without `address` there is one node: this machine.

    `driver` is the process that asked, where it is none of the nodes. `silent` are nodes that did not answer, with the
    reason. `unreachable` are pairs (from, to) of nodes between which no connection could be made, with the reason.
    `cluster_error` says why there was no cluster at the address. `model` is the checkpoint that was asked for.
    """

    nodes: tuple[NodeFacts, ...]
    address: str | None = None
    driver: NodeFacts | None = None
    cluster_error: str | None = None
    silent: dict[str, str] = field(default_factory=dict)
    unreachable: dict[tuple[str, str], str] = field(default_factory=dict)
    num_connections: int = 0
    model: str | None = None
