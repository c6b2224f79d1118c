# SPDX-License-Identifier: MIT OR Apache-2.0
"""The requests of a run: the same for the same seed, of the lengths and at the times that were asked for."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from metrale_ray.traffic.arrivals import Closed, Rate, Recorded
from metrale_ray.traffic.lengths import read_lengths
from metrale_ray.traffic.questions import Plan
from metrale_ray.traffic.trace import Arrival
from metrale_ray.traffic.words import Given, TokenIds, Words

FIVE, UNIFORM = read_lengths("5"), read_lengths("uniform:1:100")
IDS = TokenIds(range(10, 20))


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    def of_seed(seed: int) -> list[object]:
        return list(Plan(Rate(3.0), UNIFORM, UNIFORM, seed=seed, num_requests=30).questions(IDS))

    assert of_seed(1) == of_seed(1)
    assert of_seed(1) != of_seed(2)


def test_the_lengths_of_answers_do_not_change_the_prompts_or_the_times() -> None:
    def of_answers(text: str) -> list[object]:
        plan = Plan(Rate(3.0), UNIFORM, read_lengths(text), num_requests=30)
        return [(question.prompt, question.due_s) for question in plan.questions(IDS)]

    assert of_answers("7") == of_answers("uniform:1:50")


def test_token_ids_have_exactly_the_length_asked_for_and_come_from_the_pool() -> None:
    for question in Plan(Closed(1), read_lengths("17"), FIVE, num_requests=5).questions(IDS):
        assert isinstance(question.prompt, list)
        assert len(question.prompt) == 17
        assert set(question.prompt) <= set(range(10, 20))
        assert (question.max_tokens, question.due_s) == (5, None)


def test_texts_have_as_many_words_as_the_tokenizer_makes_tokens_of() -> None:
    plan = Plan(Closed(1), read_lengths("30"), FIVE, num_requests=1)
    (question,) = plan.questions(Words(tokens_per_word=1.5))
    assert isinstance(question.prompt, str)
    assert len(question.prompt.split()) == 20


def test_a_rate_is_kept_on_average_with_gaps_of_a_poisson_process() -> None:
    questions = islice(Plan(Rate(20.0), FIVE, FIVE).questions(IDS), 5000)
    times = [question.due_s or 0.0 for question in questions]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert min(gaps) >= 0


def test_a_recording_has_its_own_times_and_lengths_and_may_be_quicker() -> None:
    arrivals = Recorded([Arrival(0.0, 3, 9), Arrival(4.0, 80, 60)], speed=2.0)
    found = list(Plan(arrivals, FIVE, FIVE, max_input=50, max_output=20).questions(IDS))
    assert [(len(question.prompt), question.max_tokens, question.due_s) for question in found] == [
        (3, 9, 0.0),
        (50, 20, 2.0),
    ]


def test_given_prompts_come_in_order_and_again_from_the_first() -> None:
    plan = Plan(Closed(1), FIVE, FIVE, num_requests=5)
    assert [question.prompt for question in plan.questions(Given(["a", [1], "c"]))] == ["a", [1], "c", "a", [1]]
