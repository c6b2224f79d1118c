# SPDX-License-Identifier: MIT OR Apache-2.0
"""Log probabilities of tokens as one map inside a frame: an array of numbers per property, in order of the tokens.

Rules: all arrays are `bin`, so twenty candidates of a token cost no more objects than one; log probabilities are
finite, a rank is at least 1. Whatever is wrong raises FrameError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metrale_ray.protocol.fields import Fields, pack_f64s, pack_u32s
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import MAX_LOGPROBS


def logprobs_to_map(logprobs: Sequence[TokenLogprobs], max_count: int) -> dict[str, Any]:
    """The map of at most `max_count` tokens' log probabilities."""
    max_tops = max_count * MAX_LOGPROBS
    top_ids = [token_id for each in logprobs for token_id in each.top_ids]
    top_logprobs = [logprob for each in logprobs for logprob in each.top_logprobs]
    return {
        "token_ids": pack_u32s("token_ids", [each.token_id for each in logprobs], max_count),
        "logprobs": pack_f64s("logprobs", [each.logprob for each in logprobs], max_count),
        "ranks": pack_u32s("ranks", [each.rank for each in logprobs], max_count),
        "top_counts": pack_u32s("top_counts", [len(each.top_ids) for each in logprobs], max_count),
        "top_ids": pack_u32s("top_ids", top_ids, max_tops),
        "top_logprobs": pack_f64s("top_logprobs", top_logprobs, max_tops),
    }


def read_logprobs(fields: Fields, max_count: int) -> tuple[TokenLogprobs, ...]:
    """The log probabilities that such a map holds."""
    token_ids = fields.u32s("token_ids", max_count)
    count = len(token_ids)
    logprobs, ranks = fields.f64s("logprobs", max_count, count), fields.u32s("ranks", max_count, count)
    if 0 in ranks:
        raise fields.error("ranks begin at 1")
    top_counts = fields.u32s("top_counts", max_count, count)
    top_ids = fields.u32s("top_ids", max_count * MAX_LOGPROBS, sum(top_counts))
    top_logprobs = fields.f64s("top_logprobs", max_count * MAX_LOGPROBS, sum(top_counts))
    found, start = [], 0
    for token_id, logprob, rank, top_count in zip(token_ids, logprobs, ranks, top_counts, strict=True):
        end = start + top_count
        found.append(TokenLogprobs(token_id, logprob, rank, top_ids[start:end], top_logprobs[start:end]))
        start = end
    return tuple(found)
