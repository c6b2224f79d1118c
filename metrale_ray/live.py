# SPDX-License-Identifier: MIT OR Apache-2.0
"""`LiveRequest`: what the engine keeps of one sequence's request until it has ended, besides what the scheduler has.

Rules: nothing here depends on slots, blocks or steps, so it survives preemption as the tokens do. The history is made
when the first token is sampled: a request that waits costs none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metrale_ray.errors import RequestError
from metrale_ray.grammar.constraint import Constraint
from metrale_ray.sampling.history import DistinctTokens, TokenHistory
from metrale_ray.sampling.sampler import SampleRow
from metrale_ray.sampling.token_params import TokenParams


@dataclass(slots=True)
class LiveRequest:
    """One sequence of a client's request.

    `seed` is shared by all sequences of the client's request, `sequence_index` tells them apart. `end_token_ids` are
    all ids that could end the sequence, were it not for `params.ignore_eos`. `distinct` are the prompt's, which the
    sequences share; None: this one's own. `constraint` is this sequence's own place in the request's grammar.
    """

    prompt_token_ids: tuple[int, ...]
    params: TokenParams
    seed: int
    sequence_index: int
    end_token_ids: frozenset[int]
    distinct: DistinctTokens | None = None
    constraint: Constraint | None = None
    was_poisoned: bool = False
    _history: TokenHistory | None = None

    def sample_row(self, position: int, mask_V: NDArray[np.bool_] | None = None) -> SampleRow:
        """Whose token the one at `position` will be. `mask_V` is what its constraint allows there."""
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
            mask=mask_V,
        )

    def note(self, token_id: int) -> None:
        """The token of the last `sample_row` was kept, and the sequence goes on."""
        if self._history is not None:
            self._history.append(token_id)
        if self.constraint is not None:
            self.constraint.advance(token_id)


def check_constraint(params: TokenParams, constraint: Constraint | None, eos_token_ids: frozenset[int]) -> None:
    """Raise RequestError when a text of this grammar could not end. The caller has compiled `params.grammar`."""
    assert (params.grammar is None) == (constraint is None), "a grammar comes with its constraint"
    if constraint is not None and not eos_token_ids:
        raise RequestError(
            "structured outputs need a token that ends a text, and this checkpoint names none: give eos_token_id in "
            "its config.json or generation_config.json",
            code="invalid_grammar",
        )
