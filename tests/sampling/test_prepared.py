# SPDX-License-Identifier: MIT OR Apache-2.0
"""What parameters say about single tokens, made once: the bad sequences that the next token would complete."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.prepared import Prepared
from metrale_ray.sampling.token_params import TokenParams

FEW = st.integers(0, 2)


def a_history(token_ids: list[int]) -> TokenHistory:
    history = TokenHistory(())
    for token_id in token_ids:
        history.append(token_id)
    return history


@given(st.lists(st.lists(FEW, min_size=1, max_size=5), max_size=20), st.lists(FEW, max_size=8))
def test_the_tokens_that_complete_a_bad_sequence_are_found_whatever_else_is_bad(
    bad: list[list[int]], tokens: list[int]
) -> None:
    prepared = Prepared(TokenParams(bad_token_ids=bad))
    expected = {each[-1] for each in bad if len(each) > 1 and [*tokens, each[-1]][-len(each) :] == each}
    assert set(prepared.bad_ids_after(a_history(tokens))) == expected


def test_two_thousand_bad_sequences_of_almost_one_beginning_cost_as_little_as_one() -> None:
    prepared = Prepared(TokenParams(bad_token_ids=[[number % 3000, *[7] * 62, 5] for number in range(2000)]))
    history = a_history([9999] + [7] * 62)
    started = time.process_time()
    for _ in range(100):
        assert prepared.bad_ids_after(history) == []
    assert time.process_time() - started < 0.05  # 20 microseconds each; to look at every one took a millisecond
