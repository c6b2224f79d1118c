# SPDX-License-Identifier: MIT OR Apache-2.0
"""The check that every request passes before it may wait: what can never be served is refused at once.

Rules: a refusal says what was given, what is allowed and what to change; a request that passes can be served to its
end when it runs alone.
"""

from __future__ import annotations

from metrale_ray.errors import RequestError
from metrale_ray.scheduler.limits import SchedulerLimits
from metrale_ray.scheduler.request import Request
from metrale_ray.scheduler.waiting import WaitingQueue


def check_request(request: Request, limits: SchedulerLimits, is_known: bool) -> int:
    """The number of tokens, prompt and generated, at which `request` ends: by its max_tokens, or by what the model or,
    where it names no max_tokens, the KV cache holds.

    `is_known` says whether its id is in use. Raises RequestError.
    """
    if is_known:
        raise RequestError(
            f"request id {request.request_id} is in use; give each request an id of its own",
            code="duplicate_request_id",
            param="request_id",
        )
    num_prompt = len(request.prompt_token_ids)
    check_prompt_length(num_prompt, limits.max_model_len)
    if request.max_tokens is None:
        return _longest(num_prompt, limits)
    if request.max_tokens < 1:
        raise RequestError(
            f"max_tokens is {request.max_tokens}; it must be at least 1", code="invalid_max_tokens", param="max_tokens"
        )
    max_length = min(num_prompt + request.max_tokens, limits.max_model_len)
    _check_fits(num_prompt, max_length, limits)
    return max_length


def check_prompt_length(num_prompt: int, max_model_len: int) -> None:
    """Raise RequestError if a prompt of so many tokens can never have an answer."""
    if num_prompt == 0:
        raise RequestError(
            "the prompt has 0 tokens; it must have at least 1, so give it some text",
            code="empty_prompt",
            param="prompt",
        )
    if num_prompt + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; at most {max_model_len - 1} are allowed, as max_model_len is "
            f"{max_model_len} and counts the answer too. Shorten the prompt.",
            code="context_length_exceeded",
            param="prompt",
        )


def check_room(num_together: int, num_tokens: int, waiting: WaitingQueue, limits: SchedulerLimits) -> None:
    """Raise RequestError if `num_together` requests, which come in one and have `num_tokens` prompt tokens, find no
    room among those that wait: all of them find room or none does."""
    if num_together > limits.max_queue_len:
        raise RequestError(
            f"n is {num_together}; at most {limits.max_queue_len} sequences find room in the queue. Lower n, or raise "
            "max_queue_len.",
            param="n",
        )
    if len(waiting) + num_together > limits.max_queue_len:
        more = "" if num_together == 1 else f" and {num_together} more would"
        raise RequestError(
            f"{len(waiting)} requests wait{more} and the queue holds {limits.max_queue_len}; try again later, or raise "
            "max_queue_len",
            code="queue_full",
        )
    check_waiting_tokens(waiting.num_prompt_tokens, num_tokens, limits.max_waiting_prompt_tokens)


def check_waiting_tokens(num_waiting: int, num_more: int, max_waiting: int) -> None:
    """Raise RequestError if `num_more` prompt tokens are too many beside those that wait. One prompt alone never is."""
    if num_waiting and num_waiting + num_more > max_waiting:
        raise RequestError(
            f"{num_waiting} prompt tokens wait and {num_more} more would; at most {max_waiting} may wait at a time. "
            "Try again later, or send fewer or shorter prompts at a time.",
            code="queue_full",
        )


def _longest(num_prompt: int, limits: SchedulerLimits) -> int:
    """Where a request that names no limit of its own ends."""
    if num_prompt > limits.capacity_tokens:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and the KV cache has {limits.capacity_tokens} places. Shorten the "
            "prompt, or give the cache more memory.",
            code="kv_cache_exceeded",
            param="prompt",
        )
    return min(limits.max_model_len, limits.capacity_tokens + 1)  # the last token needs no place: see `_check_fits`


def _check_fits(num_prompt: int, max_length: int, limits: SchedulerLimits) -> None:
    num_stored = max_length - 1  # the last token is sampled and never computed, so it needs no place
    if num_stored > limits.capacity_tokens:
        raise RequestError(
            f"{num_prompt} prompt tokens and {max_length - num_prompt} more need {num_stored} places in the KV cache; "
            f"it has {limits.capacity_tokens}. Lower max_tokens, shorten the prompt, or give the cache more memory.",
            code="kv_cache_exceeded",
            param="max_tokens",
        )
