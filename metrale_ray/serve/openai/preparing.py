# SPDX-License-Identifier: MIT OR Apache-2.0
"""`prepared`: prompts and parameters as requests that the engine takes, made off the event loop where that takes long.

Rules. One prompt that is too long refuses the call, as everything else about its prompts does. What a grammar costs to
check is bounded in time and size before anything is sent. So is what the parameters of all prompts take on the way to
the engine, as each prompt takes its own copy along.
"""

from __future__ import annotations

from collections.abc import Sequence

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.openai.generation import timeout_s
from metrale_ray.serve.prompts import Prompt, PromptRequest
from metrale_ray.serve.text_threads import in_text_thread

SHORT_CHARACTERS = 4096
"""What is tokenized on the loop, in about a millisecond; what takes longer is worth a thread."""

CHARACTERS_PER_TEXT = 256
"""What any text costs to tokenize, however short it is, in characters of a long one."""

CHARACTERS_PER_STOP_CHARACTER = 8
"""What one character of a stop string costs to prepare."""

MAX_PARAMS_BYTES = 64 * 2**20
"""What the parameters of one call may take on the way to the engine, over all of its prompts: hundreds of prompts with
the largest schema. A short body can order much more."""

MAX_PROMPT_CANDIDATES = 2**20
"""Tokens of all prompts times the candidates that are told of each: the answer holds them all, some 200 bytes each."""


async def prepared(
    call: Call, front: Front, prompts: Sequence[Prompt], params: SamplingParams, priority: int
) -> list[PromptRequest]:
    """One request for each prompt. Raises RequestError."""
    if call.model.grammars is not None:
        params = await call.model.grammars.checked(params, call.model.tokenizer)

    def make() -> list[PromptRequest]:
        requests = front.prepare.requests(prompts, params, priority, timeout_s(call))
        _check_params_bytes(requests)
        _check_candidates(requests, params)
        return requests

    size = _size(prompts) + _size_of_params(params)
    requests = make() if size <= SHORT_CHARACTERS else await in_text_thread(size, make)
    for number, request in enumerate(requests):
        if request.refusal is not None:
            code, message = request.refusal
            raise RequestError(
                message if len(requests) == 1 else f"prompt {number}: {message}", code=code, param="prompt"
            )
    return requests


def _size(prompts: Sequence[Prompt]) -> int:
    """What the prompts take, in characters to be tokenized."""
    num_texts = sum(isinstance(prompt, str) for prompt in prompts)
    return sum(map(len, prompts)) + CHARACTERS_PER_TEXT * num_texts


def _size_of_params(params: SamplingParams) -> int:
    """What the parameters take, in the same measure. A bad word is tokenized twice; ids are looked at and packed."""
    bad_words = 2 * (sum(map(len, params.bad_words)) + CHARACTERS_PER_TEXT * len(params.bad_words))
    stops = CHARACTERS_PER_STOP_CHARACTER * sum(map(len, params.stop))
    ids = len(params.logit_bias) + len(params.allowed_token_ids or ()) + sum(map(len, params.bad_token_ids))
    return bad_words + stops + ids + len(params.grammar or "")


def _check_candidates(requests: Sequence[PromptRequest], params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    num_tokens = sum(len(request.token_ids) for request in requests)
    num_candidates = num_tokens * (1 + params.prompt_logprobs)
    if num_candidates > MAX_PROMPT_CANDIDATES:
        raise RequestError(
            f"log probabilities of {num_tokens} tokens of prompts are {num_candidates} entries in one answer; allowed "
            f"are {MAX_PROMPT_CANDIDATES}. Give fewer prompts at a time, or ask for fewer candidates.",
            code="limit_exceeded",
            param="prompt_logprobs",
        )


def _check_params_bytes(requests: Sequence[PromptRequest]) -> None:
    num_bytes = sum(request.sent.num_bytes for request in requests)
    if num_bytes <= MAX_PARAMS_BYTES:
        return
    largest = requests[0].sent.largest_field()
    name = {"bad_token_ids": "bad_words"}.get(largest, largest)
    raise RequestError(
        f"{name} is sent to the engine with each of the {len(requests)} prompts, and the parameters of this call take "
        f"{num_bytes} bytes then; allowed are {MAX_PARAMS_BYTES}. Give fewer prompts at a time, or a shorter {name}.",
        code="limit_exceeded",
        param=name,
    )
