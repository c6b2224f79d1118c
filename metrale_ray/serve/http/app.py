# SPDX-License-Identifier: MIT OR Apache-2.0
"""`create_app`: the FastAPI app of a service.

From the outside in: `access` (id, log), CORS where origins are listed (a browser's question before a request carries no
key, and a failure is for it to read too), `last_catch`, `auth`, `turnstile`, the router. Nothing is read of a body
before its route is known and the key was right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from metrale_ray.errors import ConfigError
from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.http import openapi
from metrale_ray.serve.http.access import ID_HEADER, Access
from metrale_ray.serve.http.auth import KeyCheck
from metrale_ray.serve.http.drain import Drain
from metrale_ray.serve.http.errors import add_handlers
from metrale_ray.serve.http.headers import IGNORED_HEADER
from metrale_ray.serve.http.last_catch import LastCatch
from metrale_ray.serve.http.metering import HttpMetrics
from metrale_ray.serve.http.routes_generation import GENERATION_BODIES, add_generation_routes
from metrale_ray.serve.http.routes_health import add_health_routes
from metrale_ray.serve.http.routes_models import add_models_routes
from metrale_ray.serve.http.routes_state import add_state_routes
from metrale_ray.serve.http.routes_tokens import TOKEN_BODIES, add_tokens_routes
from metrale_ray.serve.http.service import Service
from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.http.turnstile import Turnstile

TITLE = "metrale_ray"
SUMMARY = "OpenAI-compatible serving of mixture-of-experts models"
SHOWN_TO_PAGES = (ID_HEADER, IGNORED_HEADER, "Retry-After")
BODIES = (*GENERATION_BODIES, *TOKEN_BODIES)
"""The request models that the OpenAPI document describes."""


def create_app(models: Sequence[ServedModel], settings: HttpSettings, metrics: HttpMetrics) -> FastAPI:
    """The app; `app.state.drain` is its `Drain`. Raises ConfigError."""
    _check_names(models)
    service = Service(tuple(models), settings, metrics, Drain())
    app = FastAPI(
        title=TITLE,
        summary=SUMMARY,
        version=settings.versions.get("version", "0"),
        docs_url=None,  # its pages come from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.drain = service.drain
    for model in service.models:
        metrics.add_engine(model.names[0], model.backend.figures)
    add_handlers(app)
    _add_routes(app, service)
    _add_middlewares(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    add_generation_routes(app, service)
    add_health_routes(app, service)
    add_models_routes(app, service)
    add_state_routes(app, service)
    add_tokens_routes(app, service)
    document: dict[str, Any] = {}

    def described() -> dict[str, Any]:
        if not document:
            document.update(openapi.describe(app, service.settings, BODIES))
        return document

    app.openapi = described  # type: ignore[method-assign]  # as FastAPI has it


def _add_middlewares(app: FastAPI, service: Service) -> None:
    """The last one added is the outermost."""
    app.add_middleware(Turnstile)
    app.add_middleware(KeyCheck, settings=service.settings)
    app.add_middleware(LastCatch)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=SHOWN_TO_PAGES,
        )
    app.add_middleware(Access, metrics=service.metrics)


def _check_names(models: Sequence[ServedModel]) -> None:
    names = [name for model in models for name in model.names]
    if not names:
        raise ConfigError("a service needs at least one model")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"several models have the name {twice[0]!r}; each name belongs to one. Choose another.")
