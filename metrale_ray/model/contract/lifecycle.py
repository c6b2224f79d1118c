# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part Lifecycle: weights and cache, and the state of each sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.protocol.commands import Slot


class Lifecycle(ABC):
    """From load to teardown."""

    @abstractmethod
    def load(self, num_blocks: int, on_progress: Callable[[int, int], None]) -> None:
        """Read this rank's shard and reserve the KV cache. `on_progress(done_bytes, total_bytes)` is called often.

        Raises CheckpointError.
        """

    @property
    @abstractmethod
    def num_total_blocks(self) -> int:
        """The KV cache's capacity in blocks."""

    @abstractmethod
    def alloc_sequence(self, slot: Slot) -> SequenceState:
        """A fresh, empty sequence in `slot`."""

    @abstractmethod
    def free_sequence(self, seq: SequenceState) -> None:
        """Release everything of `seq`, exactly once."""

    @abstractmethod
    def teardown(self) -> None:
        """Release the weights and the cache."""
