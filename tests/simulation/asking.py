# SPDX-License-Identifier: MIT OR Apache-2.0
"""`asking`: one front of a life as a script: it sends its requests, reads what comes, and aborts, finishes and leaves.

Each request has a reader, a task of its own, as the users of one front have. What reaches the front is kept in `Got`,
whatever becomes of it there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from metrale_ray.baton import Task
from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient, Output
from metrale_ray.protocol.front.handle import RequestHandle
from tests.simulation.invariants import Got
from tests.simulation.seat import Seat
from tests.simulation.workload import Leave

READY_S = 150.0
"""How long an engine may take to be ready: longer than its own limits for that."""

OPEN_TIMEOUT_S = 120.0
"""Longer than anything that a head may be held up by and live."""

Outputs = Callable[[FrontClient, Callable[[Output], None]], None]
"""Tells where every output that reaches a client goes."""


def asking(got: Sequence[Got], leaves: Sequence[Leave], listen: Outputs) -> Callable[[Seat], None]:
    """The script of the front with these requests."""

    def script(seat: Seat) -> None:
        if not seat.baton.wait_until(lambda: seat.is_ready or seat.has_head_ended, READY_S, "a ready engine"):
            return  # as whoever starts an engine gives up
        if not seat.is_ready:
            return
        began_s = seat.now_s
        with seat.client() as client:
            arrived: defaultdict[int, list[Output]] = defaultdict(list)  # by the request's number
            listen(client, lambda output: arrived[output.request_id].append(output))
            try:
                client.wait_opened(OPEN_TIMEOUT_S)
            except EngineDead:
                return
            for leave in leaves:
                seat.start("leaving", lambda leave=leave: _leave(seat, client, began_s, leave))
            readers = [
                seat.start(f"reader {index}", lambda each=each: _read(seat, client, began_s, each, arrived))
                for index, each in enumerate(got)
            ]
            seat.baton.wait_until(lambda: _have_ended(readers), None, "its readers")

    return script


def _have_ended(tasks: Sequence[Task]) -> bool:
    return all(task.has_ended for task in tasks)


def _leave(seat: Seat, client: FrontClient, began_s: float, leave: Leave) -> None:
    seat.sleep(max(0.0, began_s + leave.at_s - seat.now_s))
    if leave.how == "close":
        client.close()
    else:
        seat.process.kill()


def _read(seat: Seat, client: FrontClient, began_s: float, got: Got, arrived: dict[int, list[Output]]) -> None:
    ask = got.ask
    seat.sleep(max(0.0, began_s + ask.at_s - seat.now_s))
    try:
        params = ask.of.params(ask.max_tokens)
        handle = client.submit(ask.of.prompt, params, priority=ask.priority, timeout_s=ask.timeout_s)
    except EngineDead as error:
        got.error = error
        got.is_over = True
        return
    got.outputs = arrived[handle.request_id]
    got.is_sent = True
    try:
        _follow(handle, got)
    except EngineDead as error:
        got.error = error
    got.is_over = True


def _follow(handle: RequestHandle, got: Got) -> None:
    """Read to the end of every sequence, and do meanwhile what the request's front does."""
    ask = got.ask
    num_tokens = dict.fromkeys(range(ask.of.n), 0)
    live, is_asked = set(num_tokens), ask.then == "read"
    while live:
        if not is_asked and num_tokens[ask.index] >= ask.after_tokens:
            is_asked = True
            if ask.then == "abort":
                handle.abort()
            else:
                handle.finish(ask.index)
        output = handle.get()
        num_tokens[output.index] += len(output.token_ids)
        if output.is_refusal:
            return
        if output.finish_reason is not None:
            live.discard(output.index)
