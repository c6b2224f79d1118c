# SPDX-License-Identifier: MIT OR Apache-2.0
"""`tokenize` and `detokenize`: a model's token ids of a text or a conversation, and back, in vLLM's shapes.

Rules: a conversation goes the same way as in a chat, so that what is counted here is what is computed there. Ids that
stand for no token have no text. Long work is done off the event loop. No engine is asked.
"""

from __future__ import annotations

import asyncio
from typing import Any

from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.failures import bad_request
from metrale_ray.serve.messages import normal_messages_apart
from metrale_ray.serve.openai.call import Call
from metrale_ray.serve.openai.tokenize_request import DetokenizeRequest, TokenizeRequest
from metrale_ray.serve.templates.tokens import chat_token_ids, text_token_ids
from metrale_ray.serve.text import Tokenizer

SHORT_TOKENS = 1024
"""So many are decoded on the loop."""


async def tokenize(call: Call, request: TokenizeRequest) -> dict[str, Any]:
    """The token ids, and how many a prompt may have. Raises ApiError and RequestError."""
    tokenizer = _tokenizer(call.model)
    most = call.model.max_model_len
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        token_ids = await text_token_ids(tokenizer, request.prompt, most, add_special_tokens=special)
    else:
        token_ids = await chat_token_ids(tokenizer, await _laid_out(call, request), most)
    texts = None
    if request.return_token_strs:
        texts = await asyncio.to_thread(_texts, tokenizer, token_ids)
    return {"count": len(token_ids), "max_model_len": most, "tokens": token_ids, "token_strs": texts}


async def detokenize(call: Call, request: DetokenizeRequest) -> dict[str, Any]:
    """The text of the ids, special tokens included. Raises ApiError."""
    tokenizer = _tokenizer(call.model)
    if len(request.tokens) <= SHORT_TOKENS:
        return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
    return {"prompt": await asyncio.to_thread(tokenizer.decode, request.tokens, skip_special_tokens=False)}


def _tokenizer(model: ServedModel) -> Tokenizer:
    if model.tokenizer is None:
        raise bad_request(f"{model.names[0]} has no tokenizer; its prompts are token ids", code="no_tokenizer")
    return model.tokenizer


async def _laid_out(call: Call, request: TokenizeRequest) -> str:
    if call.model.template is None:
        raise bad_request(
            f"{call.model.names[0]} has no chat template; give a prompt", param="messages", code="no_chat_template"
        )
    return await call.model.template.render(
        await normal_messages_apart(request.messages or [], call.settings.limits.max_messages),
        template=request.chat_template,
        tools=request.tools,
        variables=request.template_variables,
        add_generation_prompt=request.opens_answer,
        continue_final_message=request.continue_final_message,
    )


def _texts(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in token_ids]
