# SPDX-License-Identifier: MIT OR Apache-2.0
"""The service on Ray Serve: `serve run metrale_ray.serve.deployment:build_app model=PATH ep_size=2`.

Two kinds of deployments. An `Engine` replica is the composition root of one engine: it places the ranks, owns them, and
ends with them; it is not on the path of a token. A `Front` replica has the HTTP app; it asks the engine once for its
address, and from then on speaks with the head over a session of its own. There may be any number of fronts.

Rules. A replica of `Engine` has started when its engine has given a token, and is unhealthy when the head or a rank has
gone or no command completes; Ray Serve then makes another one, and the fronts, which answer 503 meanwhile, find it. A
front that restarts disturbs nobody. When an app is taken down, its engine waits for what runs, then ends; whoever still
waits is told.

What it leaves out: where Ray Serve listens, and how many requests its proxy lets in (its own `http_options`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.routing import Mount

from metrale_ray.cluster import Cluster
from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, EngineDead, MetraleError, StartError
from metrale_ray.head import HeadState
from metrale_ray.model_files import open_model
from metrale_ray.process_memory import forget_start
from metrale_ray.protocol.keys import new_keys
from metrale_ray.serve.backend import ServedModel
from metrale_ray.serve.engine_link import EngineAddress, EngineLink
from metrale_ray.serve.http.app import create_app
from metrale_ray.serve.http.auth import by_digest
from metrale_ray.serve.loading import hold_grammars, hold_template, http_settings, served_model, template_of
from metrale_ray.serve.metrics.front_metrics import FrontMetrics
from metrale_ray.serve.options import (
    ACCESS_LOGGER,
    ModelOptions,
    ServiceOptions,
    model_options,
    service_options,
    split_options,
    with_numbers,
)
from metrale_ray.serve.structured import GrammarChecks
from metrale_ray.serve.watch import Watch

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""For an engine to say where it is; one that is starting is asked again."""

LOOK_S = 0.2
IDLE_ANSWERS = 3
MARGIN_S = 15.0
"""Above the drain's own time, for an engine to end in order before Ray Serve kills it."""

MAX_ONGOING = 4096
"""Requests that Ray Serve gives one front at a time. The engine's own queue is the bound that clients see, as a 429."""

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
START_TRIES = 3
FIRST_TOKEN_S = 60.0
"""How long a front that starts waits for its engines, so that whoever waits for the application finds it ready."""

NOT_HERE = ("host", "port")
REQUEST_ID = b"x-request-id"  # Ray Serve's proxy sends it back by itself


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application, from the same options as the command line's, with underscores.

    One model's options stand beside the service's; several models are a list of mappings under `models`. `num_fronts`:
    replicas of `Front`. Raises ConfigError.
    """
    values = with_numbers(args)
    num_fronts = values.pop("num_fronts", 1)
    if type(num_fronts) is not int or num_fronts < 1:
        raise ConfigError(f"num_fronts is {num_fronts!r}; it must be an integer of at least 1")
    models, service = _models_and_service(values)
    names = [_engine_name(index, len(models)) for index in range(len(models))]
    in_files = {name: value for name, value in service.items() if name.endswith("_file")}
    options = service_options({name: value for name, value in service.items() if name not in in_files}, os.environ)
    service = {**service, **_key_digests(options)}
    times = {name: service[name] for name in ("drain_timeout_s", "progress_timeout_s") if name in service}
    engines = [
        Engine.options(  # type: ignore[attr-defined]  # what Serve makes of a class
            name=name, graceful_shutdown_timeout_s=options.drain_timeout_s + MARGIN_S
        ).bind(model, times)
        for name, model in zip(names, models, strict=True)
    ]
    front: serve.Application = Front.options(  # type: ignore[attr-defined]
        num_replicas=num_fronts, graceful_shutdown_timeout_s=options.drain_timeout_s + MARGIN_S
    ).bind(models, service, engines)
    return front


def _models_and_service(values: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each model's options, and the service's. What can be checked here is."""
    listed = values.pop("models", None)
    own, service = split_options(values)
    for name in NOT_HERE:
        if name in service:
            raise ConfigError(f"{name} is Ray Serve's own here: set it in the http_options of its configuration")
    if listed is None:
        listed = [own]
    elif own:
        raise ConfigError(f"{next(iter(own))} stands beside models; put it into the entries of models")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        raise ConfigError("models must be a list of mappings, one for each model, such as [{model: PATH, ep_size: 2}]")
    models = []
    for each in listed:
        model, of_service = split_options(each)
        if of_service:
            raise ConfigError(f"{next(iter(of_service))} is for all models; put it beside models")
        model_options({name: value for name, value in model.items() if name != "chat_template"})
        models.append(model)
    return models, service


def _key_digests(options: ServiceOptions) -> dict[str, list[str]]:
    """The keys of the arguments and of this process's environment, which replicas do not see, as digests.

    Ray Serve keeps the arguments of deployments, and shows them.
    """
    keys = {"api_key": options.api_keys, "admin_key": options.admin_keys}
    return {name: [by_digest(key) for key in given] for name, given in keys.items() if given}


def _engine_name(index: int, count: int) -> str:
    return "Engine" if count == 1 else f"Engine-{index}"


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING,
    health_check_period_s=HEALTH_PERIOD_S,
    health_check_timeout_s=HEALTH_TIMEOUT_S,
    max_constructor_retry_count=START_TRIES,
    ray_actor_options={"num_cpus": 0},
)
class Engine:
    """One engine and its end. Its ranks are actors of their own, in a placement group of their own."""

    async def __init__(self, model: Mapping[str, Any], service: Mapping[str, Any]) -> None:  # type: ignore[misc]
        options = model_options(model)
        _log_to_stderr(options)
        self._service = service_options(service, {})  # its two times
        self._config: EngineConfig = options.config.resolved()
        self._cluster = Cluster(self._config)
        self._watch = Watch(self._cluster.wait_ended, self._note_death)
        self._link = EngineLink(
            self._find,
            None,
            progress_timeout_s=self._service.progress_timeout_s,
            explain=self._watch.explain,
        )
        await asyncio.to_thread(open_model, self._config)  # refuse before anything is placed
        await asyncio.to_thread(self._cluster.start, _log_state)
        try:
            self._watch.start()
            self._session = asyncio.ensure_future(self._link.run())
            await self._wait_first_token()
        except BaseException:
            await self._end()
            raise

    async def connect(self, public_key: str) -> dict[str, Any]:
        """Let a front with this key in, and tell it where the head is."""
        await asyncio.to_thread(self._cluster.allow_front, public_key)
        return {
            "address": self._cluster.front_address,
            "head_key": self._cluster.head_key,
            "max_queue_len": self._config.max_queue_len,
        }

    async def check_health(self) -> None:
        """Raises EngineDead when the engine has ended, is not heard of for 10 s, or does not move.

        A session is lost after 10 s of silence; a head that is held up for less is not worth the loss of all that runs.
        """
        death = self._watch.death
        if death is not None:
            raise EngineDead(death.message, rank=death.rank)
        reason = self._link.lost_reason() or self._link.health().moving_reason
        if reason:
            raise EngineDead(reason)

    async def __del__(self) -> None:
        """Wait for what runs, within the time to drain, and end the engine. Ray Serve calls it, and waits."""
        if not hasattr(self, "_session"):
            return
        deadline = time.monotonic() + self._service.drain_timeout_s
        num_idle = 0  # answers in a row: a request may have been on its way at the first
        while self._watch.death is None and num_idle < IDLE_ANSWERS and time.monotonic() < deadline:
            num_idle = 0 if (await self._link.ask()).get("has_work") else num_idle + 1
            await asyncio.sleep(LOOK_S)
        await self._end()

    async def _end(self) -> None:
        self._watch.stop()
        self._session.cancel()
        await asyncio.gather(self._session, return_exceptions=True)
        await asyncio.to_thread(self._cluster.close)
        await asyncio.to_thread(self._watch.join)

    def _note_death(self, death: EngineDead) -> None:
        log.error("the engine ended: %s", death.message)
        self._link.die(death)

    async def _find(self) -> EngineAddress:
        if self._watch.death is not None:
            raise EngineDead(self._watch.death.message, rank=self._watch.death.rank)
        cluster = self._cluster
        return EngineAddress(cluster.front_address, cluster.front_keys, cluster.head_key, self._config.max_queue_len)

    async def _wait_first_token(self) -> None:
        while not self._link.health().is_ready:
            if self._watch.death is not None:
                raise StartError(self._watch.death.message, rank=self._watch.death.rank)
            if self._link.refusal:
                raise StartError(self._link.refusal)
            await asyncio.sleep(LOOK_S)


def _to_replica() -> Starlette:
    """The app that Ray Serve is given: whatever comes is the replica's own app's, which is made when it starts."""

    async def http(scope: Any, receive: Any, send: Any) -> None:
        async def send_without_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != REQUEST_ID]
                message = {**message, "headers": headers}
            await send(message)

        await serve.get_replica_context().servable_object.http_app(scope, receive, send_without_id)

    return Starlette(routes=[Mount("", app=http)])


@serve.deployment(
    max_ongoing_requests=MAX_ONGOING,
    health_check_period_s=HEALTH_PERIOD_S,
    health_check_timeout_s=HEALTH_TIMEOUT_S,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress(_to_replica)
class Front:
    """The HTTP app of all models, ready when every engine is."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, models: Sequence[Mapping[str, Any]], service: Mapping[str, Any], engines: Sequence[Any]
    ) -> None:
        options = service_options({**service}, os.environ)
        served: list[ServedModel] = []
        self._tasks: list[asyncio.Future[None]] = []
        grammars = GrammarChecks(options.limits)
        for values, engine in zip(models, engines, strict=True):
            model = model_options(values)
            _log_to_stderr(model)
            files = await asyncio.to_thread(open_model, model.config.resolved())
            link = EngineLink(_finder(engine), files.tokenizer, progress_timeout_s=options.progress_timeout_s)
            template = template_of(model, files.tokenizer, options.limits)
            served.append(
                served_model(files.path, model, files.tokenizer, template, link, files.max_model_len, grammars)
            )
            self._tasks += [asyncio.ensure_future(link.run()), asyncio.ensure_future(hold_template(template))]
        self._tasks.append(asyncio.ensure_future(hold_grammars(grammars)))
        self.http_app = create_app(served, http_settings(options), FrontMetrics())
        if not options.api_keys:
            log.warning("there is no key: whoever reaches Ray Serve's proxy may use this service")
        await self._wait_engines(served)
        forget_start()

    async def _wait_engines(self, served: Sequence[ServedModel]) -> None:
        """Until each engine is ready for this front, or for a while."""
        deadline = time.monotonic() + FIRST_TOKEN_S
        while time.monotonic() < deadline and not all(model.backend.health().is_ready for model in served):
            await asyncio.sleep(LOOK_S)

    async def check_health(self) -> None:
        """Raises StartError when a part of this replica has stopped working; Ray Serve then makes another one."""
        if any(task.done() for task in self._tasks):
            raise StartError("a task of this front has ended, so it cannot go on; its log has the reason")

    async def __del__(self) -> None:
        """Leave the engines, which end what still runs for this front."""
        tasks = getattr(self, "_tasks", [])  # none where the constructor failed
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _finder(engine: Any) -> Any:
    """How a front finds the engine behind a handle: by one call, with a key of its own."""
    keys = new_keys()

    async def find() -> EngineAddress:
        try:
            told = await asyncio.wait_for(engine.connect.remote(keys.public), CONNECT_TIMEOUT_S)
        except MetraleError:
            raise
        except TimeoutError as error:
            raise StartError("the engine is not there; it may be starting") from error
        except (RayServeException, ray.exceptions.RayError) as error:
            raise StartError(f"the engine is not there: {str(error).strip().splitlines()[-1]}") from error
        return EngineAddress(told["address"], keys, told["head_key"], told["max_queue_len"])

    return find


def _log_state(state: HeadState) -> None:
    log.debug("the engine is %s", state.phase)


def _log_to_stderr(options: ModelOptions) -> None:
    """Ray Serve keeps each replica's stderr in its log files: one line for each request, as alone."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    level = options.config.log_level
    logging.getLogger("metrale_ray").setLevel(level.upper())
    if level == "warning":
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)
