# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Clients`: which sequence of which front's request each request of the engine is, and back.

Rules: the engine thread's own. The engine's ids are never used again; a front's number may be, once all sequences of
its request have ended. What has ended leaves nothing behind.
"""

from __future__ import annotations

from typing import NamedTuple

from metrale_ray.protocol.front import FrontId
from metrale_ray.scheduler.request import RequestId


class Client(NamedTuple):
    """Which sequence of which request of which front."""

    front: FrontId
    number: int
    sequence_index: int


class Clients:
    """The live sequences of all fronts."""

    def __init__(self) -> None:
        self._by_request: dict[RequestId, Client] = {}
        self._by_client: dict[tuple[FrontId, int], dict[int, RequestId]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, front: FrontId, number: int, num_sequences: int) -> list[RequestId]:
        """The engine's ids for the sequences of a new request, whose number must not be in use."""
        assert (front, number) not in self._by_client, "the caller refuses a number that is in use"
        request_ids = [RequestId(self._next_id + index) for index in range(num_sequences)]
        self._next_id += num_sequences
        for index, request_id in enumerate(request_ids):
            self._by_request[request_id] = Client(front, number, index)
        self._by_client[front, number] = dict(enumerate(request_ids))
        return request_ids

    def get(self, request_id: RequestId) -> Client | None:
        """Whose `request_id` is, or None when nobody waits for it any more."""
        return self._by_request.get(request_id)

    def drop(self, request_id: RequestId) -> Client | None:
        """The sequence has ended. Whose it was, or None when nobody waited for it any more."""
        client = self._by_request.pop(request_id, None)
        if client is not None:
            sequences = self._by_client[client.front, client.number]
            del sequences[client.sequence_index]
            if not sequences:
                del self._by_client[client.front, client.number]
        return client

    def of_request(self, front: FrontId, number: int) -> dict[int, RequestId]:
        """The live sequences of one request, by index; none when it has ended."""
        return dict(self._by_client.get((front, number), {}))

    def of_front(self, front: FrontId) -> list[RequestId]:
        """All that is live of one front."""
        return [request_id for request_id, client in self._by_request.items() if client.front == front]
