# SPDX-License-Identifier: MIT OR Apache-2.0
"""`score`: the log probability and the rank of one token in one row of raw logits, and the most likely tokens.

Rules: log_softmax of the logits as the model gave them, in fp64 from weights in fp32; never below LOGPROB_FLOOR, so
always finite. Ties go by the lower token id, in ranks too.

Shapes: V the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np

from metrale_ray.sampling.logprobs import LOGPROB_FLOOR, TokenLogprobs
from metrale_ray.sampling.processors import Floats, top_k_ids, weights


def score(logits_V: Floats, peak: float, token_id: int, num_top: int) -> TokenLogprobs:
    """How likely `token_id` is, and the `num_top` most likely tokens (at most V).

    `peak` is the largest logit, which is finite; the others are finite or -inf.
    """
    log_total = math.log(float(weights(logits_V, peak, 1.0).sum(dtype=np.float64)))
    top_ids = _most_likely(logits_V, min(num_top, logits_V.size))
    return TokenLogprobs(
        token_id=token_id,
        logprob=_logprob(float(logits_V[token_id]) - peak, log_total),
        rank=_rank(logits_V, token_id),
        top_ids=tuple(top_ids),
        top_logprobs=tuple(_logprob(float(logits_V[top_id]) - peak, log_total) for top_id in top_ids),
    )


def _logprob(below_peak: float, log_total: float) -> float:
    return max(below_peak - log_total, LOGPROB_FLOOR)


def _rank(logits_V: Floats, token_id: int) -> int:
    logit = logits_V[token_id]
    before = np.count_nonzero(logits_V > logit) + np.count_nonzero(logits_V[:token_id] == logit)
    return 1 + int(before)


def _most_likely(logits_V: Floats, num_top: int) -> list[int]:
    """The ids of the largest logits, the largest first."""
    if num_top == 0:
        return []
    ids = top_k_ids(logits_V, num_top)
    found: list[int] = ids[np.argsort(-logits_V[ids], kind="stable")].tolist()
    return found
