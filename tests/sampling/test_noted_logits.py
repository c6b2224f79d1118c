# SPDX-License-Identifier: MIT OR Apache-2.0
"""The few raw logits that are noted with each token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as some

from metrale_ray.protocol.journal.records import probes
from metrale_ray.sampling.noted_logits import NotedLogits


@given(some.data(), some.integers(1, 6), some.integers(1, 40))
def test_each_row_has_the_logit_of_its_token_and_then_those_of_the_probes(
    data: some.DataObject, num_rows: int, vocab_size: int
) -> None:
    logits_RV = torch.arange(num_rows * vocab_size, dtype=torch.float32).reshape(num_rows, vocab_size) / 8
    rows = data.draw(some.lists(some.integers(0, num_rows - 1), unique=True, min_size=1))
    token_ids = [data.draw(some.integers(0, vocab_size - 1)) for _ in rows]
    found = NotedLogits(logits_RV, rows, token_ids, probes(vocab_size)).values()
    expected = [
        tuple(float(logits_RV[row, token]) for token in (token_id, *probes(vocab_size)))
        for row, token_id in zip(rows, token_ids, strict=True)
    ]
    assert found == expected


def test_logits_that_are_used_again_afterwards_do_not_change_what_was_noted() -> None:
    logits_RV = torch.ones(3, 16)
    noted = NotedLogits(logits_RV, [0, 1, 2], [4, 5, 6], probes(16))
    logits_RV.fill_(9.0)
    assert noted.values() == [(1.0,) * 5] * 3
