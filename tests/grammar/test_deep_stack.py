# SPDX-License-Identifier: MIT OR Apache-2.0
"""The deep stack: who gets it, what the process has afterwards, and what a failure becomes."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator

import pytest

from metrale_ray.errors import RequestError
from metrale_ray.grammar.deep_stack import STACK_BYTES, with_deep_stack

ATTRIBUTES_BYTES = 256  # more than a pthread_attr_t takes anywhere


def _own_stack_bytes() -> int:
    """The size of the stack that the calling thread has, as the system's threads library says."""
    library = ctypes.CDLL(None)
    library.pthread_self.restype = ctypes.c_void_p
    attributes = ctypes.create_string_buffer(ATTRIBUTES_BYTES)
    size = ctypes.c_size_t()
    assert library.pthread_getattr_np(ctypes.c_void_p(library.pthread_self()), attributes) == 0
    assert library.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    library.pthread_attr_destroy(attributes)
    return size.value


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that take Python's lock from each other wherever they may."""
    before_s, before_bytes = sys.getswitchinterval(), threading.stack_size()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)
    threading.stack_size(before_bytes)


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc or musl for the size of a stack")
@pytest.mark.usefixtures("restless")
def test_each_of_two_threads_gets_the_large_stack_every_time_and_the_process_keeps_its_setting() -> None:
    before = threading.stack_size()
    sizes: list[int] = []
    at_once = threading.Barrier(2)

    def work() -> None:
        for _ in range(150):
            at_once.wait(30)
            sizes.append(with_deep_stack(_own_stack_bytes))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 300
    assert min(sizes) >= STACK_BYTES
    assert threading.stack_size() == before


def test_a_thread_that_cannot_be_started_is_a_refusal_and_the_setting_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.stack_size()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RequestError, match="more address space or threads"):
            with_deep_stack(lambda: None)
    assert threading.stack_size() == before
    assert with_deep_stack(lambda: 1) == 1
