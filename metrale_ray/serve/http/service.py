# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Service`: what all routes of one app share: its models, its settings, who counts, and whether it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from metrale_ray.serve.backend import ServedModel, model_named
from metrale_ray.serve.http.drain import Drain
from metrale_ray.serve.http.metering import HttpMetrics
from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.http.visit import VisitMeter, visit_of
from metrale_ray.serve.limits import ServeLimits
from metrale_ray.serve.openai.call import Call, Meter, NoMeter


@dataclass(frozen=True, slots=True)
class Service:
    """`models`: at least one; no name twice."""

    models: Sequence[ServedModel]
    settings: HttpSettings
    metrics: HttpMetrics
    drain: Drain

    @property
    def limits(self) -> ServeLimits:
        """What one request may ask for."""
        return self.settings.api.limits

    def model(self, name: str | None) -> ServedModel:
        """The model of this name; None is the only one there is. Raises ApiError 404 or 400."""
        return model_named(self.models, name)

    def call(self, request: Request, model_name: str | None, kind: str | None = None) -> Call:
        """A call for this model; `kind` is how its tokens are counted, None for not at all. Raises ApiError."""
        model = self.model(model_name)
        visit = visit_of(request.scope)
        meter: Meter = NoMeter()
        if kind is not None:
            meter = VisitMeter(visit, self.metrics.meter(model.names[0], kind))
        return Call(model, model_name or model.names[0], self.settings.api, visit.request_id, meter)
