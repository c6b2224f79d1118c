# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the engine tells the sampler of one sequence."""

from __future__ import annotations

import numpy as np
import pytest

from metrale_ray.errors import RequestError
from metrale_ray.live import LiveRequest, check_constraint
from metrale_ray.sampling.token_params import TokenParams

PROMPT = (5, 6, 5)


def a_request(params: TokenParams) -> LiveRequest:
    return LiveRequest(PROMPT, params, seed=7, sequence_index=2, end_token_ids=frozenset({9}))


def test_a_row_names_seed_sequence_position_ends_and_how_many_tokens_there_are() -> None:
    row = a_request(TokenParams()).sample_row(5)
    assert (row.seed, row.sequence_index, row.position, row.num_generated) == (7, 2, 5, 2)
    assert row.end_token_ids == {9}
    assert a_request(TokenParams()).sample_row(3).num_generated == 0


def test_the_history_is_kept_only_where_the_parameters_need_it() -> None:
    assert a_request(TokenParams(min_p=0.5, logit_bias={1: 2.0})).sample_row(3).history is None
    for params in (TokenParams(presence_penalty=0.5), TokenParams(bad_token_ids=[[1, 2]])):
        assert a_request(params).sample_row(3).history is not None


def test_the_history_holds_the_prompt_and_each_token_that_was_kept() -> None:
    live = a_request(TokenParams(frequency_penalty=0.5))
    assert live._history is None  # a request that waits costs none
    live.sample_row(3)
    for token_id in (8, 6, 8):
        live.note(token_id)
    history = live.sample_row(6).history
    assert history is not None
    assert dict(zip(history.token_ids.tolist(), history.counts.tolist(), strict=True)) == {5: 0, 6: 1, 8: 2}


def test_a_token_is_noted_without_a_history_too() -> None:
    live = a_request(TokenParams())
    live.sample_row(3)
    live.note(8)
    assert live.sample_row(4).history is None


class Noted:
    """In the place of a constraint: what it was told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def advance(self, token_id: int) -> None:
        self.token_ids.append(token_id)


def test_a_constraint_goes_on_with_the_tokens_that_were_kept_and_its_mask_is_the_rows() -> None:
    live, noted = a_request(TokenParams(grammar="start: 'a'")), Noted()
    live.constraint = noted  # type: ignore[assignment]
    mask = np.array([True, False])
    assert live.sample_row(3, mask).mask is mask
    assert live.sample_row(3).mask is None
    for token_id in (8, 6):
        live.note(token_id)
    assert noted.token_ids == [8, 6]
    assert live.sample_row(5).history is None


def test_a_grammar_needs_a_token_that_ends_a_text() -> None:
    params, constraint = TokenParams(grammar="start: 'a'"), Noted()
    check_constraint(params, constraint, frozenset({9}))  # type: ignore[arg-type]
    check_constraint(TokenParams(), None, frozenset())
    with pytest.raises(RequestError, match="eos_token_id") as caught:
        check_constraint(params, constraint, frozenset())  # type: ignore[arg-type]
    assert caught.value.code == "invalid_grammar"
