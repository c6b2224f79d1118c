# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/victim.py`."""

from __future__ import annotations

from metrale_ray.scheduler.request import Sequence
from metrale_ray.scheduler.victim import choose_victim
from tests.scheduler.scheduler_cases import a_request


def test_the_lowest_priority_is_chosen_however_much_it_has_generated_and_the_first_in_order_never() -> None:
    sequences = []
    for arrival, (priority, num_generated, at_resume) in enumerate(
        ((1, 0, None), (2, 90, 89), (2, 95, None), (0, 0, 0))
    ):
        request = a_request(arrival, num_prompt=2, priority=priority)
        tokens = [*request.prompt_token_ids, *range(num_generated)]
        sequences.append(Sequence(request, arrival, 900, tokens, num_generated_at_resume=at_resume))
    assert choose_victim(sequences, 64).arrival == 2
    assert choose_victim([sequences[0], sequences[1], sequences[3]], 64).arrival == 1  # protected, but all there is
    assert choose_victim([sequences[0], sequences[3]], 64).arrival == 0


def running(*generated: tuple[int, int | None]) -> list[Sequence]:
    """Sequences in order of arrival: tokens generated, and tokens generated at the resumption."""
    sequences = []
    for arrival, (num_generated, num_at_resume) in enumerate(generated):
        request = a_request(arrival, num_prompt=2)
        tokens = [*request.prompt_token_ids, *range(num_generated)]
        sequences.append(Sequence(request, arrival, 900, tokens, num_generated_at_resume=num_at_resume))
    return sequences


def victim(*generated: tuple[int, int | None], protection_tokens: int = 64) -> int:
    """The victim's arrival, which does not depend on the order in which the sequences are given."""
    sequences = running(*generated)
    chosen = choose_victim(sequences, protection_tokens)
    assert choose_victim(sequences[::-1], protection_tokens) is chosen
    return chosen.arrival


def test_the_sequence_with_the_fewest_generated_tokens_is_chosen() -> None:
    assert victim((9, None), (3, None), (2, None), (5, None)) == 2


def test_the_newest_of_equals_is_chosen() -> None:
    assert victim((9, None), (3, None), (3, None), (5, None)) == 2


def test_the_oldest_is_never_chosen() -> None:
    assert victim((0, None), (300, None)) == 1
    assert victim((0, None), (300, 300)) == 1


def test_a_resumed_sequence_is_passed_over_until_it_generated_enough() -> None:
    assert victim((900, None), (500, None), (103, 40)) == 1
    assert victim((900, None), (500, None), (104, 40)) == 2


def test_when_all_others_are_protected_the_newest_is_chosen() -> None:
    assert victim((9, None), (3, 3), (7, 7)) == 2


def test_without_protection_a_resumed_sequence_is_like_any_other() -> None:
    assert victim((9, None), (8, None), (7, 7), protection_tokens=0) == 2
