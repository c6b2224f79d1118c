# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Network`: connections between the processes of a baton, as TCP and ZeroMQ would carry them, and their faults.

Rules. What one end sends arrives whole, in order, each after a drawn delay; between connections there is no order. What
a process sent before it closed its end still arrives; of what a killed one sent last, some may not. An end learns that
its peer has gone when the connection's end arrives, and of a silent peer (stopped, cut off, or gone with its machine)
when its heartbeat is overdue. Frames that a partition holds up arrive after it, if the connection still stands. A dead
process sends nothing.

Faults are keyed by sender, receiver and the number of the frame between the two in this life, over all connections.
What it leaves out: one connection (`end`), waiting (`transports`, `sim_front`), limits of buffers, what a frame means.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from metrale_ray.baton import Baton, Process
from tests.simulation.damage import damaged
from tests.simulation.end import End, Heartbeat
from tests.simulation.faults import Fault, FrameFault, Partition

MAX_KEPT_FRAMES = 64
"""Frames of earlier lives that are kept per direction, for those that come late."""


@dataclass(frozen=True, slots=True)
class Weather:
    """From what delays are drawn, in seconds."""

    delay_s: tuple[float, float] = (2e-5, 4e-4)
    slow_share: float = 0.02  # of the frames, which take up to `slow_s`
    slow_s: float = 0.02
    gone_s: tuple[float, float] = (5e-4, 0.05)  # until the end of a connection has arrived
    silent_share: float = 0.2  # of the deaths, which no packet tells of, as when a machine loses its power


Accept = Callable[[End, str], str | None]
"""Asked for a connection that comes, with the caller's public key: None, or why it is turned away."""


@dataclass
class _Listener:
    owner: Process
    public_key: str
    accept: Accept


@dataclass
class _Direction:
    """What has gone from one process to another."""

    num_frames: int = 0  # in this life
    kept: list[bytes] = field(default_factory=list)  # of this life
    earlier: list[bytes] = field(default_factory=list)  # of lives before


class Network:
    """All connections of a simulation, over its lives. `trace` is a number made of every frame that was sent."""

    def __init__(self, baton: Baton, seed: int, weather: Weather | None = None) -> None:
        self.baton = baton
        self.chance = random.Random(f"network {seed}")
        self.fired: list[Fault] = []
        self.trace = 0
        self.num_frames = 0
        self._weather = Weather() if weather is None else weather
        self._listeners: dict[str, _Listener] = {}
        self._ends: list[End] = []
        self._directions: dict[tuple[str, str], _Direction] = {}
        self._cuts: list[tuple[str, str]] = []
        self._frame_faults: dict[tuple[str, str, int], list[FrameFault]] = {}
        self._silent_deaths: dict[Process, bool] = {}
        self._life = 0

    def begin_life(self, life: int, faults: Iterable[Fault]) -> None:
        """Count frames anew, and make these faults happen. What an earlier life sent may come again."""
        for direction in self._directions.values():
            direction.num_frames = 0
            direction.earlier = (direction.earlier + direction.kept)[-MAX_KEPT_FRAMES:]
            direction.kept = []
        self._life, self._cuts, self._frame_faults = life, [], {}
        self._listeners, self._ends = {}, []
        for fault in faults:
            if fault.life != life:
                continue
            if isinstance(fault, FrameFault):
                self._frame_faults.setdefault((fault.sender, fault.receiver, fault.number), []).append(fault)
            elif isinstance(fault, Partition):
                self._plan_partition(fault)

    def listen(self, owner: Process, address: str, public_key: str, accept: Accept) -> None:
        """Let connections to `address` be made, by those who know the key."""
        self._listeners[address] = _Listener(owner, public_key, accept)

    def connect(
        self, owner: Process, address: str, peer_name: str, key: str, peer_key: str, heartbeat: Heartbeat
    ) -> End:
        """The calling end, at once; the connection is made, or fails, after a while."""
        listener = self._listeners.get(address)
        target = Process("nobody") if listener is None else listener.owner
        mine, other = End(self, owner, peer_name, heartbeat), End(self, target, owner.name, heartbeat)
        mine.peer, other.peer = other, mine
        when_s = self.baton.now + 3 * self.draw_delay_s()
        for end in (mine, other):
            self._ends.append(end)
            end.open_at(when_s)
            end.owner.at_change.append(end.owner_changed)
        self.baton.call_at(when_s, lambda: self._meet(mine, other, listener, key, peer_key))
        mine.look()
        return mine

    def carry(self, end: End, data: bytes) -> None:
        """One frame leaves `end`: count it, do to it what is planned, and put it on its way."""
        names = (end.owner.name, end.peer.owner.name)
        direction = self._directions.setdefault(names, _Direction())
        direction.num_frames += 1
        direction.kept.append(data)
        self._note(names, direction.num_frames, data)
        extra_s, frames = 0.0, [data]
        for fault in self._frame_faults.get((*names, direction.num_frames), ()):
            if fault.kind == "close":
                self.fired.append(fault)
                end.peer.lose(f"{end.owner.name} has gone: its connection ended or its heartbeat is overdue")
                return
            if fault.kind == "stale" and not direction.earlier:
                continue
            self.fired.append(fault)
            extra_s += fault.amount if fault.kind == "delay" else 0.0
            frames = damaged(fault, frames, direction.earlier)
        for each in frames:
            end.ship(each, extra_s)

    def is_cut(self, sender: str, receiver: str) -> bool:
        """Whether a partition holds up what goes from one to the other."""
        return (sender, receiver) in self._cuts

    def is_silent_death(self, process: Process) -> bool:
        """Whether nothing tells of the end of a dead process but its silence."""
        if process not in self._silent_deaths:
            self._silent_deaths[process] = self.chance.random() < self._weather.silent_share
        return self._silent_deaths[process]

    def draw_delay_s(self) -> float:
        """Of one frame."""
        weather = self._weather
        if self.chance.random() < weather.slow_share:
            return self.chance.uniform(weather.delay_s[1], weather.slow_s)
        return self.chance.uniform(*weather.delay_s)

    def draw_gone_s(self) -> float:
        """Of the end of a connection."""
        return self.chance.uniform(*self._weather.gone_s)

    def _meet(self, mine: End, other: End, listener: _Listener | None, key: str, peer_key: str) -> None:
        name = mine.peer_name
        if mine.lost is not None or mine.owner.is_dead:
            return
        if listener is None or listener.owner.is_dead:
            mine.refuse(f"{name} cannot be reached: the connection was refused or timed out")
        elif listener.public_key != peer_key:
            mine.refuse(f"{name} cannot be reached: the connection was made and the handshake failed")
        elif (reason := listener.accept(other, key)) is not None:
            mine.refuse(f"{name} cannot be reached: {reason}")
        else:
            other.look()

    def _plan_partition(self, fault: Partition) -> None:
        pairs = [(fault.a, fault.b), *([(fault.b, fault.a)] if fault.both else [])]
        now, life = self.baton.now, self._life

        def begin() -> None:
            if self._life == life:
                self.fired.append(fault)
                self._cuts += pairs
                self._cuts_changed()

        def end() -> None:
            if self._life == life:
                for pair in pairs:
                    self._cuts.remove(pair)
                self._cuts_changed()

        self.baton.call_at(now + fault.from_s, begin)
        self.baton.call_at(now + max(fault.from_s, fault.to_s), end)

    def _cuts_changed(self) -> None:
        for end in list(self._ends):
            if not self.is_cut(end.owner.name, end.peer.owner.name):
                end.release()
            end.look()

    def _note(self, names: tuple[str, str], number: int, data: bytes) -> None:
        self.num_frames += 1
        text = f"{self.baton.now!r} {names} {number} {self._life} ".encode()
        self.trace = zlib.crc32(data, zlib.crc32(text, self.trace))
