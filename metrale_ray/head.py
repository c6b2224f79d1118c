# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Head`: the process that owns the scheduler, rank 0's model and every decision.

Two threads, and a few more that compile grammars (`compiling`). The engine thread touches the engine, the links and the
model, and nobody else does; what fronts ask and get passes over its `desk`. The asyncio loop holds the fronts' sessions
and answers questions. From the loop to the engine goes one inbox, of which a part is read between steps, and which
wakes an idle engine; back goes one call per step, and one for the answers given between steps. No text, template or
HTTP here.

Whoever waits is answered: when the engine ends, for whatever reason, every front is told so and why. When the fronts'
server fails, the engine ends too: nothing is computed for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from metrale_ray.chores import Chores
from metrale_ray.compiling import MAX_THREADS, Compiling
from metrale_ray.config import EngineConfig
from metrale_ray.desk import ByFront, Desk, refusal
from metrale_ray.engine import Engine
from metrale_ray.errors import EngineDead, MetraleError, RequestError
from metrale_ray.figures import Figures, HeadView, document_text
from metrale_ray.grammar.grammars import Grammars
from metrale_ray.inbox import Arrived, Inbox
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.device import use_threads
from metrale_ray.model.ranks import RankSetup, open_rank
from metrale_ray.orders import check_links
from metrale_ray.protocol.commands import Progress, Rank
from metrale_ray.protocol.front import Abort, Finish, FrontId, FrontServer, Opened, Submit
from metrale_ray.protocol.link import HeadLink
from metrale_ray.protocol.transport import Listening
from metrale_ray.recording import Recording
from metrale_ray.scheduler.admission import check_prompt_length
from metrale_ray.start import shake_hands, start_engine
from metrale_ray.surroundings import HostSurroundings, Surroundings
from metrale_ray.vocabulary import within
from metrale_ray.worker import HeadAddress

log = logging.getLogger(__name__)

FIRST_EPOCH = 1


@dataclass(frozen=True, slots=True)
class HeadState:
    """Where the head is. `phase`: "starting", "loading", "ready", "ended". `progress`: per rank, while loading."""

    phase: str
    progress: dict[int, Progress]
    failure: MetraleError | None = None


class Head:
    """The head's process around the engine. `host` is this node's own address.

    `surroundings` are what it stands on, this host's if none are given; `epoch` is the number of this life of the
    group.
    """

    def __init__(
        self, config: EngineConfig, host: str, surroundings: Surroundings | None = None, epoch: int = FIRST_EPOCH
    ) -> None:
        self._config = config
        self._host = host
        self._surroundings = HostSurroundings(config, host) if surroundings is None else surroundings
        self._clock = clock = self._surroundings.clock
        self._epoch = epoch
        self._recording = Recording(clock=clock)
        self._version = config.protocol_version
        self._inbox = Inbox(config.max_queue_len, condition=self._surroundings.condition)
        self._desk = Desk(self._inbox, self._send, self._drop, clock)
        self._stopping = threading.Event()
        self._state = HeadState("starting", {})
        self._server_failure: Exception | None = None
        self._links: list[HeadLink] = []
        self._transports: dict[int, Listening] = {}
        self._setup: RankSetup | None = None
        self._engine: Engine | None = None
        self._collectives: Collectives | None = None
        self._figures = Figures(config.ep_size, epoch, clock)
        self._refused: dict[str, int] = {}  # requests that the loop's side did not take, by code

    async def listen(self, worker_keys: Mapping[int, str]) -> dict[int, HeadAddress]:
        """Check the checkpoint, and open every door: one address for each worker, which only the process with that
        rank's public key may use. Raises CheckpointError, and ConfigError where the journal cannot be written."""
        config, around = self._config, self._surroundings
        self._loop = asyncio.get_running_loop()
        self._setup = setup = await around.in_thread(partial(open_rank, config, 0, self._host, around.process))
        self._recording = Recording(around.journal(), self._clock)
        try:
            return await self._open_doors(setup, worker_keys)
        except BaseException as error:
            self._recording.close("the engine did not start", str(error))
            raise

    async def _open_doors(self, setup: RankSetup, worker_keys: Mapping[int, str]) -> dict[int, HeadAddress]:
        config, around = self._config, self._surroundings
        self._grammars = _grammars(setup)
        num_threads = min(MAX_THREADS, around.num_cores - 1)
        self._compiling = Compiling(
            self._grammars, self._inbox, self._refuse_arrived, max_threads=num_threads, aside=around.aside
        )
        self._transports = transports = {
            rank: around.listen(rank, worker_keys[rank]) for rank in range(1, config.ep_size)
        }
        self._links = [HeadLink(Rank(rank), t, self._version, self._epoch) for rank, t in transports.items()]
        group_port = around.open_group()
        self._fronts = FrontServer(
            self._host,
            self._on_message,
            self._on_gone,
            self._opened,
            around.keys,
            figures=self._figures_text,
            make_router=around.front_router,
            clock=self._clock,
        )
        await self._fronts.start()
        key = self.public_key
        return {rank: HeadAddress(t.address, key, self._host, group_port) for rank, t in transports.items()}

    @property
    def public_key(self) -> str:
        """By which workers and fronts know this process."""
        return self._surroundings.keys.public

    def allow_front(self, public_key: str, *, is_lasting: bool = False) -> None:
        """Let the front with this key connect, for good if it is lasting, else see `FrontServer`.

        After `listen`, on its loop. Raises StartError for what is no key.
        """
        self._fronts.allow(public_key, is_lasting=is_lasting)

    @property
    def front_address(self) -> str:
        """Where fronts connect."""
        return self._fronts.address

    @property
    def state(self) -> HeadState:
        """The phase and, while loading, each rank's progress."""
        return self._state

    async def serve(self) -> None:
        """Run the engine until `stop`. Raises what ended it otherwise: StartError before ready, EngineDead after."""
        engine = asyncio.ensure_future(self._surroundings.in_thread(self._engine_main))
        server = asyncio.ensure_future(self._fronts.wait_failed())
        try:
            await asyncio.wait({engine, server}, return_when=asyncio.FIRST_COMPLETED)
            if server.done():
                self._server_failure = server.result()
                self._inbox.wake()
            await engine
        finally:
            engine.cancel()
            server.cancel()
            self._compiling.close()
            self._tell_fronts()  # again, should the engine thread have broken before it could
            await self._fronts.close()
        if self._state.failure is not None:
            raise self._state.failure

    async def stop(self) -> None:
        """Let the engine end after its current step."""
        self._stopping.set()
        self._inbox.wake()

    async def stats(self) -> dict[str, Any]:
        """Gauges and counters, as they are now."""
        stats = self._engine.stats() if self._engine is not None else {}
        return {**stats, "epoch": self._epoch, "refused_strangers": self._num_strangers}

    def note_places(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Where each rank is, for the figures: maps with `rank`, `pid`, `node`, `address`."""
        self._figures.note_places(places)

    def figures(self) -> dict[str, Any]:
        """What `figures` says of the engine now, whatever its phase. Never waits; from any thread."""
        state, inbox = self._state, self._inbox
        view = HeadView(
            state.phase,
            state.progress,
            state.failure,
            self._engine,
            self._collectives,
            inbox.num_sequences,
            inbox.num_dropped,
            dict(self._refused),
            self._fronts.num_fronts,
            self._num_strangers,
            self._recording.journal_state,
        )
        return self._figures.document(view)

    # The loop's side ----------------------------------------------------------------------------------------------

    def _on_message(self, front: FrontId, message: Submit | Abort | Finish) -> None:
        if self._state.phase == "ended":
            return  # the front is being told
        if not isinstance(message, Submit):
            self._inbox.end(front, message)
            return
        try:
            if self._state.phase != "ready":
                raise RequestError("the engine is not ready yet; wait until it is", code="not_ready")
            check_prompt_length(len(message.prompt_token_ids), self._required_setup().max_model_len)
            arrived = self._inbox.submit(front, message, self._clock())
            if message.params.grammar is not None:
                self._compiling.start(arrived)
        except RequestError as error:
            self._refuse(front, message.request_id, error)

    def _refuse_arrived(self, arrived: Arrived, error: RequestError) -> None:
        self._refuse(arrived.front, arrived.submit.request_id, error)

    def _refuse(self, front: FrontId, number: int, error: RequestError) -> None:
        self._refused[error.code] = self._refused.get(error.code, 0) + 1
        self._recording.refused((front, number), error.code, error.message)
        self._fronts.post(front, [refusal(number, error)])

    def _tell_fronts(self) -> None:
        failure = self._state.failure
        if failure is not None:
            self._fronts.post_dead(failure.message, getattr(failure, "rank", None))

    def _on_gone(self, front: FrontId) -> None:
        self._inbox.gone(front)

    def _required_setup(self) -> RankSetup:
        if self._setup is None:
            raise AssertionError("listen() comes first")
        return self._setup

    def _opened(self) -> Opened:
        setup = self._required_setup()
        return Opened(max_model_len=setup.max_model_len, vocab_size=setup.decoder.vocab_size, engine_epoch=self._epoch)

    @property
    def _num_strangers(self) -> int:
        return self._fronts.num_refused + sum(t.num_refused for t in self._transports.values())

    def _figures_text(self) -> str:
        return document_text(self.figures())

    def _post(self, outputs: ByFront) -> None:
        for front, of_front in outputs.items():
            self._fronts.post(front, of_front)

    # The engine thread --------------------------------------------------------------------------------------------

    def _engine_main(self) -> None:
        failure: MetraleError | None = EngineDead("the engine ended, and nothing says why")
        cause: BaseException | None = failure
        try:
            with self._surroundings.own_cores():
                engine = self._engine = self._start(self._required_setup())
                self._state = HeadState("ready", {})
                self._run(engine)
                engine.shutdown()
            failure = cause = None
        except BaseException as error:  # whatever ended the engine is told to all who wait
            failure, cause = self._describe(error), error
            log.error("the engine ended: %s", failure.message, exc_info=not isinstance(error, MetraleError))
        finally:
            self._end(failure, cause)

    def _start(self, setup: RankSetup) -> Engine:
        use_threads(self._config.threads_per_rank)
        self._grammars.prepare()  # while the workers come
        met = shake_hands(setup, self._links, self._epoch, self._clock)
        self._collectives = self._surroundings.join_group(setup, lambda: check_links(self._links))
        self._state = HeadState("loading", {})
        return start_engine(
            setup,
            self._links,
            self._collectives,
            met,
            epoch=self._epoch,
            deliver=self._desk.deliver,
            on_load=self._note_progress,
            clock=self._clock,
            recording=self._recording,
        )

    def _note_progress(self, rank: Rank, progress: Progress) -> None:
        self._state = HeadState("loading", {**self._state.progress, rank: progress})

    def _run(self, engine: Engine) -> None:
        chores = Chores(engine, self._config, lambda: check_links(self._links), self._clock)
        worked = False
        while not self._stopping.is_set():
            if self._server_failure is not None:
                raise EngineDead(f"the server of the fronts failed: {self._server_failure}")
            if not worked:
                self._inbox.wait(chores.wait_s)
            self._take(engine)
            engine.expire(self._clock())
            worked = engine.step()
            if worked:
                chores.after_step()
            else:
                self._figures.note_idle(self._clock())
                chores.while_idle()

    def _take(self, engine: Engine) -> None:
        if self._desk.take(engine):
            self._desk.flush()

    def _send(self, outputs: ByFront) -> None:
        self._loop.call_soon_threadsafe(self._post, outputs)

    def _drop(self, front: FrontId, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._fronts.drop, front, reason)

    def _describe(self, error: BaseException) -> MetraleError:
        """The failure as whoever waits gets it: a start's own error, and EngineDead once the engine was ready."""
        rank = getattr(error, "rank", None)
        if self._state.phase != "ready" and isinstance(error, MetraleError):
            return error
        message = error.message if isinstance(error, MetraleError) else f"{type(error).__name__}: {error}"
        return EngineDead(message, rank=rank)

    def _end(self, failure: MetraleError | None, cause: BaseException | None) -> None:
        """Tell the fronts first, then let everything go, whatever of it breaks. `failure` is how they hear of `cause`.

        The links go after the journal, so that the head's reason is there before its workers leave.
        """
        self._state = HeadState("ended", {}, failure)
        self._loop.call_soon_threadsafe(self._tell_fronts)
        with contextlib.ExitStack() as closing:
            if self._collectives is not None:
                closing.callback(self._collectives.close)
            for link in self._links:
                closing.callback(link.close)
            closing.callback(self._end_recording, failure, cause)

    def _end_recording(self, failure: MetraleError | None, cause: BaseException | None) -> None:
        """Close the journal, and keep the last commands where something broke."""
        recording, reason = self._recording, None if failure is None else failure.message
        recording.close("the engine was stopped" if reason is None else "the engine ended", reason)
        if cause is not None and recording.started is not None:
            self._surroundings.keep_incident(recording.last_records(cause))


def _grammars(setup: RankSetup) -> Grammars:
    checkpoint, vocab_size = setup.checkpoint, setup.decoder.vocab_size
    return Grammars(checkpoint.path, vocab_size, within(checkpoint.eos_token_ids, vocab_size))
