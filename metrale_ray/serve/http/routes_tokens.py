# SPDX-License-Identifier: MIT OR Apache-2.0
"""POST /tokenize and /detokenize: what a model's tokenizer makes of a text, a conversation, or token ids."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from metrale_ray.serve.http.body import read_body
from metrale_ray.serve.http.headers import ignored_fields
from metrale_ray.serve.http.openapi import answer, body_failures, json_body
from metrale_ray.serve.http.service import Service
from metrale_ray.serve.openai import request as openai_request
from metrale_ray.serve.openai.tokenization import detokenize, tokenize
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

    @app.post(
        "/tokenize",
        tags=["tokens"],
        summary="The token ids of a text or a conversation",
        responses={**answer("Token ids"), **body_failures()},
        openapi_extra=json_body(TokenizeRequest),
    )
    async def of_text(request: Request) -> Response:
        asked = await read_body(request, service.limits, lambda body: parse_tokenize(body, settings))
        return _answer(await tokenize(service.call(request, asked.model), asked), asked)

    @app.post(
        "/detokenize",
        tags=["tokens"],
        summary="The text of token ids",
        responses={**answer("A text"), **body_failures()},
        openapi_extra=json_body(DetokenizeRequest),
    )
    async def of_tokens(request: Request) -> Response:
        asked = await read_body(request, service.limits, lambda body: parse_detokenize(body, settings))
        return _answer(await detokenize(service.call(request, asked.model), asked), asked)


def _answer(content: dict[str, Any], asked: openai_request.Request) -> Response:
    return Response(to_json(content), headers=ignored_fields(asked), media_type="application/json")
