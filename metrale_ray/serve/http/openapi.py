# SPDX-License-Identifier: MIT OR Apache-2.0
"""The OpenAPI document: what each route takes, and every answer that it may give.

Rules: bodies are described by the request models themselves, and failures by OpenAI's error object. A route lists the
statuses that it may answer with, those of the middlewares among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from metrale_ray.serve.http.settings import HttpSettings

REFERENCE = "#/components/schemas/{model}"

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_WORK_STATUSES = (400, 404, 408, 413, 415, 429, 500, 503, 504)
_TEXT_BY_STATUS = {
    400: "The request is wrong",
    401: "A key is missing or wrong",
    403: "The key does not open this route",
    404: "There is no such thing",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body has another form than JSON in UTF-8",
    429: "The queue is full",
    500: "The service or the engine failed",
    503: "The service is not ready, or shuts down",
    504: "The request took too long",
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """How a route says that its body is `model`."""
    schema = {"$ref": REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """How a route says which statuses it may fail with."""
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}}
    return {status: {"description": _TEXT_BY_STATUS[status], "content": content} for status in statuses}


def answer(description: str, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """How a route says what it gives: an object, and a stream of events where it can."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": content}}


def work_failures() -> dict[int | str, dict[str, Any]]:
    """Those of a route that has a body, and work to do for it."""
    return failures(*_WORK_STATUSES)


def describe(app: FastAPI, settings: HttpSettings, models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The whole document; `models` are those of the bodies."""
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas.get("$defs", {}), Error=_ERROR_SCHEMA)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)  # nothing here answers so
            if method == "get" and path in settings.keyless_paths:
                continue
            _ask_for_key(operation, path, settings)
    if settings.api_keys or settings.admin_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _ask_for_key(operation: dict[str, Any], path: str, settings: HttpSettings) -> None:
    is_admin = path.startswith("/admin/")
    if settings.api_keys or (is_admin and settings.admin_keys):
        operation["security"] = [{"key": []}]
        statuses = (401, 403) if is_admin else (401,)
        operation["responses"].update({str(key): value for key, value in failures(*statuses).items()})
