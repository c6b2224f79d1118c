# SPDX-License-Identifier: MIT OR Apache-2.0
"""`prepared`: prompts and parameters as requests that the engine takes, made off the event loop where that takes long.

Rules. One prompt that is too long refuses the call, as everything else about its prompts does. What a grammar costs to
check is bounded in time and size before anything is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from metrale_ray.errors import RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.front import Front
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.openai.generation import timeout_s
from metrale_ray.serve.prompts import Prompt, PromptRequest

SHORT_CHARACTERS = 4096
"""What is tokenized on the loop, in about a millisecond; longer texts are worth a thread."""


async def prepared(
    call: Call, front: Front, prompts: Sequence[Prompt], params: SamplingParams, priority: int
) -> list[PromptRequest]:
    """One request for each prompt. Raises RequestError."""
    if call.model.grammars is not None:
        params = await call.model.grammars.checked(params, call.model.tokenizer)

    def make() -> list[PromptRequest]:
        return front.prepare.requests(prompts, params, priority, timeout_s(call))

    size = sum(len(prompt) for prompt in prompts)
    requests = make() if size <= SHORT_CHARACTERS else await asyncio.to_thread(make)
    for number, request in enumerate(requests):
        if request.refusal is not None:
            code, message = request.refusal
            raise RequestError(
                message if len(requests) == 1 else f"prompt {number}: {message}", code=code, param="prompt"
            )
    return requests
