# SPDX-License-Identifier: MIT OR Apache-2.0
"""`EngineCollector`: what the heads of a front's engines last told of themselves (see `figures`), for Prometheus.

Rules: nothing is counted here, and a scrape never waits for an engine: it shows the last document. Every front of an
engine shows the same numbers, so they are not to be added up over fronts. An engine of which nothing is known yet has
no series. A document of a version that lacks a key has no series for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

Document = Mapping[str, Any]
Labels = tuple[str, ...]
Values = Iterator[tuple[Labels, float]]
Read = Callable[[Document, str], Values]

_COMMAND_PHASES = ("plan", "send", "run", "reduce", "reply", "sample", "deliver")
_STATES = ("starting", "loading", "ready", "ended", "failed")


class EngineCollector(Collector):
    """A collector for a registry. `add` engines to it."""

    def __init__(self) -> None:
        self._engines: dict[str, Callable[[], Document]] = {}

    def add(self, model_name: str, figures: Callable[[], Document]) -> None:
        """Show an engine under this name. `figures` gives what its head told last, {} before."""
        self._engines[model_name] = figures

    def describe(self) -> Iterator[Metric]:
        """What the series are called, without any value."""
        return self._families({})

    def collect(self) -> Iterator[Metric]:
        """All series of all engines."""
        told = {name: figures() for name, figures in self._engines.items()}
        return self._families({name: document for name, document in told.items() if document})

    def _families(self, documents: Mapping[str, Document]) -> Iterator[Metric]:
        for name, text, labels, read, key in _GAUGES:
            gauge = GaugeMetricFamily(f"metrale:{name}", text, labels=("model_name", *labels))
            _fill(gauge, documents, read, key)
            yield gauge
        for name, text, labels, read, key in _COUNTERS:
            counter = CounterMetricFamily(f"metrale:{name}", text, labels=("model_name", *labels))
            _fill(counter, documents, read, key)
            yield counter
        for name, text, key in _HISTOGRAMS:
            histogram = HistogramMetricFamily(f"metrale:{name}", text, labels=("model_name",))
            for model_name, document in documents.items():
                found = document.get("seconds", {}).get(key)
                if found:
                    histogram.add_metric([model_name], _buckets(found), sum_value=found["sum_s"])
            yield histogram


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, documents: Mapping[str, Document], read: Read, key: str
) -> None:
    for model_name, document in documents.items():
        for labels, value in read(document, key):
            family.add_metric([model_name, *labels], value)


def _buckets(histogram: Document) -> list[tuple[str, float]]:
    """Upper bounds as texts, with the number of values up to each."""
    total, buckets = 0, []
    for bound, count in zip([*map(float, histogram["bounds_s"]), float("inf")], histogram["counts"], strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
    return buckets


def _plain(document: Document, key: str) -> Values:
    if key in document:
        yield (), float(document[key])


def _by_key(document: Document, key: str) -> Values:
    """One series for each key of a map."""
    for label, value in document.get(key, {}).items():
        yield (label,), float(value)


def _of_ranks(document: Document, key: str) -> Values:
    for rank in document.get("ranks", ()):
        yield (str(rank["rank"]),), float(rank[key])


def _of_collectives(document: Document, key: str) -> Values:
    for name, collective in document.get("collectives", {}).items():
        yield (name,), float(collective[key])


def _of_journal(document: Document, key: str) -> Values:
    journal = document.get("journal")
    if journal is not None:
        yield (), float(journal[key])


def _cache_use(document: Document, key: str) -> Values:
    cache = document.get(key, {})
    if cache.get("total_blocks"):
        yield (), 1.0 - cache["free_blocks"] / cache["total_blocks"]


def _phase(document: Document, key: str) -> Values:
    for state in _STATES[:-1]:
        yield (state,), float(document.get(key) == state)


def _rank_states(document: Document, key: str) -> Values:
    for rank in document.get("ranks", ()):
        for state in _STATES:
            yield (str(rank["rank"]), state), float(rank[key] == state)


def _statuses(document: Document, key: str) -> Values:
    for command, counters in document.get("commands", {}).items():
        for status, count in counters[key].items():
            yield (command, status), float(count)


def _command_seconds(document: Document, key: str) -> Values:
    for command, counters in document.get(key, {}).items():
        for phase in _COMMAND_PHASES:
            yield (command, phase), float(counters[f"{phase}_s"])


def _expert_tokens(document: Document, key: str) -> Values:
    tokens = document.get(key, ())
    for rank in document.get("ranks", ()):
        first = rank["first_expert"]
        for expert in range(first, min(first + rank["num_experts"], len(tokens))):
            yield (str(expert), str(rank["rank"])), float(tokens[expert])


Family = tuple[str, str, Labels, Read, str]
"""A name, a help text, the labels besides the model's name, and how the values are read of which key."""

_GAUGES: tuple[Family, ...] = (
    ("num_requests_running", "Sequences that have a slot.", (), _plain, "running"),
    ("num_requests_waiting", "Sequences that have none yet.", (), _plain, "waiting"),
    ("kv_cache_usage_perc", "The share of the KV cache's blocks that is in use, from 0 to 1.", (), _cache_use, "cache"),
    ("journal_on", "Whether the engine's journal is written; 0 when the disk refused it.", (), _of_journal, "is_on"),
    ("engine_phase", "1 for the phase that the engine is in.", ("phase",), _phase, "phase"),
    ("engine_epoch", "Which life of the group of ranks this is, under its head.", (), _plain, "epoch"),
    ("engine_has_work", "Whether a sequence waits or runs, or a command is under way.", (), _plain, "has_work"),
    (
        "engine_progress_age_seconds",
        "Seconds since a command last completed, while there is work; else 0.",
        (),
        _plain,
        "progress_age_s",
    ),
    ("engine_uptime_seconds", "Seconds since the head was started.", (), _plain, "uptime_s"),
    (
        "engine_fronts",
        "Sessions with the head: the fronts, and on Ray Serve the owner of the engine.",
        (),
        _plain,
        "fronts",
    ),
    ("rank_state", "1 for the state that a rank is in.", ("rank", "state"), _rank_states, "state"),
    (
        "rank_last_lag_seconds",
        "From rank 0's own end of the last command to this rank's reply.",
        ("rank",),
        _of_ranks,
        "last_lag_s",
    ),
    ("rank_max_lag_seconds", "The longest such lag since the start.", ("rank",), _of_ranks, "max_lag_s"),
)
_COUNTERS: tuple[Family, ...] = (
    ("prompt_tokens", "Tokens of prompts that were computed to their end.", (), _plain, "prompt_tokens"),
    ("generation_tokens", "Tokens that were sampled.", (), _plain, "generation_tokens"),
    (
        "request_success",
        "Sequences that the engine ended, by the reason.",
        ("finished_reason",),
        _by_key,
        "finished",
    ),
    ("num_preemptions", "Sequences that lost their slot for a time.", (), _plain, "preemptions"),
    ("requests_expired", "Sequences whose time limit passed.", (), _plain, "expired"),
    ("engine_rejections", "Requests that the head did not take, by the code.", ("code",), _by_key, "rejected"),
    ("commands", "Commands to all ranks, by how they ended.", ("command", "status"), _statuses, "by_status"),
    (
        "command_seconds",
        "The head's seconds in commands, by phase; reduce is a part of run.",
        ("command", "phase"),
        _command_seconds,
        "commands",
    ),
    ("rank_replies", "Commands that a rank has answered.", ("rank",), _of_ranks, "replies"),
    ("rank_lag_seconds", "The sum of a rank's lags behind rank 0.", ("rank",), _of_ranks, "lag_s"),
    ("rank_compute_seconds", "A rank's seconds in commands, outside sums.", ("rank",), _of_ranks, "computed_s"),
    ("rank_reduce_seconds", "A rank's seconds in sums over the ranks.", ("rank",), _of_ranks, "waited_s"),
    ("digest_mismatches", "Replies of ranks that were not in step.", (), _plain, "digest_mismatches"),
    (
        "expert_tokens",
        "Tokens that an expert was chosen for, over all layers.",
        ("expert", "rank"),
        _expert_tokens,
        "expert_tokens",
    ),
    ("collective_operations", "Sums over the ranks.", ("collective",), _of_collectives, "count"),
    ("collective_bytes", "Bytes of one rank's part in them.", ("collective",), _of_collectives, "bytes"),
    ("collective_seconds", "Rank 0's seconds in them.", ("collective",), _of_collectives, "seconds"),
    ("journal_records_let_go", "Records that the journal's disk was too slow for.", (), _of_journal, "num_let_go"),
    ("refused_strangers", "Frames and connections that the head refused.", (), _plain, "refused_strangers"),
)
_HISTOGRAMS = (
    ("request_queue_time_seconds", "Seconds from a sequence's arrival at the head to its first step.", "queue"),
    ("request_prefill_time_seconds", "Seconds from a sequence's first step to its first token.", "prefill"),
    ("request_decode_time_seconds", "Seconds from a sequence's first token to its last.", "decode"),
    ("engine_request_latency_seconds", "Seconds from a sequence's arrival at the head to its end.", "end_to_end"),
)
