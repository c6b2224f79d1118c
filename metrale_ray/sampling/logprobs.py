# SPDX-License-Identifier: MIT OR Apache-2.0
"""`TokenLogprobs`: how likely one token was, and which ones were the most likely in its place.

Rules: the numbers are of the model's own distribution, before temperature, bias, penalties and masks, so they do not
vary with the parameters; they are always finite. Among equal ones the lower token id comes first.

What it leaves out: computing them (`scores`). No torch here, so that a front may import it.
"""

from __future__ import annotations

from dataclasses import dataclass

LOGPROB_FLOOR = -9999.0
"""The least log probability that is told: JSON has no infinity, and no sum of a text's can overflow."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log probability and its `rank` (1: the most likely), and the most likely tokens with theirs.

    `top_ids` fall in log probability; they hold `token_id` only when it is among them.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
