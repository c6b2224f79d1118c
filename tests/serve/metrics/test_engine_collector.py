# SPDX-License-Identifier: MIT OR Apache-2.0
"""The head's document as Prometheus reads it: each number of it, under vLLM's name where there is one."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from metrale_ray.serve.metrics.engine_collector import EngineCollector
from metrale_ray.serve.metrics.front_metrics import FrontMetrics

SECONDS = {"bounds_s": [0.3, 1, 2.5], "counts": [1, 0, 2, 3], "sum_s": 17.5}
RANK = {"replies": 9, "last_lag_s": 0.25, "lag_s": 2.0, "max_lag_s": 0.5, "computed_s": 3.0, "waited_s": 1.0}
COMMAND = {f"{phase}_s": 1.0 for phase in ("plan", "send", "run", "reduce", "reply", "sample", "deliver")}
DOCUMENT: dict[str, Any] = {
    "phase": "ready",
    "why": None,
    "epoch": 3,
    "uptime_s": 60.0,
    "has_work": True,
    "progress_age_s": 1.5,
    "command": "decode",
    "running": 4,
    "waiting": 5,
    "cache": {"total_blocks": 8, "free_blocks": 6},
    "preemptions": 2,
    "expired": 1,
    "prompt_tokens": 100,
    "generation_tokens": 50,
    "seconds": dict.fromkeys(("queue", "prefill", "decode", "end_to_end"), SECONDS),
    "commands": {"decode": {**COMMAND, "by_status": {"ok": 7, "failed": 1}}},
    "digest": "00",
    "digest_mismatches": 0,
    "finished": {"stop": 3, "length": 0, "abort": 1, "error": 0},
    "rejected": {"queue_full": 6},
    "ranks": [
        {"rank": 0, "state": "ready", "first_expert": 0, "num_experts": 2, **RANK},
        {"rank": 1, "state": "failed", "first_expert": 2, "num_experts": 1, **RANK},
    ],
    "collectives": {"all_reduce": {"count": 11, "bytes": 1234, "seconds": 0.5}},
    "expert_tokens": [10, 20, 30],
    "fronts": 1,
    "refused_strangers": 0,
    "journal": {"is_on": False, "failure": "the disk is full", "num_let_go": 12},
    "left_out": [],
}


def told(document: dict[str, Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of one engine, by name and labels."""
    metrics = FrontMetrics()
    metrics.add_engine("m", lambda: document)
    families = text_string_to_metric_families(metrics.exposition()[0].decode())
    return {
        (sample.name, frozenset(item for item in sample.labels.items() if item[0] != "model_name")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("model_name") == "m"
    }


def test_each_figure_has_its_name_and_value() -> None:
    found = told(DOCUMENT)

    def value(name: str, **labels: str) -> float:
        return found[f"metrale:{name}", frozenset(labels.items())]

    assert (value("num_requests_running"), value("num_requests_waiting")) == (4, 5)
    assert value("kv_cache_usage_perc") == 0.25
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (100, 50)
    assert value("num_preemptions_total") == 2
    assert value("request_success_total", finished_reason="stop") == 3
    assert value("request_success_total", finished_reason="abort") == 1
    assert value("engine_rejections_total", code="queue_full") == 6
    assert value("commands_total", command="decode", status="failed") == 1
    assert value("command_seconds_total", command="decode", phase="sample") == 1.0
    assert (value("rank_state", rank="1", state="failed"), value("rank_state", rank="1", state="ready")) == (1, 0)
    assert (value("rank_last_lag_seconds", rank="1"), value("rank_lag_seconds_total", rank="1")) == (0.25, 2.0)
    assert value("expert_tokens_total", expert="2", rank="1") == 30
    assert ("metrale:expert_tokens_total", frozenset({("expert", "2"), ("rank", "0")})) not in found
    assert value("collective_bytes_total", collective="all_reduce") == 1234
    assert (value("engine_progress_age_seconds"), value("engine_epoch"), value("engine_has_work")) == (1.5, 3, 1)
    assert (value("engine_phase", phase="ready"), value("engine_phase", phase="ended")) == (1, 0)
    assert value("digest_mismatches_total") == 0
    assert (value("journal_on"), value("journal_records_let_go_total")) == (0, 12)


def test_an_engine_without_a_journal_has_no_series_of_one() -> None:
    found = told({**DOCUMENT, "journal": None})
    assert not [name for name, _ in found if "journal" in name]


def test_histograms_are_cumulative_and_end_in_all() -> None:
    found = told(DOCUMENT)
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "engine_request_latency"):
        buckets = [found[f"metrale:{name}_seconds_bucket", frozenset({("le", le)})] for le in ("0.3", "1.0", "2.5")]
        assert buckets == [1, 1, 3]
        assert found[f"metrale:{name}_seconds_bucket", frozenset({("le", "+Inf")})] == 6
        assert found[f"metrale:{name}_seconds_count", frozenset()] == 6
        assert found[f"metrale:{name}_seconds_sum", frozenset()] == 17.5


def test_an_engine_of_which_nothing_is_known_has_no_series_and_is_read_at_each_scrape() -> None:
    metrics = FrontMetrics()
    document: dict[str, Any] = {}
    metrics.add_engine("m", lambda: document)
    assert b'model_name="m"' not in metrics.exposition()[0]
    document["running"] = 3
    assert b'metrale:num_requests_running{model_name="m"} 3.0' in metrics.exposition()[0]


def test_several_engines_are_told_apart() -> None:
    metrics = FrontMetrics()
    metrics.add_engine("a", lambda: DOCUMENT)
    metrics.add_engine("b", lambda: {**DOCUMENT, "running": 9})
    content = metrics.exposition()[0].decode()
    assert 'metrale:num_requests_running{model_name="a"} 4.0' in content
    assert 'metrale:num_requests_running{model_name="b"} 9.0' in content


def test_a_document_that_lacks_any_one_key_is_shown_without_it() -> None:
    whole = len(told(DOCUMENT))
    for key in DOCUMENT:
        rest = {name: value for name, value in DOCUMENT.items() if name != key}
        assert 0 < len(told(rest)) <= whole


def test_every_series_is_described_before_there_is_an_engine() -> None:
    described = {family.name for family in EngineCollector().describe()}
    collector = EngineCollector()
    collector.add("m", lambda: DOCUMENT)
    assert described == {family.name for family in collector.collect()}
