# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the samples of a run say together, computed by hand for a few."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.traffic.arrivals import Closed
from metrale_ray.traffic.dialect import Dialect
from metrale_ray.traffic.drive import Run
from metrale_ray.traffic.lag import is_bottleneck
from metrale_ray.traffic.lengths import read_lengths
from metrale_ray.traffic.questions import Plan
from metrale_ray.traffic.report import make_report, percentile, summary_ms
from metrale_ray.traffic.sample import Sample
from metrale_ray.traffic.words import Words


def run_of(*samples: Sample) -> Run:
    """A run from second 100 to 102 that saw the samples."""
    run = Run(Plan(Closed(1), read_lengths("1"), read_lengths("1")), Dialect("m"), Words(), "http://x", None)
    run.samples = list(samples)
    run.start_s, run.end_s = 100.0, 102.0
    return run


def answered(sent_s: float, arrivals_s: list[float], ended_s: float, num_output: int | None) -> Sample:
    sample = Sample(sent_s, num_input=None if num_output is None else 10, num_output=num_output, finish_reason="length")
    for arrival_s in arrivals_s:
        sample.note_piece(arrival_s)
    sample.ended_s = ended_s
    return sample


def test_throughput_and_times_are_those_of_the_answers() -> None:
    first = answered(100.0, [100.2, 100.3, 100.6], 100.7, 5)
    second = answered(100.5, [101.5], 102.0, 1)
    report = make_report(run_of(first, second))
    assert report["throughput"] == {"requests_per_s": 1.0, "input_tokens_per_s": 10.0, "output_tokens_per_s": 3.0}
    assert report["tokens"] == {"input": 20, "output": 6, "counted_by": "usage"}
    assert report["time_to_first_token_ms"]["p50"] == pytest.approx(600)
    assert report["time_to_first_token_ms"]["max"] == pytest.approx(1000)
    assert report["inter_token_ms"]["mean"] == pytest.approx(200)
    assert report["per_output_token_ms"]["mean"] == pytest.approx(100)  # 0.4 s for the 4 tokens after the first
    assert report["end_to_end_ms"]["p50"] == pytest.approx(1100)
    assert report["finish_reasons"] == {"length": 2}


def test_failures_are_counted_by_code_and_their_tokens_are_not() -> None:
    failed = [answered(100.0, [100.1, 100.2], 100.3, 2) for _ in range(3)]
    for sample, code in zip(failed, ("queue_full", "timeout", "queue_full"), strict=True):
        sample.fail(code, f"it was\n {code}")
        sample.fail("later", "does not count")
    report = make_report(run_of(*failed, answered(100.0, [100.5], 101.0, 1)))
    assert report["requests"]["failed"] == 3
    assert report["requests"]["succeeded"] == 1
    assert report["errors"] == {
        "queue_full": {"count": 2, "message": "it was queue_full"},
        "timeout": {"count": 1, "message": "it was timeout"},
    }
    assert report["tokens"]["output"] == 1


def test_without_usage_pieces_are_counted_and_the_report_says_so() -> None:
    report = make_report(run_of(answered(100.0, [100.5, 100.6], 101.0, None)))
    assert report["tokens"] == {"input": 0, "output": 2, "counted_by": "pieces"}


def test_a_run_without_any_answer_has_no_times_and_is_still_json() -> None:
    report = make_report(run_of(Sample(100.0)), is_interrupted=True)
    assert report["interrupted"]
    assert report["requests"] | {"most_at_once": 0} == {
        "sent": 1,
        "succeeded": 0,
        "failed": 0,
        "unfinished": 1,
        "most_at_once": 0,
    }
    assert report["end_to_end_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    json.dumps(report, allow_nan=False)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_grow_and_stay_among_the_values(values: list[float], one: float, other: float) -> None:
    ordered = sorted(values)
    low, high = sorted((one, other))
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 100) == ordered[-1]
    assert percentile(ordered, low) <= percentile(ordered, high) * (1 + 1e-9) + 1e-9


def test_a_summary_is_in_milliseconds() -> None:
    assert summary_ms([0.001, 0.003]) == pytest.approx({"mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98, "max": 3})


@pytest.mark.parametrize(
    ("lag_p99_s", "cpu_share", "expected"),
    [(0.001, 0.1, False), (0.05, 0.1, True), (0.001, 0.95, True), (None, 1, False)],
)
def test_a_client_that_is_late_or_busy_is_the_limit(lag_p99_s: float | None, cpu_share: float, expected: bool) -> None:
    assert is_bottleneck(lag_p99_s, cpu_share) is expected


def test_a_late_loop_makes_the_report_say_that_the_client_is_the_limit() -> None:
    run = run_of(answered(100.0, [100.5], 101.0, 1))
    run.lag.lags_s = array("d", [0.5] * 10)
    client = make_report(run)["client"]
    assert client["is_bottleneck"]
    assert client["lag_ms"]["p99"] == pytest.approx(500)
