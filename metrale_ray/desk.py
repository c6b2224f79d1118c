# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Desk`: between the fronts and the engine, on its thread: what fronts ask goes in, what the engine gives comes out.

Rules: between two steps it takes what ends something, then some requests, and never for long: a step is not kept
waiting by those who arrive. All that it answers meanwhile goes to each front together. Each sequence of each request
gets exactly one end, unless its front has gone.

It leaves out sockets and threads: the caller says where answers go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from metrale_ray.clients import Client, Clients
from metrale_ray.clock import Clock
from metrale_ray.engine import Delivery, Engine
from metrale_ray.errors import RequestError
from metrale_ray.inbox import Arrived, Ending, Gone, Inbox, number_in_use
from metrale_ray.protocol.front import Abort, FrontId, Output
from metrale_ray.scheduler.request import RequestId

MAX_TAKE_S = 0.01
"""How long a step may be kept waiting by what fronts say: about as long as a short step takes."""

MAX_REQUESTS = 64
"""Requests that are taken between two steps. Ends of requests are bounded by the time alone, as they cost little."""

ByFront = dict[FrontId, list[Output]]


class Desk:
    """The engine thread's own. The engine gives its deliveries to `deliver`.

    `send` takes outputs to each front, in order; `drop` ends the session of a front that did what no front may do, for
    a reason, and `Inbox.gone` follows. Neither may wait.
    """

    def __init__(
        self,
        inbox: Inbox,
        send: Callable[[ByFront], None],
        drop: Callable[[FrontId, str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self.clients = Clients()
        self._inbox = inbox
        self._send = send
        self._drop = drop
        self._clock = clock
        self._answers: ByFront = {}

    def take(self, engine: Engine) -> bool:
        """Hear a part of what the fronts have said, for MAX_TAKE_S or a little more. Waits for nothing.

        Whether something was answered, which `flush` sends: before it, the caller lets the figures be known.
        """
        until_s = self._clock() + MAX_TAKE_S
        while (ending := self._inbox.take_ending()) is not None:
            self._end(engine, ending)
            if self._clock() >= until_s:
                break
        for _ in range(MAX_REQUESTS):  # one at least, so that ends without end keep no request out
            arrived = self._inbox.take_request()
            if arrived is None:
                break
            self._submit(engine, arrived)
            if self._clock() >= until_s:
                break
        return bool(self._answers)

    def flush(self) -> None:
        """Send what was answered since the last time."""
        if self._answers:
            answers, self._answers = self._answers, {}
            self._send(answers)

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Hand what a step gave to the fronts that wait for it, behind what was answered before."""
        for delivery in deliveries:
            ended = delivery.finish_reason is not None
            request_id = delivery.request_id
            client = self.clients.drop(request_id) if ended else self.clients.get(request_id)
            if client is not None:
                self._answer(client.front, _output(client, delivery))
        self.flush()

    def _submit(self, engine: Engine, arrived: Arrived) -> None:
        front, submit = arrived.front, arrived.submit
        number, timeout_s = submit.request_id, submit.timeout_s
        if self.clients.of_request(front, number):
            self._drop(front, number_in_use(number))
            return
        request_ids = self.clients.add(front, number, submit.params.n)
        try:
            engine.submit(
                request_ids,
                submit.prompt_token_ids,
                submit.params,
                priority=submit.priority,
                deadline_s=None if timeout_s is None else arrived.at_s + timeout_s,
                constraint=arrived.constraint,
                arrived_s=arrived.at_s,
                client=(front, number),
            )
        except RequestError as error:
            for request_id in request_ids:
                self.clients.drop(request_id)
            engine.counters.refused(error.code)
            engine.recording.refused((front, number), error.code, error.message)
            self._answer(front, refusal(number, error))
            return
        finished = {index: request_ids[index] for index in arrived.finished}
        self._end_sequences(engine, front, number, finished, "stop")

    def _end(self, engine: Engine, ending: Ending | Gone) -> None:
        front = ending.front
        if isinstance(ending, Gone):
            for request_id in self.clients.of_front(front):
                self.clients.drop(request_id)
                engine.abort(request_id)
            return
        number = ending.said.request_id
        if ending.arrived is not None:
            for index in range(ending.arrived.submit.params.n):
                reason: Literal["stop", "abort"] = "stop" if index in ending.arrived.finished else "abort"
                engine.timelines.never_began(reason)
                self._answer(front, Output(number, index, (), reason))
            return
        live = self.clients.of_request(front, number)
        if isinstance(ending.said, Abort):
            self._end_sequences(engine, front, number, live, "abort")
        else:
            index = ending.said.index
            self._end_sequences(engine, front, number, {i: r for i, r in live.items() if i == index}, "stop")

    def _end_sequences(
        self,
        engine: Engine,
        front: FrontId,
        number: int,
        live: Mapping[int, RequestId],
        reason: Literal["stop", "abort"],
    ) -> None:
        """End these sequences of a request; those that are not `live` were answered while the message came."""
        for index, request_id in live.items():
            self.clients.drop(request_id)
            if reason == "stop":
                engine.finish(request_id)
            else:
                engine.abort(request_id)
            self._answer(front, Output(number, index, (), reason))

    def _answer(self, front: FrontId, output: Output) -> None:
        self._answers.setdefault(front, []).append(output)


def refusal(number: int, error: RequestError) -> Output:
    """What a front is told of a request that is not taken."""
    return Output(number, 0, (), "error", None, (error.code, error.message), is_refusal=True)


def _output(client: Client, delivery: Delivery) -> Output:
    return Output(
        client.number,
        client.sequence_index,
        delivery.token_ids,
        delivery.finish_reason,
        delivery.stop_token_id,
        delivery.error,
        delivery.logprobs,
        delivery.prompt_logprobs,
    )
