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
from metrale_ray.protocol.front import FrontClient, Output, Submit
from metrale_ray.protocol.front.frames import encode
from metrale_ray.protocol.front.handle import RequestHandle
from tests.simulation.invariants import Got
from tests.simulation.seat import Seat
from tests.simulation.workload import ENTRIES, Leave

READY_S = 150.0
"""How long an engine may take to be ready: longer than its own limits for that."""

REPEATED = 1000
"""The number of a request that is sent twice: no front of a run has so many."""

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
            session = _Session(client, listen)
            try:
                client.wait_opened(OPEN_TIMEOUT_S)
            except EngineDead:
                return
            tasks = [
                seat.start("leaving", lambda leave=leave: _leave(seat, session, began_s, leave)) for leave in leaves
            ]
            tasks += [
                seat.start(f"reader {index}", lambda each=each: _read(seat, session, began_s, each))
                for index, each in enumerate(got)
            ]
            of_readers = tasks[len(leaves) :]
            seat.baton.wait_until(lambda: _have_ended(of_readers), None, "its readers")
            session.client.close()

    return script


class _Session:
    """The session that a front has now. `number` from 0."""

    def __init__(self, client: FrontClient, listen: Outputs) -> None:
        self.number = -1
        self._listen = listen
        self.enter(client)

    def enter(self, client: FrontClient) -> None:
        """From now on this one is asked."""
        self.number += 1
        self.client = client
        self.arrived: defaultdict[int, list[Output]] = defaultdict(list)  # by the request's number
        arrived = self.arrived
        self._listen(client, lambda output: arrived[output.request_id].append(output))


def _have_ended(tasks: Sequence[Task]) -> bool:
    return all(task.has_ended for task in tasks)


def _leave(seat: Seat, session: _Session, began_s: float, leave: Leave) -> None:
    seat.sleep(max(0.0, began_s + leave.at_s - seat.now_s))
    match leave.how:
        case "close":
            session.client.close()
        case "reopen":
            before = session.client
            session.enter(seat.client())  # both are open for a moment
            before.close()
        case "repeat":
            submit = encode(Submit(REPEATED, ENTRIES[0].prompt, ENTRIES[0].params()))
            for _ in range(2):
                session.client._connection.send(submit)
        case "die":
            seat.process.kill()


def _read(seat: Seat, session: _Session, began_s: float, got: Got) -> None:
    ask = got.ask
    seat.sleep(max(0.0, began_s + ask.at_s - seat.now_s))
    client, arrived, got.session = session.client, session.arrived, session.number
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
        got.read.append(output)
        num_tokens[output.index] += len(output.token_ids)
        if output.is_refusal:
            return
        if output.finish_reason is not None:
            live.discard(output.index)
