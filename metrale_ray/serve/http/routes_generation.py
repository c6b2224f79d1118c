# SPDX-License-Identifier: MIT OR Apache-2.0
"""POST /v1/chat/completions and /v1/completions: what an engine makes tokens for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request

from metrale_ray.serve.http.answer import Answer, Started
from metrale_ray.serve.http.body import read_body
from metrale_ray.serve.http.headers import ignored_fields
from metrale_ray.serve.http.openapi import answer, json_body, work_failures
from metrale_ray.serve.http.service import Service
from metrale_ray.serve.openai.chat import start_chat
from metrale_ray.serve.openai.chat_request import ChatRequest, parse_chat
from metrale_ray.serve.openai.completion_request import CompletionRequest, parse_completion
from metrale_ray.serve.openai.completions import start_completion

GENERATION_BODIES = (ChatRequest, CompletionRequest)


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of chats and completions."""
    settings = service.settings.api

    def answering(is_stream: bool, headers: dict[str, str], start: Callable[[], Awaitable[Started]]) -> Answer:
        return Answer(
            start,
            service.drain,
            streams=is_stream,
            max_request_s=service.limits.max_request_s,
            headers=headers,
        )

    def read_chat(body: dict[str, Any]) -> tuple[ChatRequest, dict[str, str]]:
        asked = parse_chat(body, settings)
        return asked, ignored_fields(asked)

    def read_completion(body: dict[str, Any]) -> tuple[CompletionRequest, dict[str, str]]:
        asked = parse_completion(body, settings)
        return asked, ignored_fields(asked)

    @app.post(
        "/v1/chat/completions",
        tags=["generation"],
        summary="Go on with a conversation",
        responses={**answer("The answer, or a stream of its parts", streams=True), **work_failures()},
        openapi_extra=json_body(ChatRequest),
    )
    async def chat(request: Request) -> Answer:
        service.drain.check()
        asked, headers = await read_body(request, service.limits, read_chat)
        call = service.call(request, asked.model, "chat")
        return answering(asked.stream, headers, lambda: start_chat(call, asked))

    @app.post(
        "/v1/completions",
        tags=["generation"],
        summary="Go on with a text",
        responses={**answer("The answer, or a stream of its parts", streams=True), **work_failures()},
        openapi_extra=json_body(CompletionRequest),
    )
    async def completion(request: Request) -> Answer:
        service.drain.check()
        asked, headers = await read_body(request, service.limits, read_completion)
        call = service.call(request, asked.model, "completion")
        return answering(asked.stream, headers, lambda: start_completion(call, asked))
