# SPDX-License-Identifier: MIT OR Apache-2.0
from __future__ import annotations

from bench import head


def test_the_timed_steps_are_full_decode_batches_that_both_ranks_agree_on() -> None:
    steps = head.measure(rows=3, num_steps=5, vocab_size=200)
    assert len(steps.whole_ms) == len(steps.own_ms) == 5
    assert all(0 < own < whole for own, whole in zip(steps.own_ms, steps.whole_ms, strict=True))
    assert all(len(values) == 5 and min(values) >= 0 for values in steps.phases_ms.values())
