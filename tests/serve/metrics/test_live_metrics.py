# SPDX-License-Identifier: MIT OR Apache-2.0
"""GET /metrics of a live service: requests over HTTP are counted by the front and by its engine alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrale_ray.serve.metrics.front_metrics import FrontMetrics
from tests.service_rig import MODEL_NAME, ServiceRig, serving, write_model
from tests.test_head import until

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    metrics = FrontMetrics()
    with serving(write_model(tmp_path_factory.mktemp("succ")), ep_size=2, metrics=metrics) as rig:
        metrics.add_engine(MODEL_NAME, rig.process.head.figures)
        yield rig


def scrape(rig: ServiceRig) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    answer = rig.client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def settled(rig: ServiceRig) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The figures once the engine rests: an answer is out before its slots are freed, and freeing is a command too."""
    until(lambda: scrape(rig)["metrale:engine_has_work", frozenset()] == 0)
    return scrape(rig)


def growth(rig: ServiceRig, before: dict[tuple[str, frozenset[tuple[str, str]]], float]) -> dict[str, float]:
    """What has grown since, the values of all labels together."""
    grown: dict[str, float] = {}
    for (name, labels), value in scrape(rig).items():
        grown[name] = grown.get(name, 0.0) + value - before.get((name, labels), 0.0)
    return grown


def test_a_stream_a_whole_answer_and_a_refusal_are_counted(rig: ServiceRig) -> None:
    rig.live_probe()
    before = settled(rig)
    body = {"model": MODEL_NAME, "prompt": [3, 4, 5], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    assert rig.client.post(COMPLETIONS, json={**body, "n": 2}).status_code == 200
    with rig.client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        assert stream.read().rstrip().endswith(b"[DONE]")
    assert rig.client.post(COMPLETIONS, json={**body, "max_tokens": -1}).status_code == 400
    settled(rig)
    grown = growth(rig, before)
    assert grown["metrale:requests_total"] == 2
    assert grown["metrale:sequences_finished_total"] == grown["metrale:request_success_total"] == 3
    assert grown["metrale:generation_tokens_total"] == 18
    assert grown["metrale:prompt_tokens_total"] == 9
    assert grown["metrale:time_to_first_token_seconds_count"] == 2
    assert grown["metrale:e2e_request_latency_seconds_count"] == 3
    assert grown["metrale:request_queue_time_seconds_count"] == 3
    assert grown["metrale:request_decode_time_seconds_count"] == 3
    assert grown["metrale:inter_token_latency_seconds_count"] >= 2
    assert grown["metrale:request_rejections_total"] == 1
    assert grown["metrale:http_requests_total"] >= 4  # and the scrapes before
    assert grown["metrale:commands_total"] == grown["metrale:rank_replies_total"] / 2 > 0
    assert grown["metrale:expert_tokens_total"] == 3 * (3 + 5) * 2 * 2
    assert grown["metrale:collective_bytes_total"] > 0
    rig.live_probe()


def test_a_client_that_goes_is_counted_and_every_gauge_goes_back_to_zero(rig: ServiceRig) -> None:
    before = scrape(rig)
    body = {"model": MODEL_NAME, "prompt": [3], "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "n": 3}
    with rig.new_client() as leaving, leaving.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        next(stream.iter_raw())
        assert scrape(rig)["metrale:num_requests_running", frozenset()] == 3
    rig.wait_idle()
    until(lambda: growth(rig, before)["metrale:sequences_finished_total"] == 3)  # a moment later
    until(lambda: scrape(rig)["metrale:engine_has_work", frozenset()] == 0)  # its slots are freed on every rank
    assert growth(rig, before)["metrale:request_success_total"] == 3
    now = scrape(rig)
    assert now["metrale:sequences_finished_total", frozenset({("finished_reason", "abort")})] == 3
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_progress_age_seconds"):
        assert now[f"metrale:{gauge}", frozenset()] == 0
    assert now["metrale:http_requests_in_flight", frozenset()] == 1  # this scrape
    rig.live_probe()
