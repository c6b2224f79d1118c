# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Timelines`: how long sequences queue, prefill and decode, and which of them end how.

Rules. A sequence queues from its arrival at the head until the step that first computes something of it is planned,
prefills until its first token is sampled, and decodes until its last. A preempted one goes on where it was: what it
waits again is a part of its decoding, or of its prefill. End to end is from arrival to the last token. The last two are
noted for what ended by itself ("stop" and "length"), the first two for all that came so far.

Cheap where it matters: a step in which nothing has its first token and nothing ends costs one look at an empty set.
Times are of the monotonic clock, and given. One thread makes every call but `document`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from metrale_ray.histogram import Histogram
from metrale_ray.scheduler.request import FinishReason, RequestId

_COMPLETE = ("stop", "length")


@dataclass(slots=True)
class _Timeline:
    arrived_s: float
    num_prompt_tokens: int
    began_s: float | None = None
    first_token_s: float | None = None


class Timelines:
    """Of all sequences of one engine."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._queue = Histogram()
        self._prefill = Histogram()
        self._decode = Histogram()
        self._end_to_end = Histogram()
        self._live: dict[RequestId, _Timeline] = {}
        self._prefilling: set[RequestId] = set()

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._live)

    def arrived(self, request_ids: Sequence[RequestId], num_prompt_tokens: int, at_s: float) -> None:
        """The sequences of one request came to the head at `at_s`."""
        for request_id in request_ids:
            self._live[request_id] = _Timeline(at_s, num_prompt_tokens)

    def begin(self, request_ids: Iterable[RequestId], now_s: float) -> None:
        """A step was planned that computes these from their start, for the first time or again."""
        for request_id in request_ids:
            timeline = self._live.get(request_id)
            if timeline is not None and timeline.began_s is None:
                timeline.began_s = now_s
                self._queue.observe(now_s - timeline.arrived_s)
                self._prefilling.add(request_id)

    def sampled(self, request_ids: Iterable[RequestId], now_s: float) -> None:
        """Each of these has one more token."""
        if not self._prefilling:
            return
        for request_id in self._prefilling.intersection(request_ids):
            self._prefilling.remove(request_id)
            timeline = self._live[request_id]
            assert timeline.began_s is not None, "what prefills has begun"
            timeline.first_token_s = now_s
            self._prefill.observe(now_s - timeline.began_s)
            self.num_prompt_tokens += timeline.num_prompt_tokens

    def ended(self, request_id: RequestId, reason: FinishReason, now_s: float) -> None:
        """The sequence has ended. One that is not here has ended before."""
        timeline = self._live.pop(request_id, None)
        if timeline is None:
            return
        self._prefilling.discard(request_id)
        self.finished[reason] += 1
        if reason in _COMPLETE and timeline.first_token_s is not None:
            self._decode.observe(now_s - timeline.first_token_s)
            self._end_to_end.observe(now_s - timeline.arrived_s)

    def never_began(self, reason: FinishReason) -> None:
        """A sequence ended before the engine heard of it."""
        self.finished[reason] += 1

    def document(self) -> dict[str, Any]:
        """The four histograms, in seconds. From any thread."""
        return {
            "queue": self._queue.document(),
            "prefill": self._prefill.document(),
            "decode": self._decode.document(),
            "end_to_end": self._end_to_end.document(),
        }
