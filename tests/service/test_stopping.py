# SPDX-License-Identifier: MIT OR Apache-2.0
"""Signals: the first asks for an end in order, the second for one at once."""

from __future__ import annotations

import os
import signal

import pytest

from metrale_ray.service.stopping import Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_is_urgent(number: signal.Signals) -> None:
    with Stopping().handled() as stopping:
        assert not stopping.is_asked
        os.kill(os.getpid(), number)
        stopping.wait(10)
        assert stopping.is_asked
        assert not stopping.is_urgent
        os.kill(os.getpid(), number)
        stopping.wait(10)
        assert stopping.is_urgent
        assert stopping.signals == [number, number]


def test_the_handlers_before_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stopping().handled():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping().handled() as stopping:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stopping.is_asked
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_wait_ends_when_something_else_has_changed() -> None:
    stopping = Stopping()
    stopping.wake()
    stopping.wait(10)
    assert not stopping.is_asked
