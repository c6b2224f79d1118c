# SPDX-License-Identifier: MIT OR Apache-2.0
"""The composition root: a placement group, the head and the workers as Ray actors, and the end of all of them.

Rules. Ray places, starts and watches; it is never on the path of a token. Actors are never restarted: one that came
back would be blank, and answer. Whatever happens between `start` and `close`, `close` leaves nothing running.

Each actor has a name, `ENGINE/rank-N`, in a namespace of ours: an engine's name is taken as long as a rank of it runs.
A rank listens on the address by which Ray's other nodes know its node, and on no other; on a Ray of our own, which is
one machine, on the loopback address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, EngineDead, MetraleError, PlacementError, StartError
from metrale_ray.head import Head, HeadState
from metrale_ray.parent_death import die_with_parent
from metrale_ray.protocol.keys import new_keys
from metrale_ray.worker import HeadAddress, Worker

log = logging.getLogger(__name__)

POLL_S = 0.1
# A head that was asked to stop finishes its step and tells the workers; longer than that, and it is killed.
STOP_TIMEOUT_S = 10.0
NAMESPACE = "metrale_ray"
LOOPBACK = "127.0.0.1"
# How long a name may still be taken by ranks that are ending just now, those of a driver that was killed for example.
NAME_WAIT_S = 5.0
# What of the driver's environment goes to the ranks on other nodes: where libraries find models and interfaces. Nothing
# else does, least of all keys and tokens.
FORWARDED_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
)
# After one rank has ended, how long to wait for another's reason, which may be the real one.
REASON_WAIT_S = 1.0


class HeadActor:
    """`Head` as a Ray actor. Ray's own loop is the head's asyncio loop."""

    def __init__(self, config: EngineConfig, host: str | None) -> None:
        die_with_parent()
        _log_to_stderr(config)
        self._host = host or _node_address()
        self._head = Head(config, self._host)

    async def listen(self, worker_keys: dict[int, str], front_key: str) -> tuple[dict[int, HeadAddress], str, str]:
        """Open every door, to the processes with these public keys alone: one address for each worker, the fronts' one
        and the head's own public key."""
        addresses = await self._head.listen(worker_keys)
        self._head.allow_front(front_key)
        return addresses, self._head.front_address, self._head.public_key

    async def serve(self) -> None:
        """Run the engine to its end."""
        await self._head.serve()

    async def state(self) -> HeadState:
        """The phase and the progress of a load."""
        return self._head.state

    async def stats(self) -> dict[str, Any]:
        """Gauges and counters."""
        return await self._head.stats()

    async def stop(self) -> None:
        """End after the current step."""
        await self._head.stop()

    async def whoami(self) -> dict[str, Any]:
        """Process id, node and address of this rank."""
        return _whoami(0, self._host)


class WorkerActor:
    """`Worker` as a Ray actor. `run` occupies its thread for good; questions have a concurrency group of their own."""

    def __init__(self, config: EngineConfig, rank: int, host: str | None) -> None:
        die_with_parent()
        _log_to_stderr(config)
        self._rank = rank
        self._host = host or _node_address()
        self._worker = Worker(config, rank, self._host)

    def run(self, head: HeadAddress) -> None:
        """Carry out commands until shutdown."""
        self._worker.run(head)

    def public_key(self) -> str:
        """By which the head knows this process."""
        return self._worker.public_key

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def whoami(self) -> dict[str, Any]:
        """Process id, node and address of this rank."""
        return _whoami(self._rank, self._host)


class Cluster:
    """One engine on Ray: its placement group and its actors. Make it with `Cluster(config)`, then `start`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.name = config.name or f"engine-{uuid.uuid4().hex[:8]}"
        self.front_address = ""
        self.front_keys = new_keys()
        self.head_key = ""
        self.ranks: list[dict[str, Any]] = []
        self._owns_ray = False
        self._is_local = False
        self._is_ready = False
        self._is_stopped = False
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # the reference of each rank's run, in rank order

    def start(self, on_state: Callable[[HeadState], None]) -> None:
        """Bring everything up and return when the engine is ready. Closes everything when it cannot.

        Raises PlacementError, StartError, ConfigError, CheckpointError, HandshakeError.
        """
        try:
            self._connect()
            self.config = _with_resources(self.config)
            self._claim_name()
            self._group = self._place()
            self._start_actors()
            self._wait_ready(on_state)
        except BaseException:
            self.close()
            raise

    def stats(self) -> dict[str, Any]:
        """The engine's gauges and counters with its ranks. Raises EngineDead."""
        try:
            numbers: dict[str, Any] = ray.get(self._actors[0].stats.remote(), timeout=STOP_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self.failure() or EngineDead(f"rank 0 does not answer: {_first_line(error)}", rank=0) from error
        return {**numbers, "ranks": self.ranks}

    def wait_ended(self, timeout_s: float) -> EngineDead | None:
        """Wait up to `timeout_s` for any rank to end, and say why the engine has ended; None while it runs."""
        runs = list(self._runs)  # `close` may empty it meanwhile
        if not ray.is_initialized():  # asking would start another one
            return EngineDead("Ray was shut down under the engine")
        ended, _ = ray.wait(runs, num_returns=1, timeout=timeout_s) if runs else ([], [])
        return self.failure() if ended else None

    def failure(self) -> EngineDead | None:
        """Why the engine has ended, from the rank that knows best; None while every rank runs."""
        runs = list(self._runs)
        ended, _ = ray.wait(runs, num_returns=len(runs), timeout=REASON_WAIT_S) if runs else ([], [])
        reasons = [(rank, _reason(ref)) for rank, ref in enumerate(runs) if ref in ended]
        if not reasons:
            return None
        return _worst(reasons)

    def stop(self) -> None:
        """Ask an engine that runs to end by itself, so that workers leave in order, and wait a little for all ranks."""
        if not self._is_ready or self._is_stopped or not ray.is_initialized():
            return
        self._is_stopped = True
        try:
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
            self._actors[0].stop.remote()
            # Once one rank has ended the others leave at once, or not at all.
            timeout_s = REASON_WAIT_S if ended else STOP_TIMEOUT_S
            ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout_s)
        except ray.exceptions.RayError as error:
            log.warning("the head did not stop by itself: %s", _first_line(error))

    def close(self) -> None:
        """End every actor, give the resources back, and end Ray if it was started here. May be called again."""
        with contextlib.ExitStack() as closing:  # each step is taken whatever happens in those before it
            if self._owns_ray:
                closing.callback(ray.shutdown)  # also one whose start was interrupted
            if ray.is_initialized():
                if self._group is not None:
                    closing.callback(remove_placement_group, self._group)
                for actor in self._actors:
                    closing.callback(ray.kill, actor, no_restart=True)
                closing.callback(self.stop)
        self._actors, self._runs, self._group, self._owns_ray = [], [], None, False

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        address = self.config.address or "local"
        self._is_local = address == "local"
        self._owns_ray = True  # from now on: an interrupt may come before `init` returns
        try:
            with _own_sigterm_handler():
                ray.init(
                    address=address,
                    include_dashboard=False if address == "local" else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise StartError(f"cannot reach Ray at {address!r}: {_first_line(error)}") from error

    def _claim_name(self) -> None:
        """Refuse a name that another engine has. The ranks of one that is ending are given a moment to go."""
        names = [_actor_name(self.name, rank) for rank in range(self.config.ep_size)]
        deadline = time.monotonic() + NAME_WAIT_S
        while any(map(_is_taken, names)):
            if time.monotonic() >= deadline:
                raise _name_taken(self.name)
            time.sleep(POLL_S)

    def _place(self) -> PlacementGroup:
        config = self.config
        bundle = {"CPU": float(config.num_cpus_per_rank or 1)}
        if config.num_gpus_per_rank:
            bundle["GPU"] = float(config.num_gpus_per_rank)
        group = placement_group(
            [dict(bundle) for _ in range(config.ep_size)], strategy=config.placement, name=self.name
        )
        self._group = group
        deadline = time.monotonic() + config.placement_timeout_s
        while True:
            if placement_group_table(group).get("state") == "CREATED":
                return group
            # A Ray of our own never grows; another one may be getting a node just now.
            hopeless = self._owns_ray and self._is_local and bool(_lacking(config, bundle))
            if hopeless or time.monotonic() >= deadline:
                raise PlacementError(_unplaceable(config, bundle, hopeless))
            time.sleep(POLL_S)

    def _start_actors(self) -> None:
        config = self.config
        host = LOOPBACK if self._owns_ray and self._is_local else None
        head = self._create(HeadActor, 0, config, host)
        workers = [self._create(WorkerActor, rank, config, rank, host) for rank in range(1, config.ep_size)]
        keys = dict(enumerate(self._get([worker.public_key.remote() for worker in workers]), start=1))
        listening = head.listen.remote(keys, self.front_keys.public)
        addresses, self.front_address, self.head_key = self._get(listening)
        self._runs = [head.serve.remote()]
        self._runs += [worker.run.remote(addresses[rank]) for rank, worker in enumerate(workers, start=1)]
        self.ranks = self._get([actor.whoami.remote() for actor in self._actors])

    def _create(self, kind: type, rank: int, *arguments: Any) -> Any:
        """One rank's actor, in its bundle of the placement group."""
        config = self.config
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        remote = ray.remote if kind is HeadActor else ray.remote(concurrency_groups={"control": 2})
        options = remote(kind).options(
            name=_actor_name(self.name, rank),
            namespace=NAMESPACE,
            num_cpus=float(config.num_cpus_per_rank or 1),
            num_gpus=float(config.num_gpus_per_rank or 0),
            scheduling_strategy=strategy,
            runtime_env=_runtime_env(os.environ),
            max_restarts=0,
            max_task_retries=0,
        )
        try:
            actor = options.remote(*arguments)
        except ValueError as error:  # another start took the name a moment ago
            if "already taken" not in str(error):
                raise
            raise _name_taken(self.name) from error
        self._actors.append(actor)
        return actor

    def _get(self, refs: Any) -> Any:
        try:
            return ray.get(refs, timeout=self.config.start_timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise _own_error(error) from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise StartError(f"a rank did not start: {_first_line(error)}") from error

    def _wait_ready(self, on_state: Callable[[HeadState], None]) -> None:
        deadline = time.monotonic() + self.config.start_timeout_s
        while True:
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=POLL_S)
            if ended:
                raise self._start_failure()
            state: HeadState = self._get(self._actors[0].state.remote())
            on_state(state)
            if state.phase == "ready":
                self._is_ready = True
                return
            if time.monotonic() >= deadline:
                raise StartError(f"the engine was not ready within {self.config.start_timeout_s:g} s")

    def _start_failure(self) -> MetraleError:
        """The error of the rank that knows best: a reason of its own comes before a lost link."""
        ended, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=REASON_WAIT_S)
        for rank, ref in enumerate(self._runs):
            error = _own_error_of(ref) if ref in ended else None
            if isinstance(error, StartError | ConfigError):
                return error if rank == 0 else type(error)(f"{self._place_of(rank)}: {error.message}")
        dead = self.failure()
        return StartError(dead.message if dead else "the engine ended during its start")

    def _place_of(self, rank: int) -> str:
        """The rank, with its node where there are several."""
        nodes = {place["address"] for place in self.ranks}
        return f"rank {rank} on {self.ranks[rank]['address']}" if len(nodes) > 1 else f"rank {rank}"


def _actor_name(engine: str, rank: int) -> str:
    return f"{engine}/rank-{rank}"


def _is_taken(actor_name: str) -> bool:
    try:
        ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:  # nobody has it
        return False
    return True


def _name_taken(name: str) -> StartError:
    return StartError(
        f"an engine named {name!r} runs on this Ray already; end it, choose another name (--name), or give none"
    )


def _runtime_env(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What a rank gets of the driver's environment; None, which costs nothing, where there is nothing to give."""
    variables = {name: environment[name] for name in FORWARDED_VARIABLES if name in environment}
    return {"env_vars": variables} if variables else None


@contextlib.contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Ray's start replaces the process's handler of SIGTERM; one that the caller has installed comes back."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _node_address() -> str:
    """The address by which Ray's other nodes know this one: of several interfaces, a guess may name another."""
    here = ray.get_runtime_context().get_node_id()
    address: str = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
    return address


def _with_resources(config: EngineConfig) -> EngineConfig:
    """The configuration with device, cores and GPUs per rank settled from what the nodes offer."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) > 0]
    ranks_per_node = math.ceil(config.ep_size / max(1, len(nodes)))
    changes: dict[str, Any] = {}
    gpus = sum(node.get("GPU", 0.0) for node in nodes)
    device = config.device if config.device != "auto" else ("cuda" if gpus >= config.ep_size else "cpu")
    changes["device"] = device
    if device.startswith("cuda") and gpus == 0:
        raise ConfigError(f"device is {device!r}, and no node has a GPU; use cpu, or leave it out")
    if config.num_gpus_per_rank is None and device.startswith("cuda"):
        changes["num_gpus_per_rank"] = 1.0
    if config.num_cpus_per_rank is None:
        cores = min((node["CPU"] for node in nodes), default=1.0)
        changes["num_cpus_per_rank"] = max(1, int(cores // ranks_per_node))
    return dataclasses.replace(config, **changes)


def _lacking(config: EngineConfig, bundle: dict[str, float]) -> list[str]:
    """What all nodes together have too little of."""
    missing = []
    for name, amount in bundle.items():
        total = sum(node["Resources"].get(name, 0.0) for node in ray.nodes() if node["Alive"])
        if amount * config.ep_size > total:
            missing.append(f"{amount * config.ep_size - total:g} {name}")
    return missing


def _unplaceable(config: EngineConfig, bundle: dict[str, float], hopeless: bool) -> str:
    """What was asked for, what the nodes offer, and what is missing."""
    asked = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
    offers = "; ".join(
        f"{node['NodeManagerAddress']}: " + ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in bundle)
        for node in ray.nodes()
        if node["Alive"]
    )
    free = ray.available_resources()
    busy = [
        f"{amount * config.ep_size - free.get(name, 0.0):g} {name} that others use now, or an engine that is still open"
        for name, amount in bundle.items()
        if amount * config.ep_size > free.get(name, 0.0)
    ]
    missing = ", ".join(_lacking(config, bundle) or busy) or f"nodes that fit the placement {config.placement}"
    why = "cannot be placed" if hopeless else f"were not placed within {config.placement_timeout_s:g} s"
    return (
        f"{config.ep_size} ranks with {asked} each ({config.placement}) {why}. The nodes offer {offers}. "
        f"Missing: {missing}. Use fewer ranks (--ep-size), fewer cores for each (--num-cpus-per-rank, below 1 shares "
        "a core), another placement (--placement), or more nodes."
    )


def _worst(reasons: Sequence[tuple[int, MetraleError | None]]) -> EngineDead:
    """One error out of what each ended rank said: the head's own finding first, then a worker's reason."""
    by_rank = dict(reasons)
    own = by_rank.get(0)
    others = [(rank, why) for rank, why in reasons if rank != 0 and why is not None]
    if isinstance(own, EngineDead) and own.rank is not None:
        theirs = next((why for rank, why in others if rank == own.rank), None)
        detail = f" ({theirs.message})" if theirs is not None and theirs.message not in own.message else ""
        return EngineDead(f"{own.message}{detail}", rank=own.rank)
    if others and own is None:
        rank, why = others[0]
        at_fault = getattr(why, "rank", None)  # a worker that lost the head says so
        return EngineDead(f"rank {rank}: {why.message}", rank=rank if at_fault is None else at_fault)
    if own is not None:
        return EngineDead(f"rank 0: {own.message}", rank=0)
    rank = reasons[0][0]
    return EngineDead(f"rank {rank} ended", rank=rank)


def _reason(ref: Any) -> MetraleError | None:
    """What a rank's run raised; None when it returned."""
    error = _own_error_of(ref)
    return error if error is None or isinstance(error, MetraleError) else EngineDead(_first_line(error))


def _own_error_of(ref: Any) -> MetraleError | None:
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.RayTaskError as error:
        return _own_error(error)
    except ray.exceptions.RayError as error:
        return EngineDead(f"its process ended: {_first_line(error)}")
    return None


def _own_error(error: ray.exceptions.RayTaskError) -> MetraleError:
    """The error of ours inside Ray's wrapper; anything else becomes a StartError with its text."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, MetraleError):
        return cause
    return StartError(f"{type(cause).__name__}: {cause}" if cause is not None else str(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _whoami(rank: int, host: str) -> dict[str, Any]:
    return {"rank": rank, "pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "address": host}


def _log_to_stderr(config: EngineConfig) -> None:
    """Ray keeps each actor's stderr in its log files."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
