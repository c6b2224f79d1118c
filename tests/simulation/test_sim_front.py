# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front's session over the simulated network: the real server and client, and what they find there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from metrale_ray.baton import Baton, Killed, Process, Task
from metrale_ray.errors import EngineDead, StartError
from metrale_ray.protocol.front import Abort, FrontClient, FrontId, FrontServer, Opened, Output, Submit
from metrale_ray.protocol.front.messages import SILENCE_S
from metrale_ray.sampling.token_params import TokenParams
from tests.simulation.baton_condition import BatonCondition
from tests.simulation.baton_loop import BatonLoop
from tests.simulation.faults import Fault, FrameFault, Partition
from tests.simulation.network import Network, Weather
from tests.simulation.sim_front import SimConnection, SimPart, SimRouter
from tests.simulation.sim_surroundings import drawn_keys

ADDRESS = "tcp://head:0"
OPENED = Opened(max_model_len=128, vocab_size=320, engine_epoch=3)
PARAMS = TokenParams(temperature=0, max_tokens=2)


@dataclass
class Scene:
    """A head that answers every request with two tokens, in two frames, and one front's process."""

    seed: int = 0
    faults: tuple[Fault, ...] = ()
    messages: list[Any] = field(default_factory=list)
    gone: list[FrontId] = field(default_factory=list)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.baton = Baton(self.seed, max_turns=50_000, max_s=1000.0)
        self.network = Network(self.baton, self.seed, Weather(silent_share=0.0))
        self.head, self.front = Process("head"), Process("front 0")
        self.head_keys, self.front_keys = drawn_keys(chance), drawn_keys(chance)
        self.allowed = [self.front_keys.public]

    def run(self, script: Callable[[Scene], object]) -> tuple[Any, Any]:
        """How the front and the head ended."""

        def conductor() -> tuple[Any, Any]:
            self.network.begin_life(0, self.faults)
            head = self.baton.start("head", lambda: BatonLoop(self.baton).run(self._serve()), self.head)
            front = self.baton.start("front", lambda: script(self), self.front)
            self.baton.wait_until(lambda: front.has_ended)
            self.sleep(5.0)  # two beats, at which the head finds out
            if not self.head.is_dead:
                self.head.resume()
                self.loop.call_soon_threadsafe(self.stopping.set_result, None)
            return front.result, self._ended(head)

        results = self.baton.run({"conductor": conductor})
        if isinstance(results["conductor"], BaseException):
            raise results["conductor"]
        front, head = results["conductor"]
        if isinstance(front, AssertionError):
            raise front
        return front, head

    def client(self) -> FrontClient:
        connect = partial(SimConnection, self.baton, self.network, self.front)
        condition = partial(BatonCondition, self.baton)
        return FrontClient(ADDRESS, self.front_keys, self.head_keys.public, connect=connect, condition=condition)

    def sleep(self, seconds: float) -> None:
        self.baton.wait_until(lambda: False, seconds)

    def _ended(self, task: Task) -> Any:
        self.baton.wait_until(lambda: task.has_ended, 60.0)
        return task.result

    async def _serve(self) -> None:
        self.loop = BatonLoop.current()
        self.stopping = self.loop.create_future()
        router = partial(SimRouter, self.network, self.head, ADDRESS, self.head_keys)
        self.server = FrontServer(
            "head", self._take, self.gone.append, lambda: OPENED, self.head_keys, make_router=router
        )
        for key in self.allowed:
            self.server.allow(key)
        await self.server.start()
        await self.stopping
        await self.server.close()

    def _take(self, front: FrontId, message: Any) -> None:
        self.messages.append(message)
        if isinstance(message, Submit):
            number = message.request_id
            self.server.post(front, [Output(number, 0, (7,))])
            self.loop.call_later(0.5, self.server.post, front, [Output(number, 0, (8,), "length")])


def asks(scene: Scene) -> list[tuple[int, ...]]:
    """Open a session and ask once."""
    scene.sleep(0.1)
    with scene.client() as client:
        assert client.wait_opened(5.0) == OPENED
        handle = client.submit((1, 2), PARAMS)
        return [handle.get(60.0).token_ids for _ in range(2)]


@pytest.mark.parametrize("seed", range(5))
def test_a_request_goes_there_and_its_outputs_come_back(seed: int) -> None:
    scene = Scene(seed)
    assert scene.run(asks) == ([(7,), (8,)], None)
    assert [type(message) for message in scene.messages] == [Submit]
    assert scene.gone == [1]
    assert scene.baton.now < 7.0


def test_an_idle_session_is_kept_open_by_beats() -> None:
    def idle(scene: Scene) -> list[tuple[int, ...]]:
        scene.sleep(0.1)
        with scene.client() as client:
            client.wait_opened(5.0)
            scene.sleep(5 * SILENCE_S)
            handle = client.submit((1, 2), PARAMS)
            handle.abort()
            return [handle.get(1.0).token_ids for _ in range(2)]

    scene = Scene()
    assert scene.run(idle) == ([(7,), (8,)], None)
    assert scene.messages[1] == Abort(1)


def test_a_head_that_is_killed_ends_every_wait_at_once() -> None:
    def left(scene: Scene) -> str:
        scene.baton.call_in(0.3, scene.head.kill)
        with pytest.raises(EngineDead) as caught:
            asks(scene)
        return caught.value.message

    scene = Scene()
    reason, head = scene.run(left)
    assert reason.startswith(f"the connection to the head at {ADDRESS} was lost")
    assert isinstance(head, Killed)
    assert scene.baton.now < 6.0


def test_a_head_that_is_stopped_is_given_up_after_its_silence_and_drops_the_front_when_it_goes_on() -> None:
    def left(scene: Scene) -> str:
        scene.baton.call_in(0.3, scene.head.stop)
        with pytest.raises(EngineDead) as caught:
            asks(scene)
        return caught.value.message

    scene = Scene()
    reason, head = scene.run(left)
    assert reason == f"nothing was heard of the head at {ADDRESS} for 10 s"
    assert head is None
    assert scene.gone == [1]


def test_a_front_that_is_killed_is_gone_at_the_head() -> None:
    def dies(scene: Scene) -> None:
        scene.baton.call_in(0.3, scene.front.kill)
        asks(scene)

    scene = Scene()
    front, head = scene.run(dies)
    assert isinstance(front, Killed)
    assert head is None

    assert scene.gone == [1]


def test_a_front_that_is_stopped_for_long_is_dropped_and_finds_out_when_it_goes_on() -> None:
    def waits(scene: Scene) -> None:
        scene.baton.call_in(0.3, scene.front.stop)
        scene.baton.call_in(30.0, scene.front.resume)
        with pytest.raises(EngineDead):
            asks(scene)

    scene = Scene(1)
    scene.run(waits)
    assert scene.gone == [1]
    assert scene.baton.now > 30.0


def test_a_front_that_the_head_does_not_know_is_turned_away() -> None:
    def comes(scene: Scene) -> str:
        scene.sleep(0.1)
        with pytest.raises(EngineDead) as caught:
            scene.client().wait_opened(5.0)
        return caught.value.message

    scene = Scene()
    scene.allowed = []
    reason, _ = scene.run(comes)
    assert "it does not know this process's key" in reason
    assert scene.server.num_refused == 1


def test_a_short_partition_delays_and_a_long_one_ends_the_session() -> None:
    assert Scene(faults=(Partition(0, "front 0", "head", 0.2, 5.0),)).run(asks)[0] == [(7,), (8,)]

    def left(scene: Scene) -> str:
        with pytest.raises(EngineDead) as caught:
            asks(scene)
        return caught.value.message

    scene = Scene(faults=(Partition(0, "head", "front 0", 0.2, 60.0, both=False),))
    assert scene.run(left)[0] == f"nothing was heard of the head at {ADDRESS} for 10 s"
    assert scene.gone == [1]


def test_a_frame_that_is_none_ends_the_session() -> None:
    def left(scene: Scene) -> str:
        with pytest.raises(EngineDead) as caught:
            asks(scene)
        return caught.value.message

    scene = Scene(faults=(FrameFault(0, "head", "front 0", 2, "truncate", 0.5),))
    assert f"the session with the head at {ADDRESS} failed" in scene.run(left)[0]


def test_a_key_that_is_none_is_refused() -> None:
    def comes(scene: Scene) -> None:
        connect = partial(SimConnection, scene.baton, scene.network, scene.front)
        with pytest.raises(StartError, match="is no public key"):
            FrontClient(ADDRESS, scene.front_keys, "short", connect=connect)

    Scene().run(comes)


def test_a_part_tells_the_key_of_its_connection_and_nothing_else() -> None:
    assert SimPart(b"x", "00ff").get("User-Id") == "00ff"
    with pytest.raises(KeyError):
        SimPart(b"x").get("Peer-Address")
