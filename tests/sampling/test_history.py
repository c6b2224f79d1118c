# SPDX-License-Identifier: MIT OR Apache-2.0
"""TokenHistory: the distinct tokens and their counts, whatever the order and the length."""

from __future__ import annotations

import random
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.sampling.history import DistinctTokens, TokenHistory

TOKENS = st.lists(st.integers(0, 300), max_size=400)


@given(TOKENS, TOKENS)
def test_it_knows_each_token_once_and_counts_what_was_generated(prompt: list[int], output: list[int]) -> None:
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    token_ids, counts = history.token_ids.tolist(), history.counts.tolist()
    assert sorted(token_ids) == sorted({*prompt, *output})
    generated = Counter(output)
    assert dict(zip(token_ids, counts, strict=True)) == {token_id: generated[token_id] for token_id in token_ids}
    assert history.last_token_id == (output[-1] if output else None)
    assert history.tail() == tuple(output[-63:])


def test_an_empty_prompt_is_a_history_too() -> None:
    history = TokenHistory(())
    assert history.token_ids.tolist() == []
    assert history.counts.tolist() == []
    history.append(7)
    assert history.token_ids.tolist() == [7]
    assert history.counts.tolist() == [1]


def test_arrays_taken_before_do_not_hinder_later_tokens() -> None:
    history = TokenHistory([5])
    taken = history.token_ids
    for token_id in range(1000):
        history.append(token_id)
    assert taken.tolist() == [5]
    assert history.token_ids.size == 1000


def test_a_token_costs_the_same_after_a_long_prompt() -> None:
    history = TokenHistory(range(200_000))
    tokens = [random.Random(1).randrange(400_000) for _ in range(2000)]
    started = time.process_time()
    for token_id in tokens:
        history.append(token_id)
    assert (time.process_time() - started) / len(tokens) < 100e-6  # about one microsecond, and one copy of the arrays


def test_sequences_share_what_was_found_of_their_prompt_and_nothing_else() -> None:
    distinct = DistinctTokens([5, 3, 5])
    one, two = TokenHistory(distinct), TokenHistory(distinct)
    for token_id in (3, 9, 3):
        one.append(token_id)
    assert distinct.token_ids is distinct.token_ids
    assert distinct.token_ids.tolist() == two.token_ids.tolist() == [3, 5]
    assert (one.token_ids.tolist(), one.counts.tolist()) == ([3, 5, 9], [2, 0, 1])
    assert two.counts.tolist() == [0, 0]


def test_histories_of_64_sequences_of_a_long_prompt_cost_little_more_than_one() -> None:
    prompt = [random.Random(2).randrange(152_000) for _ in range(131_072)]
    started = time.process_time()
    distinct = DistinctTokens(prompt)
    histories = [TokenHistory(distinct) for _ in range(64)]
    assert time.process_time() - started < 1.0  # one dictionary for each took eight seconds
    assert all(history.token_ids.size == distinct.token_ids.size for history in histories)
