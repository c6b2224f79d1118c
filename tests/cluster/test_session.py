# SPDX-License-Identifier: MIT OR Apache-2.0
"""The process's Ray: who ends it, and what becomes of a SIGTERM while it starts. Ray itself is stood in for."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from metrale_ray.cluster import session
from metrale_ray.cluster.session import RaySession
from metrale_ray.errors import StartError


class FakeRay:
    """Ray as far as a session uses it."""

    def __init__(self) -> None:
        self.is_up = False
        self.starts: list[str] = []
        self.num_jobs = 0
        self.during_init: Callable[[], None] = lambda: None

    def is_initialized(self) -> bool:
        return self.is_up

    def init(self, address: str, **options: Any) -> None:
        self.starts.append(address)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        self.during_init()
        self.is_up = True
        self.num_jobs += 1

    def get_runtime_context(self) -> SimpleNamespace:
        job = str(self.num_jobs)
        return SimpleNamespace(get_node_id=lambda: "node", get_job_id=lambda: job)

    def shutdown(self) -> None:
        self.is_up = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setattr(session, "ray", fake)
    before = signal.getsignal(signal.SIGTERM)
    yield fake
    signal.signal(signal.SIGTERM, before)
    session._users.clear()


class Asked(Exception):
    """What the caller's own handler raises."""


def ask(number: int, frame: object) -> NoReturn:
    raise Asked


def test_the_last_engine_of_a_process_ends_the_ray_that_was_started_for_the_first(fake: FakeRay) -> None:
    first, second = RaySession(), RaySession()
    first.join(None)
    second.join(None)
    assert (fake.starts, first.is_local, second.is_local) == (["local"], True, True)
    first.leave()
    first.leave()
    assert fake.is_up
    second.leave()
    assert not fake.is_up


def test_a_ray_that_somebody_else_connected_is_left_alone(fake: FakeRay) -> None:
    fake.is_up = True
    joined = RaySession()
    joined.join(None)
    joined.leave()
    assert (fake.is_up, fake.starts, joined.is_local) == (True, [], False)


def test_a_ray_that_was_shut_down_under_an_engine_is_started_anew_and_ended_by_its_own_engine(fake: FakeRay) -> None:
    old, new = RaySession(), RaySession()
    old.join(None)
    fake.shutdown()
    new.join("10.0.0.1:6379")
    assert (fake.starts, new.is_local) == (["local", "10.0.0.1:6379"], False)
    old.leave()
    assert fake.is_up
    new.leave()
    assert not fake.is_up


def test_a_ray_that_cannot_be_reached_is_a_start_error(fake: FakeRay) -> None:
    def refuse() -> None:
        raise ConnectionError("nobody there")

    fake.during_init = refuse
    with pytest.raises(StartError, match=r"cannot reach Ray at '10\.0\.0\.1:1': nobody there"):
        RaySession().join("10.0.0.1:1")


@pytest.mark.parametrize("is_swallowed", [False, True])
def test_a_sigterm_while_ray_starts_goes_to_the_callers_handler(fake: FakeRay, is_swallowed: bool) -> None:
    def terminate() -> None:
        with contextlib.suppress(SystemExit) if is_swallowed else contextlib.nullcontext():
            os.kill(os.getpid(), signal.SIGTERM)

    fake.during_init = terminate
    signal.signal(signal.SIGTERM, ask)
    with pytest.raises(Asked):
        RaySession().join(None)
    assert signal.getsignal(signal.SIGTERM) is ask


def test_another_end_of_the_process_while_ray_starts_goes_on(fake: FakeRay) -> None:
    fake.during_init = lambda: sys.exit(3)
    signal.signal(signal.SIGTERM, ask)
    with pytest.raises(SystemExit, match="3"):
        RaySession().join(None)


def test_rays_own_handler_stays_where_the_caller_has_none(fake: FakeRay) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    RaySession().join(None)
    with pytest.raises(SystemExit, match="15"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_caller_that_ignores_the_signal_goes_on_doing_so(fake: FakeRay) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    RaySession().join(None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_handler_that_compiled_code_puts_below_pythons_does_not_stay(fake: FakeRay) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def end_at_sigterm_then_wait() -> None:
        libc.signal(signal.SIGTERM, None)  # the default: the process would end
        deadline = time.monotonic() + 10
        while pythons_action() != before and time.monotonic() < deadline:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, ask)
    before = pythons_action()
    fake.during_init = end_at_sigterm_then_wait
    with pytest.raises(Asked):
        RaySession().join(None)


def pythons_action() -> bytes:
    """The address of the function that the kernel calls at SIGTERM."""
    action = ctypes.create_string_buffer(session.SIGACTION_BYTES)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action.raw[:8]


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup."), RuntimeError("no")])
def test_a_ray_that_does_not_come_up_is_a_start_that_failed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init(**options: object) -> None:
        raise error

    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session.ray, "init", init)
    with pytest.raises(StartError, match="cannot start a Ray here"):
        RaySession().join(None)


@pytest.mark.parametrize("by_us", [False, True])
def test_a_ray_that_was_joined_after_ours_was_shut_down_is_left_alone(fake: FakeRay, by_us: bool) -> None:
    first, second = RaySession(), RaySession()
    first.join(None)
    assert not first.is_lost
    fake.shutdown()
    assert not first.is_lost  # there is none at all
    if by_us:
        second.join(None)
    else:
        fake.init("theirs")
    assert first.is_lost
    first.leave()
    assert fake.is_up
    if not by_us:
        second.join(None)
        assert not second.is_local
    second.leave()
    assert fake.is_up == (not by_us)
