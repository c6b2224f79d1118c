# SPDX-License-Identifier: MIT OR Apache-2.0
"""`add_penalties`: make the tokens that there have been less likely, or more.

Rules, in this order: the repetition penalty divides the positive logits and multiplies the negative ones of tokens in
prompt or output; the frequency penalty is taken off as often as a token was generated; the presence penalty once.
Only the logits of tokens in the history are read and written. They are computed in fp64 and stay finite, so that no
penalty makes a token certain or impossible; -inf stays -inf.

Source: the repetition penalty is that of Keskar et al., "CTRL", 2019, section 4.1; the others are OpenAI's.

Shapes: V the vocabulary, H the distinct tokens of the history.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.token_params import TokenParams

_LARGEST = 2.0**128 - 2.0**104  # the largest fp32


def add_penalties(logits_V: NDArray[np.float32], params: TokenParams, history: TokenHistory) -> None:
    """Change `logits_V`, finite or -inf, in place."""
    ids_H, counts_H = history.token_ids, history.counts
    raw_H = logits_V[ids_H]
    logits_H = raw_H.astype(np.float64)
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        with np.errstate(over="ignore"):  # what overflows becomes the largest number below
            logits_H = np.where(logits_H > 0, logits_H / penalty, logits_H * penalty)
    logits_H -= params.frequency_penalty * counts_H
    logits_H -= params.presence_penalty * (counts_H > 0)
    logits_V[ids_H] = np.where(raw_H == -np.inf, raw_H, np.clip(logits_H, -_LARGEST, _LARGEST))
