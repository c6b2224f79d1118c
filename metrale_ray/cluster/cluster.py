# SPDX-License-Identifier: MIT OR Apache-2.0
"""The composition root: a placement group, the head and the workers as Ray actors, and the end of all of them.

Rules. Ray places, starts and watches; it is never on the path of a token. Actors are never restarted: one that came
back would be blank, and answer. Whatever happens between `start` and `close`, `close` leaves nothing running.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from metrale_ray.cluster import node_versions
from metrale_ray.cluster.actors import HeadActor, WorkerActor
from metrale_ray.cluster.endings import at_place, first_line, own_error, own_error_of, reason, unstarted, worst
from metrale_ray.cluster.environment import given_environment, runtime_env
from metrale_ray.cluster.names import NAMESPACE, actor_name, is_taken, name_taken
from metrale_ray.cluster.node_tasks import on_nodes
from metrale_ray.cluster.placement import node_addresses, node_ids, with_resources
from metrale_ray.cluster.reservation import Reservation
from metrale_ray.cluster.session import RaySession
from metrale_ray.cluster.shares import GPU, with_threads
from metrale_ray.cluster.unreserved import CPU
from metrale_ray.config import EngineConfig, thread_limit
from metrale_ray.cores import Usable, usable
from metrale_ray.errors import ConfigError, EngineDead, MetraleError, StartError
from metrale_ray.head import HeadState
from metrale_ray.protocol.keys import new_keys

log = logging.getLogger(__name__)

POLL_S = 0.1
# A head that was asked to stop finishes its step and tells the workers; longer than that, and it is killed.
STOP_TIMEOUT_S = 10.0
RAY_GONE = "Ray was shut down under the engine"
LOOPBACK = "127.0.0.1"
# How long a name may still be taken by ranks that are ending just now, those of a driver that was killed for example.
NAME_WAIT_S = 5.0
# After one rank has ended, how long to wait for another's reason, which may be the real one.
REASON_WAIT_S = 1.0


class Cluster:
    """One engine on Ray: its placement group and its actors. Make it with `Cluster(config)`, then `start`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.name = config.name or f"engine-{uuid.uuid4().hex[:8]}"
        self.front_address = ""
        self.front_keys = new_keys()
        self.head_key = ""
        self.ranks: list[dict[str, Any]] = []
        self._session = RaySession()
        self._is_ready = False
        self._is_stopped = False
        self._reservation = Reservation(self.name)
        self._addresses: list[str] = []  # of each rank's node, once they are placed
        self._deadline = math.inf  # of the start
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # the reference of each rank's run, in rank order

    def start(self, on_state: Callable[[HeadState], None]) -> None:
        """Bring everything up and return when the engine is ready. Closes everything when it cannot.

        Raises PlacementError, StartError, ConfigError, CheckpointError, HandshakeError.
        """
        try:
            self._session.join(self.config.address)
            by_choice = self.config.num_cpus_per_rank is not None
            most_threads = thread_limit(given_environment(os.environ))
            can_grow = not self._session.is_local
            self.config = with_resources(self.config, can_grow=can_grow, most_threads=most_threads)
            self._claim_name()
            self.config = self._reservation.make(self.config, can_grow=can_grow, may_take_fewer=not by_choice)
            nodes = node_ids(self._reservation.group)
            self._addresses = node_addresses(nodes)
            self._deadline = time.monotonic() + self.config.start_timeout_s
            if not self._session.is_local:  # there everything is this process's own
                self._check_versions(nodes)
            self.config = with_threads(
                self.config, nodes, self._usable(nodes), by_choice=by_choice, most_threads=most_threads
            )
            self._start_actors()
            self._wait_ready(on_state)
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, Any]:
        """The engine's gauges and counters with its ranks. Raises EngineDead."""
        if not ray.is_initialized():  # asking would start another one
            raise EngineDead(RAY_GONE)
        try:
            numbers: dict[str, Any] = ray.get(self._actors[0].stats.remote(), timeout=STOP_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self.failure() or EngineDead(f"rank 0 does not answer: {first_line(error)}", rank=0) from error
        return {**numbers, "ranks": self.ranks}

    def allow_front(self, public_key: str) -> None:
        """Let the front with this key connect to the head, now or within some minutes. Raises EngineDead."""
        if not self._is_ready or not ray.is_initialized():
            raise EngineDead(RAY_GONE)
        try:
            ray.get(self._actors[0].allow_front.remote(public_key), timeout=STOP_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self.failure() or EngineDead(f"rank 0 does not answer: {first_line(error)}", rank=0) from error

    def wait_ended(self, timeout_s: float) -> EngineDead | None:
        """Wait up to `timeout_s` for any rank to end, and say why the engine has ended; None while it runs.

        Before the start and after `close` there is no rank that could end, so all of `timeout_s` passes.
        """
        runs = list(self._runs)  # `close` may empty it meanwhile
        if not ray.is_initialized():
            return EngineDead(RAY_GONE)
        if not runs:
            time.sleep(timeout_s)  # whoever asks again and again would keep a core busy
            return None
        ended, _ = ray.wait(runs, num_returns=1, timeout=timeout_s)
        return self.failure() if ended else None

    def failure(self) -> EngineDead | None:
        """Why the engine has ended, from the rank that knows best; None while every rank runs."""
        if not ray.is_initialized():
            return EngineDead(RAY_GONE)
        runs = list(self._runs)
        ended, _ = ray.wait(runs, num_returns=len(runs), timeout=REASON_WAIT_S) if runs else ([], [])
        reasons = [(rank, reason(ref)) for rank, ref in enumerate(runs) if ref in ended]
        if not reasons:
            return None
        return worst(reasons, self._place_of)

    def stop(self) -> None:
        """Ask an engine that runs to end by itself, so that workers leave in order, and wait a little for all ranks."""
        if not self._is_ready or self._is_stopped or not ray.is_initialized() or self._session.is_lost:
            return
        self._is_stopped = True
        try:
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
            self._actors[0].stop.remote()
            # Once one rank has ended the others leave at once, or not at all.
            timeout_s = REASON_WAIT_S if ended else STOP_TIMEOUT_S
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            log.warning("the head did not stop by itself: %s", first_line(error))

    def close(self, *, at_once: bool = False) -> None:
        """End every actor, give the resources back, and end Ray if it was started here. May be called again.

        `at_once`: the current step is not waited for.
        """
        self._is_stopped |= at_once
        with contextlib.ExitStack() as closing:  # each step is taken whatever happens in those before it
            closing.callback(self._session.leave)  # also one whose start was interrupted
            if ray.is_initialized() and not self._session.is_lost:
                closing.callback(self._reservation.remove)
                for actor in self._actors:
                    closing.callback(ray.kill, actor, no_restart=True)
                closing.callback(self.stop)
        self._actors, self._runs, self._reservation = [], [], Reservation(self.name)

    def _claim_name(self) -> None:
        """Refuse a name that another engine has. The ranks of one that is ending are given a moment to go."""
        names = [actor_name(self.name, rank) for rank in range(self.config.ep_size)]
        deadline = time.monotonic() + NAME_WAIT_S
        while any(map(is_taken, names)):
            if time.monotonic() >= deadline:
                raise name_taken(self.name)
            time.sleep(POLL_S)

    def _usable(self, ids: list[str]) -> dict[str, Usable]:
        """What processes may use of each of these nodes, by Ray's id, whatever Ray offers of it."""
        if self._session.is_local:  # its processes are this one's children
            return dict.fromkeys(ids, usable())
        asked = on_nodes(usable, set(ids), runtime_env(os.environ))
        return {node_id: self._of(ids.index(node_id), ref) for node_id, ref in asked.items()}

    def _check_versions(self, ids: list[str]) -> None:
        """Refuse nodes that lack this package or differ in their versions, before an actor of it is there."""
        ranks = {self._place_of(ids.index(node_id)): ids.index(node_id) for node_id in ids}  # the first of each node
        asked = node_versions.ask({place: ids[rank] for place, rank in ranks.items()}, runtime_env(os.environ))
        answers = {place: self._of(ranks[place], ref) for place, ref in asked.items()}
        node_versions.check(node_versions.look(), answers)

    def _start_actors(self) -> None:
        config = self.config
        host = LOOPBACK if self._session.is_local else None
        head = self._create(HeadActor, 0, config, host)
        workers = [self._create(WorkerActor, rank, config, rank, host) for rank in range(1, config.ep_size)]
        places = [actor.whoami.remote() for actor in self._actors]
        public_keys = [worker.public_key.remote() for worker in workers]
        self.ranks = [self._of(rank, ref) for rank, ref in enumerate(places)]
        keys = {rank: self._of(rank, ref) for rank, ref in enumerate(public_keys, start=1)}
        listening = head.listen.remote(keys, self.front_keys.public, self.ranks)
        addresses, self.front_address, self.head_key = self._of(0, listening)
        self._runs = [head.serve.remote()]
        self._runs += [worker.run.remote(addresses[rank]) for rank, worker in enumerate(workers, start=1)]

    def _create(self, kind: type, rank: int, *arguments: Any) -> Any:
        """One rank's actor, in its bundle of the placement group."""
        strategy = PlacementGroupSchedulingStrategy(self._reservation.group, placement_group_bundle_index=rank)
        remote = ray.remote if kind is HeadActor else ray.remote(concurrency_groups={"control": 2})
        options = remote(kind).options(
            name=actor_name(self.name, rank),
            namespace=NAMESPACE,
            num_cpus=self._reservation.bundle[CPU],
            num_gpus=self._reservation.bundle.get(GPU, 0.0),
            scheduling_strategy=strategy,
            runtime_env=runtime_env(os.environ),
            max_restarts=0,
            max_task_retries=0,
        )
        try:
            actor = options.remote(*arguments)
        except ray.exceptions.ActorAlreadyExistsError as error:  # another start took the name a moment ago
            raise name_taken(self.name) from error
        self._actors.append(actor)
        return actor

    def _of(self, rank: int, ref: Any) -> Any:
        """What a rank answers during the start. Raises its own error, or StartError naming the rank and its node."""
        try:
            return ray.get(ref, timeout=max(0.0, self._deadline - time.monotonic()))
        except ray.exceptions.RayTaskError as error:
            raise self._with_place(rank, own_error(error)) from None
        except TimeoutError as error:
            limit = f"the start limit of {self.config.start_timeout_s:g} s"
            raise StartError(f"{self._place_of(rank)} did not answer within {limit}") from error
        except ray.exceptions.RayError as error:
            raise unstarted(self._place_of(rank), error) from error

    def _wait_ready(self, on_state: Callable[[HeadState], None]) -> None:
        while True:
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=POLL_S)
            if ended:
                raise self._start_failure()
            state: HeadState = self._of(0, self._actors[0].state.remote())
            on_state(state)
            if state.phase == "ready":
                self._is_ready = True
                return
            if time.monotonic() >= self._deadline:
                raise StartError(f"the engine was not ready within {self.config.start_timeout_s:g} s")

    def _start_failure(self) -> MetraleError:
        """The error of the rank that knows best: a reason of its own comes before a lost link."""
        ended, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=REASON_WAIT_S)
        for rank, ref in enumerate(self._runs):
            error = own_error_of(ref) if ref in ended else None
            if isinstance(error, StartError | ConfigError):
                return self._with_place(rank, error)
        dead = self.failure()
        return StartError(dead.message if dead else "the engine ended during its start")

    def _with_place(self, rank: int, error: MetraleError) -> MetraleError:
        """The error with its rank in front, where it does not follow: one of several nodes, or a worker's."""
        if rank == 0 and len(set(self._addresses)) <= 1:
            return error
        return type(error)(at_place(self._place_of(rank), rank, error.message))

    def _place_of(self, rank: int) -> str:
        """The rank, with its node where there are several."""
        return f"rank {rank} on {self._addresses[rank]}" if len(set(self._addresses)) > 1 else f"rank {rank}"
