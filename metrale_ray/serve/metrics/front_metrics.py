# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FrontMetrics`: what one front counts of its clients' requests, and its engines' figures beside it, for Prometheus.

Rules: names are vLLM's with `metrale:` in front, where vLLM has such a figure, and each series names its model. Label
values come from short lists (models, routes of the app, statuses, codes of ours), never from a client's text. Times
here are a client's, from the request's arrival at the front; the engine's own are in `engine_collector`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from metrale_ray.serve.metrics.engine_collector import EngineCollector

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
LENGTH_BUCKETS = (*(float(2**power) for power in range(18)),)

_BY_MODEL = ("model_name",)
_ABORTED = "abort"


class FrontMetrics:
    """The figures of one front, in a registry of its own. All methods are quick, and for one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._engines = EngineCollector()
        self.registry.register(self._engines)
        self._requests = _Requests(self.registry)
        self._in_flight = Gauge(
            "metrale:http_requests_in_flight", "HTTP requests that have no whole answer yet.", registry=self.registry
        )
        self._http = Counter(
            "metrale:http_requests",
            "HTTP requests by route and status; status 499: the client went before there was one.",
            ("route", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "metrale:http_request_duration_seconds",
            "Seconds from an HTTP request to the end of its answer.",
            ("route",),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self._rejections = Counter(
            "metrale:request_rejections",
            "HTTP requests that were turned away or failed, by the code that the client was given.",
            ("code",),
            registry=self.registry,
        )

    def add_engine(self, model_name: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Show the figures of an engine too: what its head last told, {} before that. They are read at each scrape."""
        self._engines.add(model_name, figures)

    def meter(self, model_name: str, kind: str) -> RequestMeter:
        """For one request to a model, which begins now; `kind` is "chat" or "completion"."""
        return RequestMeter(self._requests, model_name, kind, self._clock)

    def http_began(self) -> None:
        """An HTTP request came."""
        self._in_flight.inc()

    def http_ended(self, route: str, status: int, duration_s: float) -> None:
        """It has its answer, or its client has gone. `route` is one of the app's own."""
        self._in_flight.dec()
        self._http.labels(route, str(status)).inc()
        self._http_seconds.labels(route).observe(duration_s)

    def rejected(self, code: str) -> None:
        """A request was turned away or failed, with this code."""
        self._rejections.labels(code).inc()

    def exposition(self) -> tuple[bytes, str]:
        """Everything as Prometheus reads it, and the content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _Requests:
    """The figures that requests to models share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _BY_MODEL, buckets=buckets, registry=registry)

        self.first_token = histogram(
            "metrale:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token = histogram(
            "metrale:inter_token_latency_seconds",
            "Seconds between two arrivals of tokens for one request.",
            TOKEN_BUCKETS_S,
        )
        self.end_to_end = histogram(
            "metrale:e2e_request_latency_seconds",
            "Seconds from a request's arrival to the end of each of its sequences.",
            REQUEST_BUCKETS_S,
        )
        self.prompt_length = histogram(
            "metrale:request_prompt_tokens", "Tokens of the prompts of a request.", LENGTH_BUCKETS
        )
        self.requests = Counter(
            "metrale:requests", "Requests to a model, by kind.", ("model_name", "kind"), registry=registry
        )
        self.finished = Counter(
            "metrale:sequences_finished",
            "Sequences that ended, by the reason that the client was given; abort: it waited no more.",
            ("model_name", "finished_reason"),
            registry=registry,
        )


class RequestMeter:
    """A `Meter` (see `serve.openai.call`) for one request to a model, which begins when this is made."""

    def __init__(self, requests: _Requests, model_name: str, kind: str, clock: Callable[[], float]) -> None:
        self._requests = requests
        self._model_name = model_name
        self._clock = clock
        self._began_s = clock()
        self._last_token_s: float | None = None
        requests.requests.labels(model_name, kind).inc()
        self._inter_token = requests.inter_token.labels(model_name)

    def prompt(self, num_tokens: int) -> None:
        """Its prompts have so many tokens together."""
        self._requests.prompt_length.labels(self._model_name).observe(num_tokens)

    def tokens(self, count: int) -> None:
        """So many tokens came just now."""
        now_s = self._clock()
        if self._last_token_s is None:
            self._requests.first_token.labels(self._model_name).observe(now_s - self._began_s)
        else:
            self._inter_token.observe(now_s - self._last_token_s)
        self._last_token_s = now_s

    def finished(self, reason: str) -> None:
        """One sequence ended."""
        requests, model_name = self._requests, self._model_name
        requests.finished.labels(model_name, reason).inc()
        if reason != _ABORTED:
            requests.end_to_end.labels(model_name).observe(self._clock() - self._began_s)
