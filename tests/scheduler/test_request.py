# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests of `scheduler/request.py`: what the next row of a sequence is."""

from __future__ import annotations

from metrale_ray.protocol.commands import BlockId, Logits, Slot
from metrale_ray.scheduler.request import Request, RequestId, Sequence
from tests.scheduler.scheduler_cases import a_request


def a_sequence(num_prompt: int, num_computed: int = 0, num_generated: int = 0, all_logits: bool = False) -> Sequence:
    request = a_request(1, num_prompt, max_tokens=50, prompt_logits_all=all_logits)
    tokens = [*request.prompt_token_ids, *range(num_generated)]
    return Sequence(request, 0, num_prompt + 50, tokens, num_computed=num_computed)


def test_a_sequence_decodes_when_one_token_is_left_and_something_precedes_it() -> None:
    assert a_sequence(4, num_computed=4, num_generated=1).is_decoding
    assert a_sequence(4, num_computed=3).is_decoding
    assert not a_sequence(1).is_decoding
    assert not a_sequence(4, num_computed=2).is_decoding


def test_the_last_prompt_token_alone_is_a_chunk_while_its_logits_are_owed() -> None:
    assert not a_sequence(4, num_computed=3, all_logits=True).is_decoding
    assert a_sequence(4, num_computed=4, num_generated=1, all_logits=True).is_decoding


def test_only_the_chunk_that_ends_the_tokens_asks_for_logits() -> None:
    sequence = a_sequence(6)
    assert sequence.logits_until(5) is Logits.NONE
    assert sequence.logits_until(6) is Logits.LAST


def test_every_prompt_chunk_asks_for_all_logits_when_the_request_does() -> None:
    sequence = a_sequence(6, all_logits=True)
    assert sequence.logits_until(3) is Logits.ALL
    assert sequence.logits_until(6) is Logits.ALL


def test_after_a_preemption_chunks_stop_where_logits_become_owed_again() -> None:
    sequence = a_sequence(10, all_logits=True)
    sequence.num_prompt_logits = 4
    assert sequence.chunk_end(8) == 4
    assert sequence.logits_until(4) is Logits.NONE
    sequence.num_computed = 4
    assert sequence.chunk_end(8) == 10
    assert sequence.logits_until(10) is Logits.ALL


def test_a_resumed_sequence_asks_for_no_prompt_logits_a_second_time() -> None:
    sequence = a_sequence(6, num_generated=3, all_logits=True)
    sequence.num_prompt_logits = 6
    assert sequence.chunk_end(20) == 9
    assert sequence.logits_until(9) is Logits.LAST


def test_protection_lasts_for_the_tokens_generated_since_the_resumption() -> None:
    sequence = a_sequence(4, num_generated=3)
    assert not sequence.is_protected(2)
    sequence.slot, sequence.blocks, sequence.num_computed, sequence.num_blocks_shipped = Slot(0), [BlockId(3)], 6, 1
    sequence.start_over()
    assert (sequence.slot, sequence.blocks, sequence.num_computed, sequence.num_blocks_shipped) == (None, [], 0, 0)
    assert sequence.is_protected(2)
    sequence.tokens += [1]
    assert sequence.is_protected(2)
    sequence.tokens += [1]
    assert not sequence.is_protected(2)


def test_a_sequence_shares_its_prompt_until_it_has_a_token_of_its_own() -> None:
    prompt = (1, 2, 3)
    one, two = (Sequence(Request(RequestId(n), prompt, 4), n, 7, prompt) for n in range(2))
    one.slot, one.num_computed = Slot(0), 2
    one.start_over()
    assert one.tokens is two.tokens is prompt
    one.append(4)
    one.append(5)
    assert (one.tokens, two.tokens) == ([1, 2, 3, 4, 5], prompt)
    assert (one.num_generated, two.num_generated) == (2, 0)
