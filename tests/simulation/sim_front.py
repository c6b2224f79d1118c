# SPDX-License-Identifier: MIT OR Apache-2.0
"""Both ends of a front's session over the simulated network: `SimRouter` for the head, `SimConnection` for the front.

Rules: as `protocol.front.router` and `protocol.front.connection` have them. Frames of one front come in order; a front
that has gone, or for which too much waits, takes nothing; a front beats, tells what it read before what it asks, and
takes a head for lost when its connection ends or nothing was heard for too long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from metrale_ray.baton import Baton, Process, Task
from metrale_ray.errors import ProtocolError
from metrale_ray.protocol.front.connection import JOIN_TIMEOUT_S
from metrale_ray.protocol.front.frames import decode_from_head, encode
from metrale_ray.protocol.front.messages import BEAT_S, SILENCE_S, Beat, Bye, FromHead, Open, Read
from metrale_ray.protocol.front.router import IsAllowed
from metrale_ray.protocol.keys import KeyPair, raw_key
from tests.simulation.end import End, Heartbeat
from tests.simulation.network import Network

FRONT_HEARTBEAT = Heartbeat((SILENCE_S, SILENCE_S + BEAT_S))


@dataclass(frozen=True, slots=True)
class SimPart:
    """One part of a message at the router."""

    bytes: bytes
    key: str = ""  # hexadecimal

    def get(self, name: str, /) -> Any:
        """What the connection has shown, as a ZeroMQ frame tells it."""
        if name != "User-Id":
            raise KeyError(name)
        return self.key


class SimRouter:
    """The head's end of all fronts' connections, on the head's loop."""

    def __init__(self, network: Network, process: Process, address: str, keys: KeyPair, is_allowed: IsAllowed) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._keys = keys
        self._is_allowed = is_allowed
        self._ends: dict[bytes, End] = {}
        self._keys_of: dict[bytes, str] = {}
        self._arrived: deque[bytes] = deque()  # whose frames came, in order
        self._has_arrived: asyncio.Future[None] | None = None
        self._num_refused = 0
        self._max_frames = 0
        self._is_closed = False

    @property
    def num_refused(self) -> int:
        """See Router."""
        return self._num_refused

    async def listen(self, send_frames: int, beat_s: float, silence_s: float) -> str:
        """See Router."""
        self._max_frames = send_frames
        self._loop = asyncio.get_running_loop()
        self._network.listen(self._process, self._address, self._keys.public, self._accept)
        return self._address

    async def receive(self) -> list[SimPart]:
        """See Router."""
        while not self._arrived:
            self._has_arrived = self._loop.create_future()
            await self._has_arrived
        identity = self._arrived.popleft()
        return [SimPart(identity), SimPart(self._ends[identity].frames.popleft(), self._keys_of[identity])]

    async def count_refusals(self) -> None:
        """See Router. They are counted at the door."""
        await self._loop.create_future()

    def send(self, identity: bytes, data: bytes) -> bool:
        """See Router."""
        end = self._ends.get(identity)
        if end is None or not end.is_up or end.num_unread >= self._max_frames:
            return False
        end.send(data)
        return True

    async def close(self) -> None:
        """See Router."""
        self._is_closed = True
        for end in self._ends.values():
            end.close()

    def _accept(self, end: End, key: str) -> str | None:
        if self._is_closed or not self._is_allowed(raw_key(key)):
            self._num_refused += 1
            return "it does not know this process's key"
        identity = len(self._ends).to_bytes(5, "big")
        self._ends[identity], self._keys_of[identity] = end, raw_key(key).hex()
        num_seen = 0

        def note() -> None:
            nonlocal num_seen
            new = end.num_arrived - num_seen
            num_seen = end.num_arrived
            self._arrived.extend([identity] * new)
            if new and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._wake)

        end.at_news = note
        return None

    def _wake(self) -> None:
        if self._has_arrived is not None and not self._has_arrived.done():
            self._has_arrived.set_result(None)


class SimConnection:
    """A front's end, as one task of its process. See `front.connection.FrontConnection`."""

    def __init__(
        self,
        baton: Baton,
        network: Network,
        process: Process,
        address: str,
        keys: KeyPair,
        head_key: str,
        on_message: Callable[[FromHead], None],
        on_lost: Callable[[str], None],
        *,
        beat_s: float,
        silence_s: float,
    ) -> None:
        raw_key(head_key)
        self.heard_at_s = baton.now
        self._baton = baton
        self._network = network
        self._process = process
        self._address = address
        self._keys = keys
        self._head_key = head_key
        self._on_message = on_message
        self._on_lost = on_lost
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._pending: deque[bytes] = deque([encode(Open())])
        self._read: bytes | None = None
        self._is_stopping = False
        self._task: Task | None = None

    def start(self) -> None:
        """See Connection."""
        self._task = self._baton.start(f"{self._process.name} connection", self._run, self._process)

    def send(self, data: bytes) -> None:
        """See Connection."""
        self._pending.append(data)

    def note_read(self, num_frames: int) -> None:
        """See Connection."""
        self._read = encode(Read(num_frames))

    def stop(self) -> None:
        """See Connection."""
        self._is_stopping = True

    def join(self) -> None:
        """See Connection."""
        task = self._task
        if task is not None and task is not self._baton.task:
            self._baton.wait_until(lambda: task.has_ended, JOIN_TIMEOUT_S, "the end of its connection")

    def _run(self) -> None:
        reason = "the front's connection failed"
        end = self._network.connect(
            self._process, self._address, "head", self._keys.public, self._head_key, FRONT_HEARTBEAT
        )
        try:
            reason = self._converse(end)
        except ProtocolError as error:
            reason = f"the session with the head at {self._address} failed: {error}"
        finally:
            self._on_lost(reason)
            end.close()

    def _converse(self, end: End) -> str:
        baton = self._baton
        beat_at = self.heard_at_s = baton.now
        while not self._is_stopping:
            if baton.now >= beat_at:
                self._pending.append(encode(Beat()))
                beat_at = baton.now + self._beat_s
            self._flush(end)
            deadline = min(beat_at, self.heard_at_s + self._silence_s)
            baton.wait_until(lambda: self._has_work(end), max(0.0, deadline - baton.now), "news of the head")
            self._receive(end)
            if end.lost is not None and not self._is_stopping:
                return f"the connection to the head at {self._address} was lost ({end.lost})"
            if baton.now >= self.heard_at_s + self._silence_s:
                return f"nothing was heard of the head at {self._address} for {self._silence_s:g} s"
        self._pending.append(encode(Bye()))
        self._flush(end)
        return "this front was closed"

    def _has_work(self, end: End) -> bool:
        return bool(end.frames or self._pending or self._is_stopping or end.lost is not None)

    def _flush(self, end: End) -> None:
        if self._read is not None:
            end.send(self._read)
            self._read = None
        while self._pending:
            end.send(self._pending.popleft())

    def _receive(self, end: End) -> None:
        """Hand over everything that has arrived."""
        while end.frames and not self._is_stopping:
            data = end.frames.popleft()
            self.heard_at_s = self._baton.now
            self._on_message(decode_from_head(data))
