# SPDX-License-Identifier: MIT OR Apache-2.0
"""`WaitingQueue`: the sequences that have no slot, in order: priority first, then arrival.

Rules: one order for all. A sequence that ran before and came back (preempted, or its slot was lost) keeps its
arrival, and so stands in front of every one of its priority that never ran.
"""

from __future__ import annotations

import bisect

from metrale_ray.scheduler.request import Sequence


class WaitingQueue:
    """A sorted list: to find a place takes log n comparisons, and the list is no longer than the queue's limit."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0  # of all prompts here, each counted once however many sequences share it
        self._num_sharing: dict[int, int] = {}  # sequences of each prompt, by the identity of the tuple
        self._sequences: list[Sequence] = []  # the first in order is the last: it leaves most often, and at no cost

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """A sequence that is new, or that came back, to its place."""
        bisect.insort(self._sequences, sequence, key=_reverse_order)
        prompt = id(sequence.request.prompt_token_ids)
        num_sharing = self._num_sharing.get(prompt, 0)
        self._num_sharing[prompt] = num_sharing + 1
        if num_sharing == 0:
            self.num_prompt_tokens += sequence.num_prompt

    def first(self) -> Sequence | None:
        """The next one to be admitted."""
        return self._sequences[-1] if self._sequences else None

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in the queue. Raises ValueError for one that is not."""
        index = bisect.bisect_left(self._sequences, _reverse_order(sequence), key=_reverse_order)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise ValueError(f"request {sequence.request_id} does not wait")
        del self._sequences[index]
        prompt = id(sequence.request.prompt_token_ids)
        self._num_sharing[prompt] -= 1
        if self._num_sharing[prompt] == 0:
            del self._num_sharing[prompt]
            self.num_prompt_tokens -= sequence.num_prompt


def _reverse_order(sequence: Sequence) -> tuple[int, int]:
    priority, arrival = sequence.order
    return -priority, -arrival
