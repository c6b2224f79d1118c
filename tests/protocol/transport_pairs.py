# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pairs of connected transports, of both kinds, behind one way to run both ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from metrale_ray.baton import Baton
from metrale_ray.protocol.transport import Transport, memory_pair
from metrale_ray.protocol.zmq_transport import ZmqTransport

Task = Callable[[Transport], Any]


def run_memory(head: Task, worker: Task) -> dict[str, Any]:
    """Run both ends as threads under one baton; each one's result or exception."""
    baton = Baton(7)
    ends = dict(zip(("head", "worker"), memory_pair(baton, "the head", "the worker"), strict=True))
    return baton.run({"head": lambda: head(ends["head"]), "worker": lambda: worker(ends["worker"])})


def run_zmq(head: Task, worker: Task) -> dict[str, Any]:
    """Run both ends as threads over TCP; each one's result or exception."""
    listening = ZmqTransport.listen("127.0.0.1", "the worker")
    calling = ZmqTransport.connect(listening.address, "the head")
    try:
        return run_threads({"head": lambda: head(listening), "worker": lambda: worker(calling)})
    finally:
        listening.close()
        calling.close()


def run_threads(tasks: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}

    def live(name: str) -> None:
        try:
            results[name] = tasks[name]()
        except Exception as error:  # noqa: BLE001  handed to the test, whatever it is
            results[name] = error

    threads = [threading.Thread(target=live, args=(name,)) for name in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


RUNS = {"memory": run_memory, "zmq": run_zmq}
