# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a person sees while a batch goes on, and in the end."""

from __future__ import annotations

import asyncio
import contextlib
import io

from metrale_ray.batch.shown import RATE_OVER_S, Rate, line, show
from metrale_ray.batch.tally import BatchSummary, Tally

USAGE = {"prompt_tokens": 3, "completion_tokens": 5}


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def tally(clock: Clock, num_requests: int = 10) -> Tally:
    found = Tally(num_requests, clock)
    found.begin()
    return found


def test_a_line_says_what_is_done_what_failed_how_fast_and_how_long_it_takes_yet() -> None:
    clock = Clock()
    counts = tally(clock)
    counts.num_before = 2
    assert line(counts, 0.0) == "2 of 10 requests, 0 tokens/s"
    clock.now_s += 60
    counts.answered(USAGE)
    assert line(counts, 12.4) == "3 of 10 requests, 12 tokens/s, 0:07:00 left"
    counts.answered(None)
    assert line(counts, 12.4) == "4 of 10 requests, 1 errors, 12 tokens/s, 0:03:00 left"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    counts = tally(clock)
    rate = Rate(counts)
    assert rate() == 0.0
    counts.tokens(100)
    clock.now_s += RATE_OVER_S
    assert rate() == 100 / RATE_OVER_S
    clock.now_s += RATE_OVER_S / 2
    assert rate() == 100 / RATE_OVER_S  # over too short a time it is none
    clock.now_s += RATE_OVER_S / 2
    assert rate() == 0.0


def shown(stream: io.StringIO, counts: Tally) -> str:
    """What is written until there is something."""

    async def show_a_little() -> None:
        task = asyncio.ensure_future(show(counts, stream, line_every_s=0.0))
        for _ in range(1000):
            await asyncio.sleep(0)
            if stream.getvalue().count("of 10 requests"):
                break
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(show_a_little())
    return stream.getvalue()


def test_elsewhere_than_on_a_terminal_it_is_a_line_now_and_then() -> None:
    text = shown(io.StringIO(), tally(Clock()))
    assert set(text.splitlines()) == {"0 of 10 requests, 0 tokens/s"}


def test_on_a_terminal_it_is_a_bar() -> None:
    assert "0 of 10 requests" in shown(Terminal(), tally(Clock()))


def test_the_summary_counts_requests_errors_tokens_and_seconds() -> None:
    clock = Clock()
    counts = tally(clock)
    counts.num_before, counts.num_errors = 7, 1
    counts.answered(USAGE)
    counts.answered(USAGE)
    counts.answered(None)
    clock.now_s += 4
    assert counts.summary() == BatchSummary(10, 7, 2, 6, 10, 4.0)
    assert str(counts.summary()) == (
        "10 requests (7 of them before), 2 errors; 6 tokens in, 10 out in 4.0 s, 2.5 tokens/s"
    )
    assert str(Tally(3, clock).summary()) == "3 requests, 0 errors; 0 tokens in, 0 out in 0.0 s"
