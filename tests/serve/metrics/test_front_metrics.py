# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a front counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from metrale_ray.serve.metrics.front_metrics import FrontMetrics
from metrale_ray.serve.openai.call import Meter


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def value(metrics: FrontMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_request_has_its_first_token_its_gaps_and_its_length() -> None:
    clock = Clock()
    metrics = FrontMetrics(clock)
    meter: Meter = metrics.meter("m", "chat")
    meter.prompt(12)
    clock.now_s += 0.5
    meter.tokens(1)
    for gap_s in (0.02, 0.04):
        clock.now_s += gap_s
        meter.tokens(2)
    clock.now_s += 1.0
    meter.finished("tool_calls")
    by_model = {"model_name": "m"}
    assert value(metrics, "metrale:requests_total", kind="chat", **by_model) == 1
    assert value(metrics, "metrale:request_prompt_tokens_sum", **by_model) == 12
    assert value(metrics, "metrale:time_to_first_token_seconds_sum", **by_model) == 0.5
    assert value(metrics, "metrale:time_to_first_token_seconds_bucket", le="0.25", **by_model) == 0
    assert value(metrics, "metrale:time_to_first_token_seconds_bucket", le="0.5", **by_model) == 1
    assert value(metrics, "metrale:inter_token_latency_seconds_count", **by_model) == 2
    assert abs((value(metrics, "metrale:inter_token_latency_seconds_sum", **by_model) or 0) - 0.06) < 1e-9
    assert abs((value(metrics, "metrale:e2e_request_latency_seconds_sum", **by_model) or 0) - 1.56) < 1e-9
    assert value(metrics, "metrale:sequences_finished_total", finished_reason="tool_calls", **by_model) == 1


def test_one_that_nobody_waited_for_is_counted_and_has_no_length() -> None:
    metrics = FrontMetrics(Clock())
    meter = metrics.meter("m", "completion")
    meter.finished("abort")
    assert value(metrics, "metrale:sequences_finished_total", finished_reason="abort", model_name="m") == 1
    assert value(metrics, "metrale:e2e_request_latency_seconds_count", model_name="m") is None


def test_http_requests_are_counted_by_route_and_status_and_in_flight_goes_back_to_zero() -> None:
    metrics = FrontMetrics()
    for _ in range(3):
        metrics.http_began()
    assert value(metrics, "metrale:http_requests_in_flight") == 3
    metrics.http_ended("/v1/models", 200, 0.1)
    metrics.http_ended("/v1/chat/completions", 429, 0.2)
    metrics.rejected("queue_full")
    metrics.http_ended("/v1/chat/completions", 499, 0.3)
    assert value(metrics, "metrale:http_requests_in_flight") == 0
    assert value(metrics, "metrale:http_requests_total", route="/v1/chat/completions", status="429") == 1
    assert value(metrics, "metrale:http_requests_total", route="/v1/chat/completions", status="499") == 1
    assert value(metrics, "metrale:http_request_duration_seconds_count", route="/v1/chat/completions") == 2
    assert value(metrics, "metrale:request_rejections_total", code="queue_full") == 1


def test_two_fronts_in_one_process_do_not_share_figures_and_the_text_can_be_read_back() -> None:
    one, two = FrontMetrics(), FrontMetrics()
    one.meter('a "name"\nof é', "chat").prompt(3)
    content, content_type = one.exposition()
    assert content_type.startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(content.decode())}
    labels = {sample.labels["model_name"] for sample in families["metrale:request_prompt_tokens"].samples}
    assert labels == {'a "name"\nof é'}
    assert b"model_name" not in two.exposition()[0]
