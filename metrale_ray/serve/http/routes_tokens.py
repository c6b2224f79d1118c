# SPDX-License-Identifier: MIT OR Apache-2.0
"""POST /tokenize and /detokenize: what a model's tokenizer makes of a text, a conversation, or token ids.

Rule: they ask no engine, and are work all the same: it ends with its time and when its client goes (see `answer`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from metrale_ray.serve.http.answer import Answer
from metrale_ray.serve.http.body import read_body
from metrale_ray.serve.http.headers import ignored_fields
from metrale_ray.serve.http.openapi import answer, json_body, work_failures
from metrale_ray.serve.http.service import Service
from metrale_ray.serve.openai import request as openai_request
from metrale_ray.serve.openai.tokenization import StartedTokens, detokenize, tokenize
from metrale_ray.serve.openai.tokenize_request import (
    DetokenizeRequest,
    TokenizeRequest,
    parse_detokenize,
    parse_tokenize,
)

TOKEN_BODIES = (TokenizeRequest, DetokenizeRequest)


def add_tokens_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of tokenizers."""
    settings = service.settings.api

    def answering(asked: openai_request.Request, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> Answer:
        async def start() -> StartedTokens:
            return StartedTokens(work)

        return Answer(
            start,
            service.drain,
            streams=False,
            max_request_s=service.limits.max_request_s,
            headers=ignored_fields(asked),
        )

    @app.post(
        "/tokenize",
        tags=["tokens"],
        summary="The token ids of a text or a conversation",
        responses={**answer("Token ids"), **work_failures()},
        openapi_extra=json_body(TokenizeRequest),
    )
    async def of_text(request: Request) -> Answer:
        service.drain.check()
        asked = await read_body(request, service.limits, lambda body: parse_tokenize(body, settings))
        call = service.call(request, asked.model)
        return answering(asked, lambda: tokenize(call, asked))

    @app.post(
        "/detokenize",
        tags=["tokens"],
        summary="The text of token ids",
        responses={**answer("A text"), **work_failures()},
        openapi_extra=json_body(DetokenizeRequest),
    )
    async def of_tokens(request: Request) -> Answer:
        service.drain.check()
        asked = await read_body(request, service.limits, lambda body: parse_detokenize(body, settings))
        call = service.call(request, asked.model)
        return answering(asked, lambda: detokenize(call, asked))
