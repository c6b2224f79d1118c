# SPDX-License-Identifier: MIT OR Apache-2.0
"""`RaySession`: one engine's hold on the Ray that its process is connected to.

Rules. A process is connected to one Ray at a time. One that was connected by somebody else is used and left alone; one
that was started or joined here is left by the last engine that uses it. SIGTERM is the caller's own business: Ray's
start puts a handler of its own in place of the caller's, and loses a signal that comes meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

import ray

from metrale_ray.cluster.endings import unreachable
from metrale_ray.errors import StartError
from metrale_ray.reach import why_silent

SIGACTION_BYTES = 1024  # more than struct sigaction takes anywhere
KEEP_S = 0.005  # how long Ray's handler may stay; it is there for a second otherwise
LOCAL = "local"  # a Ray on this machine, started here

_lock = threading.RLock()
_users: dict[
    str, int
] = {}  # by address: how many engines use the Ray that was joined here; Ray itself has one a process
_joined_as: dict[str, tuple[str, str]] = {}  # by address: which Ray it was


class RaySession:
    """Not joined yet. `is_local`: the Ray was started here, so that all its ranks are on this machine."""

    def __init__(self) -> None:
        self.is_local = False
        self._address: str | None = None  # of the Ray that was joined here, while this engine uses it
        self._joined: tuple[str, str] | None = None  # which one it was

    @property
    def is_lost(self) -> bool:
        """Whether the process is connected to another Ray by now, or anew: nothing of this one means anything there."""
        return self._joined is not None and ray.is_initialized() and self._joined != _connected()

    def join(self, address: str | None) -> None:
        """Connect to the Ray at `address`, or start one here. Raises StartError when it cannot be reached."""
        with _lock:
            if ray.is_initialized():
                self._joined = _connected()
                self._share(self._joined)
                return
            _users.clear()  # whoever was connected before has lost its Ray
            target = address or LOCAL
            silent = why_silent(target)
            if silent is not None:
                raise StartError(f"cannot reach Ray at {target!r}: {silent}")
            self._hold(target)  # from now on: an interrupt may come before `init` returns
            try:
                with _callers_sigterm():
                    ray.init(
                        address=target,
                        include_dashboard=False if self.is_local else None,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                    )
            except Exception as error:
                # That a node did not come up in time is a plain Exception of Ray's. What a handler of the caller's
                # raises is the caller's.
                if isinstance(error, ConnectionError | ValueError | RuntimeError) or type(error) is Exception:
                    raise unreachable(target, error) from error
                raise
            self._joined = _joined_as[target] = _connected()

    def leave(self) -> None:
        """This engine needs it no more; the last one that does disconnects, and ends a Ray that was started here."""
        with _lock:
            address, self._address = self._address, None
            if address is None or address not in _users or self.is_lost:  # the Ray of now is another's
                return
            _users[address] -= 1
            if _users[address] == 0:
                del _users[address]
                ray.shutdown()

    def _share(self, joined: tuple[str, str]) -> None:
        for address in [address for address in _users if _joined_as.get(address, joined) != joined]:
            del _users[address]  # somebody shut it down and joined this one
        for address in _users:
            self._hold(address)

    def _hold(self, address: str) -> None:
        self._address, self.is_local = address, address == LOCAL
        _users[address] = _users.get(address, 0) + 1


def _connected() -> tuple[str, str]:
    """Which Ray this is, and which of the process's connections to it."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


@contextlib.contextmanager
def _callers_sigterm() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM, and give it the signal that came while Ray's was in its place.

    Where the caller has none, the process ends by Ray's `sys.exit`, which cleans up. Either is installed anew after the
    start, as Ray's compiled part puts one below them that writes a dump and aborts.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if not callable(handler):
        yield
        signal.signal(signal.SIGTERM, signal.SIG_IGN if handler == signal.SIG_IGN else signal.getsignal(signal.SIGTERM))
        return
    with _noted_signals() as came, _pythons_handler_kept():
        try:
            yield
        except SystemExit:  # Ray's handler raises it
            if signal.SIGTERM not in came():
                raise
        finally:
            signal.signal(signal.SIGTERM, handler)
        if signal.SIGTERM in came():
            handler(signal.SIGTERM, None)


@contextlib.contextmanager
def _pythons_handler_kept() -> Iterator[None]:
    """In the middle of its start, Ray's compiled part puts a handler below Python's that writes a dump and aborts.

    A thread puts Python's back at once: Python itself can only from the main thread, which is in Ray's code then.
    """
    set_action = ctypes.CDLL(None).sigaction
    pythons = ctypes.create_string_buffer(SIGACTION_BYTES)
    set_action(signal.SIGTERM, None, pythons)
    over = threading.Event()

    def keep() -> None:
        while not over.wait(KEEP_S):
            set_action(signal.SIGTERM, pythons, None)

    keeper = threading.Thread(target=keep, name="sigterm-keeper", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


@contextlib.contextmanager
def _noted_signals() -> Iterator[Callable[[], set[int]]]:
    """A function that tells which signals have come, whatever their handlers made of them."""
    ours, pythons = os.pipe()
    for end in (ours, pythons):
        os.set_blocking(end, False)
    seen: set[int] = set()

    def came() -> set[int]:
        with contextlib.suppress(BlockingIOError):
            seen.update(os.read(ours, 4096))
        return seen

    before = signal.set_wakeup_fd(pythons, warn_on_full_buffer=False)
    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        os.close(ours)
        os.close(pythons)
