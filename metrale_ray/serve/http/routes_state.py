# SPDX-License-Identifier: MIT OR Apache-2.0
"""GET /version, /metrics and /admin/state: what the service is and how it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.http.auth import require_admin
from metrale_ray.serve.http.service import Service


def add_state_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of the service's own state."""

    @app.get("/version", summary="Versions")
    async def version() -> Mapping[str, str]:
        return service.settings.versions

    @app.get("/metrics", summary="Figures for Prometheus", response_class=Response)
    async def metrics() -> Response:
        content, content_type = service.metrics.exposition()
        return Response(content, headers={"Content-Type": content_type})

    @app.get("/admin/state", summary="Each engine's figures, ranks and processes; needs an admin key")
    async def state(request: Request) -> Response:
        require_admin(service.settings, request)
        front = {"draining": service.drain.is_draining, "running_requests": service.drain.num_running}
        models = [_model_state(model) for model in service.models]
        return Response(to_json({"front": front, "models": models}), media_type="application/json")


def _model_state(model: ServedModel) -> dict[str, Any]:
    health = model.backend.health()
    return {
        "names": list(model.names),
        "max_model_len": model.max_model_len,
        "is_ready": health.is_ready,
        "ready_reason": health.ready_reason,
        "is_moving": health.is_moving,
        "moving_reason": health.moving_reason,
        "engine": model.backend.figures(),
    }
