# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Service`: one engine on Ray and the HTTP server in front of it, in this process, from start to end.

Rules. The port is taken and the checkpoint looked at before anything is started. The server answers from then on: it is
live at once and ready after the engine's first token. The first signal drains: readiness turns to 503, nobody is
admitted, what runs may finish, and the rest is told; the second ends everything at once. An engine that has ended ends
the service, with its reason, once everybody who waited was told: whoever runs the service starts it again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from metrale_ray.cluster import Cluster
from metrale_ray.errors import EngineDead, StartError
from metrale_ray.model_files import open_model
from metrale_ray.process_memory import forget_start
from metrale_ray.progress import LoadProgress
from metrale_ray.serve.engine_link import EngineAddress, EngineLink
from metrale_ray.serve.http.app import create_app
from metrale_ray.serve.loading import hold_grammars, hold_template, http_settings, served_model, template_of
from metrale_ray.serve.metrics.front_metrics import FrontMetrics
from metrale_ray.serve.options import ModelOptions, ServiceOptions
from metrale_ray.serve.structured import GrammarChecks
from metrale_ray.serve.watch import Watch
from metrale_ray.service.server import HttpServer, listen
from metrale_ray.service.stopping import Stopping
from metrale_ray.termination import limit_clean_up

log = logging.getLogger(__name__)

LOOK_S = 0.25
TOLD_TIMEOUT_S = 5.0
"""Once the engine has ended, everybody who waits is told at once; then their connections may end."""

LOST_TIMEOUT_S = 30.0
"""How long an engine may be lost that has not ended: long enough for a new session with one that was held up."""

OnReady = Callable[[str, tuple[str, ...], list[dict[str, Any]]], None]


class Service:
    """Make it, and `run` it once, in the main thread. `on_ready` gets the URL, the model's names and the ranks.

    `tell` gets a line for people while it ends, which takes a moment.
    """

    def __init__(
        self, model: ModelOptions, options: ServiceOptions, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._model = model
        self._options = options
        self._tell = tell
        self._address: concurrent.futures.Future[EngineAddress] = concurrent.futures.Future()
        self._death: EngineDead | None = None
        self._stopping = Stopping()

    def run(self, on_ready: OnReady = lambda url, names, ranks: None) -> None:
        """Serve until a signal ends it. Raises StartError and its kinds, ConfigError, EngineDead, KeyboardInterrupt."""
        config = self._model.config.resolved()
        with ExitStack() as steps:
            listener = listen(self._options.host, self._options.port)
            steps.callback(listener.close)
            files = open_model(config)
            cluster = Cluster(config)
            steps.callback(lambda: cluster.close(at_once=self._stopping.is_urgent))
            watch = Watch(cluster.wait_ended, lambda death: self._note_death(death, link))
            link = EngineLink(
                self._find,
                files.tokenizer,
                progress_timeout_s=self._options.progress_timeout_s,
                explain=watch.explain,
            )
            template = template_of(self._model, files.tokenizer, self._options.limits)
            grammars = GrammarChecks(self._options.limits)
            served = served_model(
                files.path, self._model, files.tokenizer, template, link, files.max_model_len, grammars
            )
            app = create_app([served], http_settings(self._options), FrontMetrics())
            tasks = [link.run, lambda: hold_template(template), lambda: hold_grammars(grammars)]
            server = HttpServer(app, listener, tasks)
            steps.callback(server.close)
            server.start()
            with LoadProgress(config.ep_size) as progress:
                cluster.start(progress.update)
            self._address.set_result(
                EngineAddress(cluster.front_address, cluster.front_keys, cluster.head_key, config.max_queue_len)
            )
            steps.callback(watch.stop)
            watch.start()
            with self._stopping.handled():
                if self._wait_ready(server, link):
                    on_ready(_url(listener), served.names, cluster.ranks)
                    forget_start()
                self._wait_end(server, link)
                self._end(server, app)
                self._tell("everybody has had an answer; the engine ends")

    async def _find(self) -> EngineAddress:
        """Where the engine is, once it has started; there is never another one."""
        where = await asyncio.shield(asyncio.wrap_future(self._address))
        if self._death is not None:
            raise self._death
        return where

    def _note_death(self, death: EngineDead, link: EngineLink) -> None:
        """All who wait are told at once, also where the session itself would notice later."""
        self._death = death
        link.die(death)
        self._stopping.wake()

    def _wait_ready(self, server: HttpServer, link: EngineLink) -> bool:
        """Whether it became ready; False when it is to end before. Raises StartError."""
        while not link.num_sessions:
            if self._is_over(server):
                return False
            if link.refusal:
                raise StartError(link.refusal)
            self._stopping.wait(LOOK_S)
        return True

    def _wait_end(self, server: HttpServer, link: EngineLink) -> None:
        """A head that is stopped has not ended; when its session stays lost, it is given up all the same."""
        seen_s = time.monotonic()
        while not self._is_over(server):
            reason = link.lost_reason()
            if not reason:
                seen_s = time.monotonic()
            elif time.monotonic() > seen_s + LOST_TIMEOUT_S:
                self._note_death(EngineDead(reason, rank=0), link)
            self._stopping.wait(LOOK_S)

    def _is_over(self, server: HttpServer) -> bool:
        return self._stopping.is_asked or self._death is not None or server.has_ended.is_set()

    def _end(self, server: HttpServer, app: Any) -> None:
        """Let everybody have an answer. Raises EngineDead, StartError, and KeyboardInterrupt for a second signal."""
        if server.has_ended.is_set():
            raise StartError(f"the HTTP server ended: {server.failure or 'by itself'}")
        timeout_s = TOLD_TIMEOUT_S if self._death is not None else self._options.drain_timeout_s
        drained = server.call(app.state.drain.run(timeout_s))
        drained.add_done_callback(lambda future: self._stopping.wake())
        while not drained.done() and not self._stopping.is_urgent:
            self._stopping.wait(LOOK_S)
        if self._stopping.is_urgent:
            limit_clean_up(self._stopping.signals[-1])
            raise KeyboardInterrupt
        if drained.cancelled():
            raise StartError(f"the HTTP server ended: {server.failure or 'by itself'}")
        drained.result()
        if self._death is not None:
            raise self._death


def _url(listener: Any) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
