# SPDX-License-Identifier: MIT OR Apache-2.0
"""GET /v1/models and /v1/models/{id}: the models that answer now. One that has not produced a token yet does not."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.openapi import failures
from metrale_ray.serve.http.routes_health import not_ready_reasons
from metrale_ray.serve.http.service import Service


def add_models_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of models."""

    @app.get("/v1/models", summary="The models that answer now, under each of their names", responses=failures(503))
    async def models() -> dict[str, Any]:
        ready = [model for model in service.models if model.backend.health().is_ready]
        if not ready:
            raise ApiError(503, "; ".join(not_ready_reasons(service)), code="not_ready")
        return {"object": "list", "data": [_entry(model, name) for model in ready for name in model.names]}

    @app.get("/v1/models/{model_id:path}", summary="One model", responses=failures(404, 503))
    async def model(model_id: str) -> dict[str, Any]:
        found = service.model(model_id)
        health = found.backend.health()
        if not health.is_ready:
            raise ApiError(503, f"{model_id}: {health.ready_reason}", code="not_ready")
        return _entry(found, model_id)


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "metrale_ray",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_model_len,
    }
