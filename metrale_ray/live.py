# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LiveRequest`: what the engine keeps of one sequence's request until it has ended, besides what the scheduler has.

Rules: nothing here depends on slots, blocks or steps, so it survives preemption as the tokens do. The history is made
when the first token is sampled: a request that waits costs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from metrale_ray.sampling.history import DistinctTokens, TokenHistory
from metrale_ray.sampling.sampler import SampleRow
from metrale_ray.sampling.token_params import TokenParams


@dataclass(slots=True)
class LiveRequest:
    """One sequence of a client's request.

    `seed` is shared by all sequences of the client's request, `sequence_index` tells them apart. `end_token_ids` are
    all ids that could end the sequence, were it not for `params.ignore_eos`. `distinct` are the prompt's, which the
    sequences share; None: this one's own.
    """

    prompt_token_ids: tuple[int, ...]
    params: TokenParams
    seed: int
    sequence_index: int
    end_token_ids: frozenset[int]
    distinct: DistinctTokens | None = None
    was_poisoned: bool = False
    _history: TokenHistory | None = None

    def sample_row(self, position: int) -> SampleRow:
        """Whose token the one at `position` will be."""
        if self._history is None and self.params.needs_history:
            self._history = TokenHistory(self.distinct or self.prompt_token_ids)
        return SampleRow(
            params=self.params,
            seed=self.seed,
            sequence_index=self.sequence_index,
            position=position,
            history=self._history,
            num_generated=position - len(self.prompt_token_ids),
            end_token_ids=self.end_token_ids,
        )

    def note(self, token_id: int) -> None:
        """The token of the last `sample_row` was kept."""
        if self._history is not None:
            self._history.append(token_id)
