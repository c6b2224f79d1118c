# SPDX-License-Identifier: MIT OR Apache-2.0
"""`make_report`: what all samples of a run say together, as plain numbers that JSON takes.

Rules: throughput and times are of the requests that succeeded; the rest are counted by code. Percentiles are linear
between the nearest values, and None where there is no value.

The keys: `duration_s` from the first request to the last answer; `interrupted`; `requests` (`sent`, `succeeded`,
`failed`, `unfinished`, `most_at_once`); `errors` by code (`count`, the first `message`); `finish_reasons` by name;
`tokens` (`input`, `output`, `counted_by`: "usage", or "pieces" where the server does not tell); `throughput`
(`requests_per_s`, `input_tokens_per_s`, `output_tokens_per_s`); and, each with `mean`, `p50`, `p90`, `p99`, `max` in
milliseconds: `time_to_first_token_ms`, `inter_token_ms` (between two pieces of one answer), `per_output_token_ms` (from
the first piece to the last, by the tokens after the first), `end_to_end_ms`; `client` (`cpu_s`, `cpu_share` of a core,
`cpu_ms_per_1000_tokens`, `lag_ms` of its loop, `late_ms` behind the times at which requests were due, `is_bottleneck`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from metrale_ray.traffic.drive import Run
from metrale_ray.traffic.lag import MIN_LAGS, is_bottleneck
from metrale_ray.traffic.sample import Sample

PERCENTILES = (50, 90, 99)


def make_report(run: Run, *, is_interrupted: bool = False) -> dict[str, Any]:
    """The report of a run that has ended, or was cut short."""
    good = [sample for sample in run.samples if sample.has_succeeded]
    duration_s = run.passed_s
    num_input, num_output = sum(s.num_input or 0 for s in good), sum(map(_num_output, good))
    return {
        "duration_s": duration_s,
        "interrupted": is_interrupted,
        "requests": {
            "sent": len(run.samples),
            "succeeded": len(good),
            "failed": sum(s.error is not None for s in run.samples),
            "unfinished": sum(s.ended_s is None and s.error is None for s in run.samples),
            "most_at_once": run.peak_running,
        },
        "errors": _errors(run.samples),
        "finish_reasons": dict(Counter(s.finish_reason or "none" for s in good)),
        "tokens": {"input": num_input, "output": num_output, "counted_by": _counted_by(good)},
        "throughput": {
            "requests_per_s": _per_s(len(good), duration_s),
            "input_tokens_per_s": _per_s(num_input, duration_s),
            "output_tokens_per_s": _per_s(num_output, duration_s),
        },
        "time_to_first_token_ms": summary_ms(s.first_s - s.sent_s for s in good if s.first_s is not None),
        "inter_token_ms": summary_ms(gap_s for s in good for gap_s in s.gaps_s),
        "per_output_token_ms": summary_ms(_per_output_token_s(good)),
        "end_to_end_ms": summary_ms(s.ended_s - s.sent_s for s in good if s.ended_s is not None),
        "client": _client(run, num_output),
    }


def summary_ms(values_s: Iterable[float]) -> dict[str, float | None]:
    """Mean, percentiles and the largest of times in seconds, in milliseconds."""
    ordered = sorted(values_s)
    if not ordered:
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTILES}, "max": None}
    found = {f"p{percent}": 1000 * percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": 1000 * math.fsum(ordered) / len(ordered), **found, "max": 1000 * ordered[-1]}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the ordered values are, linear between the nearest two."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _num_output(sample: Sample) -> int:
    return sample.num_pieces if sample.num_output is None else sample.num_output


def _counted_by(samples: Sequence[Sample]) -> str:
    return "pieces" if any(sample.num_output is None for sample in samples) else "usage"


def _per_output_token_s(samples: Iterable[Sample]) -> Iterable[float]:
    for sample in samples:
        num_after_first = _num_output(sample) - 1
        if num_after_first > 0 and sample.first_s is not None and sample.last_s is not None:
            yield (sample.last_s - sample.first_s) / num_after_first


def _errors(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        if sample.error is not None:
            entry = found.setdefault(sample.error, {"count": 0, "message": sample.message})
            entry["count"] += 1
    return dict(sorted(found.items(), key=lambda item: -int(item[1]["count"])))


def _per_s(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _client(run: Run, num_output: int) -> dict[str, Any]:
    lags = sorted(run.lag.lags_s)
    lag_p99_s = percentile(lags, 99) if len(lags) >= MIN_LAGS else None
    return {
        "cpu_s": run.lag.cpu_s,
        "cpu_share": run.lag.cpu_share,
        "cpu_ms_per_1000_tokens": 1e6 * run.lag.cpu_s / num_output if num_output else None,
        "lag_ms": summary_ms(lags),
        "late_ms": summary_ms(sample.late_s for sample in run.samples),
        "is_bottleneck": is_bottleneck(lag_p99_s, run.lag.cpu_share),
    }
