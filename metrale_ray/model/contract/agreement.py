# SPDX-License-Identifier: MIT OR Apache-2.0
"""Part Agreement: what a rank shows of its computation and its memory, to be compared with the other ranks.

Everything here is equal on all ranks as long as none is damaged: the weights that all hold, the cache where all hold
the same, and the hidden states and choices of experts of a step. Digests are 8 bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from metrale_ray.model.contract.sequence import SequenceState

MAX_SCRUB_ROWS = 512
"""Cache rows that one scrub reads: some milliseconds, whatever the length of the sequence."""


class Agreement(ABC):
    """Looked at now and then; a step that nobody watches does nothing for it."""

    @abstractmethod
    def watch_step(self, is_watched: bool) -> None:
        """Whether the next step is to keep what `witness_of_step` needs."""

    @abstractmethod
    def witness_of_step(self) -> dict[str, bytes]:
        """Of the last token of each span, in span order: "residual", the hidden state after the last layer and before
        the final norm; "routing", the experts chosen and their weights in all layers that have some.

        Only after a step that was watched and succeeded; empty otherwise.
        """

    @property
    @abstractmethod
    def num_scrub_parts(self) -> int:
        """How many parts to scrub the weights in, so that one takes milliseconds; rank 0's number serves all."""

    @abstractmethod
    def weights_digest(self, part: int, num_parts: int) -> bytes:
        """Of one part of the weights that all ranks hold, as they are now.

        That part of this rank's own weights is read too. Raises MemoryDamaged when either is not what was loaded, where
        sums were taken at the load.
        """

    @abstractmethod
    def kv_digest(self, seq: SequenceState, start: int) -> bytes | None:
        """Of the settled keys and values of a sequence from position `start` on, MAX_SCRUB_ROWS at most, in all
        layers; None where each rank holds heads of its own, of which no other rank knows."""
