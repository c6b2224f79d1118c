# SPDX-License-Identifier: MIT OR Apache-2.0
"""One life of a simulated group: what its processes share while it is under way, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metrale_ray.baton import Baton, Process, Task
from metrale_ray.config import EngineConfig
from metrale_ray.head import Head
from metrale_ray.protocol.journal.records import Record
from metrale_ray.worker import HeadAddress
from tests.simulation.baton_loop import BatonLoop
from tests.simulation.faults import Fault
from tests.simulation.meeting import Meeting
from tests.simulation.network import Network


@dataclass(frozen=True)
class Life:
    """How one life of the group ended. Each process's end is what it gave, or the exception that it raised.

    `head` None: it was told to stop and did. `violations`: what must not be, whatever goes wrong.
    """

    number: int
    epoch: int
    head: BaseException | None
    workers: Mapping[int, BaseException | None]
    fronts: Mapping[int, Any]
    fired: Sequence[Fault]
    violations: Sequence[str]
    turns: int
    took_s: float
    head_object: Head | None
    incidents: Sequence[Sequence[Record]]


@dataclass
class LifeUnderway:
    """What the processes of one life share."""

    number: int
    epoch: int
    config: EngineConfig
    baton: Baton
    network: Network
    meeting: Meeting
    began_s: float
    began_turn: int
    head_key: str = ""
    addresses: Mapping[int, HeadAddress] = field(default_factory=dict)
    head: Head | None = None
    head_task: Task | None = None
    loop: BatonLoop | None = None
    incidents: list[Sequence[Record]] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)
    stopped_for_good: set[Process] = field(default_factory=set)

    def never_goes_on(self, process: Process | None) -> bool:
        """Whether it is stopped, and nobody will resume it."""
        return process in self.stopped_for_good and process is not None and process.is_stopped

    @property
    def has_head_ended(self) -> bool:
        """Whether the head's process has left."""
        return self.head_task is not None and self.head_task.has_ended

    @property
    def is_ready(self) -> bool:
        """Whether the head says so."""
        return self.head is not None and self.head.state.phase == "ready" and not self.has_head_ended
