# SPDX-License-Identifier: MIT OR Apache-2.0
"""The requests of one run, in order: each a prompt, the length of its answer, and its time.

Rules: the same seed gives the same requests. Times, lengths and prompts have a chance of their own, so that another
distribution of answers does not change the prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from random import Random

from metrale_ray.traffic.arrivals import Arrivals, Rate, Recorded
from metrale_ray.traffic.lengths import Lengths
from metrale_ray.traffic.question import Question
from metrale_ray.traffic.words import PromptMaker


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked in one run.

    `num_requests`: at most so many; None: no end but the recording's. `max_input`, `max_output`: what is longer is cut.
    """

    arrivals: Arrivals
    input_lengths: Lengths
    output_lengths: Lengths
    seed: int = 0
    num_requests: int | None = None
    max_input: int | None = None
    max_output: int | None = None

    def questions(self, maker: PromptMaker) -> Iterator[Question]:
        """The requests, in order of their times."""
        return islice(self._all(maker), self.num_requests)

    def _all(self, maker: PromptMaker) -> Iterator[Question]:
        random = Random(f"prompts {self.seed}")
        for number, (due_s, num_input, num_output) in enumerate(self._shapes()):
            prompt = maker.make(_cut(num_input, self.max_input), random, number)
            yield Question(prompt, _cut(num_output, self.max_output), due_s)

    def _shapes(self) -> Iterator[tuple[float | None, int, int]]:
        if isinstance(self.arrivals, Recorded):
            for arrival in self.arrivals.arrivals:
                yield arrival.at_s / self.arrivals.speed, arrival.num_input, arrival.num_output
            return
        times: Iterator[float | None] = (
            self.arrivals.times_s(Random(f"times {self.seed}")) if isinstance(self.arrivals, Rate) else repeat(None)
        )
        inputs, outputs = Random(f"inputs {self.seed}"), Random(f"outputs {self.seed}")
        for due_s in times:
            yield due_s, self.input_lengths.draw(inputs), self.output_lengths.draw(outputs)


def _cut(length: int, most: int | None) -> int:
    return length if most is None else min(length, most)
