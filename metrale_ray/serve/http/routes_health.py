# SPDX-License-Identifier: MIT OR Apache-2.0
"""GET /health/live, /health/ready, /health/progress and /health.

live      this process answers; nothing else. Whoever restarts processes asks this.
ready     every model has produced a token, is heard of and moves, and the service does not end. /health is the same.
progress  no work waits anywhere without a command completing. It also holds while an engine starts.
Rules: what each model says was noted before; no route here waits for anything. The log has a line where readiness is
found to have changed, with the reason where it was lost; a start and a drain are told by others.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI

from metrale_ray.serve.failures import ApiError
from metrale_ray.serve.http.drain import draining
from metrale_ray.serve.http.openapi import failures
from metrale_ray.serve.http.service import Service
from metrale_ray.serve.http.settings import LIVE_PATH

log = logging.getLogger(__name__)

OK: dict[str, Any] = {"status": "ok"}


class Readiness:
    """What was found last, so that the log has what changed."""

    def __init__(self) -> None:
        self._was_ready: bool | None = None

    def note(self, reasons: list[str]) -> None:
        """The service was asked, and these are the reasons why it is not ready."""
        is_ready = not reasons
        if self._was_ready and not is_ready:
            log.warning("not ready any more: %s", "; ".join(reasons))
        elif self._was_ready is False and is_ready:
            log.info("ready")
        self._was_ready = is_ready


def add_health_routes(app: FastAPI, service: Service) -> None:
    """Add the routes of health."""
    readiness = Readiness()

    @app.get(LIVE_PATH, summary="Whether this process answers")
    async def live() -> dict[str, Any]:
        return OK

    @app.get("/health", summary="The same as /health/ready", responses=failures(503))
    @app.get("/health/ready", summary="Whether requests are answered now", responses=failures(503))
    async def ready() -> dict[str, Any]:
        if service.drain.is_draining:
            raise draining()
        reasons = not_ready_reasons(service)
        readiness.note(reasons)
        _check(reasons, "not_ready")
        return OK

    @app.get("/health/progress", summary="Whether work that waits is done", responses=failures(503))
    async def progress() -> dict[str, Any]:
        reasons = [
            f"{model.names[0]}: {health.moving_reason}"
            for model in service.models
            if not (health := model.backend.health()).is_moving
        ]
        _check(reasons, "no_progress")
        return OK


def not_ready_reasons(service: Service) -> list[str]:
    """Why each model that is not ready is not."""
    return [
        f"{model.names[0]}: {health.ready_reason}"
        for model in service.models
        if not (health := model.backend.health()).is_ready
    ]


def _check(reasons: list[str], code: str) -> None:
    if reasons:
        raise ApiError(503, "; ".join(reasons), code=code)
