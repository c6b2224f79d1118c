# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pairs of connected transports, of every kind, behind one way to run both ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from metrale_ray.baton import Baton, Process
from metrale_ray.protocol.keys import new_keys
from metrale_ray.protocol.transport import Transport, memory_pair
from metrale_ray.protocol.zmq_transport import ZmqTransport
from tests.simulation.network import Network
from tests.simulation.transports import LINK_HEARTBEAT, SimTransport

HEAD_KEYS, WORKER_KEYS = new_keys(), new_keys()
Task = Callable[[Transport], Any]


def run_memory(head: Task, worker: Task) -> dict[str, Any]:
    """Run both ends as threads under one baton; each one's result or exception."""
    baton = Baton(7)
    ends = dict(zip(("head", "worker"), memory_pair(baton, "the head", "the worker"), strict=True))
    return baton.run({"head": lambda: head(ends["head"]), "worker": lambda: worker(ends["worker"])})


def run_simulated(head: Task, worker: Task) -> dict[str, Any]:
    """Run both ends as threads under one baton, over the simulated network; each one's result or exception."""
    baton, address = Baton(7), "tcp://head:1"
    network = Network(baton, 7)
    listening = SimTransport(baton, "the worker", None, address, WORKER_KEYS.public)
    network.listen(Process("the head"), address, HEAD_KEYS.public, listening.accept)

    def call() -> Any:
        keys = (WORKER_KEYS.public, HEAD_KEYS.public)
        end = network.connect(Process("the worker"), address, "the head", *keys, LINK_HEARTBEAT)
        return worker(SimTransport(baton, "the head", end))

    return baton.run({"head": lambda: head(listening), "worker": call})


def run_zmq(head: Task, worker: Task) -> dict[str, Any]:
    """Run both ends as threads over TCP; each one's result or exception."""
    listening, calling = zmq_pair()
    try:
        return run_threads({"head": lambda: head(listening), "worker": lambda: worker(calling)})
    finally:
        listening.close()
        calling.close()


def zmq_pair() -> tuple[ZmqTransport, ZmqTransport]:
    """A listening end and one that calls it, which need not have met yet."""
    listening = ZmqTransport.listen("127.0.0.1", "the worker", HEAD_KEYS, WORKER_KEYS.public)
    return listening, ZmqTransport.connect(listening.address, "the head", WORKER_KEYS, HEAD_KEYS.public)


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


RUNS = {"memory": run_memory, "simulated": run_simulated, "zmq": run_zmq}
