# SPDX-License-Identifier: MIT OR Apache-2.0
"""The check that every request passes before it may wait: what can never be served is refused at once.

Rules: a refusal says what was given, what is allowed and what to change; a request that passes can be served to its
end when it runs alone.
"""

from __future__ import annotations

from metrale_ray.errors import RequestError
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.request import Request


def check_request(
    request: Request, limits: SchedulerLimits, num_waiting: int, is_known: bool, num_together: int = 1
) -> int:
    """The number of tokens, prompt and generated, at which `request` ends: by its max_tokens or by max_model_len.

    `is_known` says whether its id is in use. `num_together` requests come in one, and all find room or none does.
    Raises RequestError.
    """
    if is_known:
        raise RequestError(
            f"request id {request.request_id} is in use; give each request an id of its own",
            code="duplicate_request_id",
            param="request_id",
        )
    _check_lengths(request, limits)
    num_prompt = len(request.prompt_token_ids)
    max_length = min(num_prompt + request.max_tokens, limits.max_model_len)
    _check_fits(num_prompt, max_length, limits)
    _check_room(num_together, num_waiting, limits)
    return max_length


def _check_lengths(request: Request, limits: SchedulerLimits) -> None:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError(
            "the prompt has 0 tokens; it must have at least 1, so give it some text",
            code="empty_prompt",
            param="prompt",
        )
    if request.max_tokens < 1:
        raise RequestError(
            f"max_tokens is {request.max_tokens}; it must be at least 1", code="invalid_max_tokens", param="max_tokens"
        )
    if num_prompt + 1 > limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; at most {limits.max_model_len - 1} are allowed, as max_model_len is "
            f"{limits.max_model_len} and counts the answer too. Shorten the prompt.",
            code="context_length_exceeded",
            param="prompt",
        )


def _check_room(num_together: int, num_waiting: int, limits: SchedulerLimits) -> None:
    if num_together > limits.max_queue_len:
        raise RequestError(
            f"n is {num_together}; at most {limits.max_queue_len} sequences find room in the queue. Lower n, or raise "
            "max_queue_len.",
            param="n",
        )
    if num_waiting + num_together > limits.max_queue_len:
        more = "" if num_together == 1 else f" and {num_together} more would"
        raise RequestError(
            f"{num_waiting} requests wait{more} and the queue holds {limits.max_queue_len}; try again later, or raise "
            "max_queue_len",
            code="queue_full",
        )


def _check_fits(num_prompt: int, max_length: int, limits: SchedulerLimits) -> None:
    num_stored = max_length - 1  # the last token is sampled and never computed, so it needs no place
    if num_stored > limits.capacity_tokens:
        raise RequestError(
            f"{num_prompt} prompt tokens and {max_length - num_prompt} more need {num_stored} places in the KV cache; "
            f"it has {limits.capacity_tokens}. Lower max_tokens, shorten the prompt, or give the cache more memory.",
            code="kv_cache_exceeded",
            param="max_tokens",
        )
