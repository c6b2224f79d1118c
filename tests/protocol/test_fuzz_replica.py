# SPDX-License-Identifier: MIT OR Apache-2.0
"""Damaged commands against a real rank: each runs wholly or has no effect, and the next command finds all in order.

Two replicas of one tiny model. One is a worker behind its link and gets every damaged frame. The other, its twin, is
given only the commands that the worker took, each made anew from its values. After every frame both must be the same
and what a mirror in plain Python says: slots, lengths, block tables, blocks in use, digest; and the same logits, and at
the end of a life every cached key and value of a live sequence.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import Desync, EpCommandFailed, FrameError, SessionError
from metrale_ray.model.collectives import OneRank
from metrale_ray.model.contract.ep import Ep
from metrale_ray.model.execute import Replica
from metrale_ray.model.ranks import RankSetup, build_replica, open_rank
from metrale_ray.protocol.codec import decode_command, encode_command, encode_welcome
from metrale_ray.protocol.commands import (
    BlockId,
    Command,
    CommandFrame,
    Decode,
    DecodeBatch,
    Envelope,
    FreeSlot,
    Hello,
    Load,
    Logits,
    MixedStep,
    Ping,
    PrefillChunk,
    Rank,
    Reply,
    Settled,
    Shutdown,
    Slot,
    Span,
    Status,
    Welcome,
)
from metrale_ray.protocol.link import WorkerLink
from tests.fixtures.tiny import VOCAB_SIZE, write_tiny
from tests.protocol.feed import Feed
from tests.protocol.fuzzing import run_frames, steady_memory
from tests.protocol.mutations import Frame, Mutator
from tests.protocol.samples import COMMANDS, to_bytes
from tests.protocol.slot_mirror import Mirror, Row

NUM_FRAMES = 6_000
WITH_EFFECT = ("DECODE", "DECODE_BATCH", "PREFILL_CHUNK", "MIXED_STEP", "FREE_SLOT")
NUM_BLOCKS, BLOCK_SIZE, MAX_BATCH, MAX_TOKENS = 24, 4, 4, 12
SETTINGS: dict[str, Any] = {
    "max_batch_size": MAX_BATCH,
    "max_num_batched_tokens": MAX_TOKENS,
    "block_size": BLOCK_SIZE,
    "max_model_len": 48,
    "dtype": "float32",
    "device": "cpu",
}
STEPS_OF_A_LIFE = 60
State = dict[str, Any]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> RankSetup:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "mixtral", num_hidden_layers=1)
    return setup_of(folder)


def setup_of(folder: Path) -> RankSetup:
    return open_rank(EngineConfig(model=str(folder), **SETTINGS).resolved({}), 0)


class Side:
    """One replica and its model."""

    def __init__(self, setup: RankSetup) -> None:
        sizes = (setup.config.max_num_batched_tokens, setup.decoder.hidden_size, setup.dtype)
        self.replica, self.model = build_replica(setup, OneRank(0, 1, *sizes, "cpu"), None, _no_report)

    def state(self) -> State:
        """Everything that a command may change, but the cache."""
        slots = self.replica.slots
        live = {int(slot): (seq.length, tuple(seq.block_table)) for slot, seq in slots._live.items()}
        return {
            "live": live,
            "owned": bytes(slots._owned),
            "digest": slots.digest,
            "staged": slots.staged_seq,
            "model": sorted(self.model._live),
            "loaded": self.model.num_total_blocks,
        }

    def cached(self) -> list[torch.Tensor]:
        """Keys and values of every settled token, slot by slot."""
        cache = self.model._cache
        assert cache is not None
        live = sorted(self.replica.slots._live.items())
        places = [place for _, seq in live for place in cache.places(seq.block_table, 0, seq.length)]
        return [cache.gather(layer, torch.tensor(places, dtype=torch.long)) for layer in range(len(cache.layers))]


def _no_report(replica: Replica, frame: CommandFrame, progress: object) -> None:
    """Nobody listens to the progress of a load."""


class Life:
    """One life of a worker and its twin, with the head that speaks to it."""

    def __init__(self, setup: RankSetup, chance: random.Random) -> None:
        self.chance = chance
        self.worker, self.twin = Side(setup), Side(setup)
        self.mirror = Mirror()
        self.feed = Feed()
        self.link = WorkerLink(Rank(0), self.feed, 2)
        self.ep = Ep(self.link)
        self.link.hello(Hello(Rank(0), 2, {}, {}, NUM_BLOCKS))
        self.feed.put(encode_welcome(Welcome(2, 1, "")))
        self.link.expect_welcome(0)
        self.seq, self.settled = 0, None  # type: tuple[int, Settled | None]
        self.received: list[CommandFrame] = []
        self.has_ended = False
        receive = self.link.receive

        def noted() -> CommandFrame:
            frame = receive()
            self.received.append(frame)
            return frame

        self.link.receive = noted  # type: ignore[method-assign]

    def frame_of(self, command: Command, *, settles_otherwise: bool = False) -> bytes:
        """The next command, as the head would send it, or as one would that judged the last command otherwise."""
        settled = self.settled
        if settles_otherwise and settled is not None:
            settled = Settled(settled.seq, not settled.ok)
        return encode_command(Envelope(2, 1, self.seq + 1, settled), command)

    def give(self, data: bytes) -> str:
        """One step of the worker with `data`, and then the twin's. Raises what the worker raises."""
        before, session = self.worker.state(), dict(vars(self.link._session))
        self.feed.put(data)
        self.received.clear()
        try:
            goes_on, reply_ok = self.ep.ep_worker_step(self.worker.replica), True
        except (FrameError, SessionError):
            assert not self.received
            assert self.worker.state() == before
            assert vars(self.link._session) == session
            raise
        except Desync:
            self.check_left(before)
            raise
        except EpCommandFailed:
            goes_on, reply_ok = True, False
        return self.follow(data, goes_on, reply_ok)

    def check_left(self, before: State) -> None:
        """The rank leaves, and nothing of the disputed command is settled."""
        self.has_ended = True
        after = self.worker.state()
        assert (after["digest"], after["loaded"]) == (before["digest"], before["loaded"])
        settled = {slot: seq[0] for slot, seq in before["live"].items()}
        assert {slot: seq[0] for slot, seq in after["live"].items()} == settled

    def follow(self, data: bytes, goes_on: bool, reply_ok: bool) -> str:
        """The twin does what the worker did, from the command's values, and must come to the same."""
        (frame,) = self.received
        anew = decode_command(encode_command(frame.envelope, frame.command))
        assert (anew.envelope, anew.command) == (frame.envelope, frame.command)
        reply = self.twin.replica.run(CommandFrame(anew.envelope, anew.command, data))
        assert (reply.status is Status.OK) == reply_ok
        assert self.worker.state() == self.twin.state()
        self.mirror.take(frame, reply_ok)
        self.check_mirror()
        self.check_logits(frame.command, reply)
        assert goes_on == (not isinstance(frame.command, Shutdown))
        self.has_ended = not goes_on
        # What succeeded is mostly settled as a success; now and then another rank has failed.
        ok = reply.status is Status.OK and self.chance.random() < 0.85
        self.seq, self.settled = frame.envelope.seq, Settled(frame.envelope.seq, ok)
        name = frame.command.code.name
        return name if reply.status is Status.OK else f"{name} {reply.status.name}"

    def check_mirror(self) -> None:
        """Slots, lengths, block tables, blocks in use and digest are those that the commands so far leave."""
        state, live = self.worker.state(), self.mirror.shown()
        blocks = sorted(block for _, table in live.values() for block in table)
        assert state["live"] == live
        assert state["model"] == sorted(live)
        assert [block for block, owned in enumerate(state["owned"]) if owned] == blocks
        assert state["digest"] == self.mirror.digest

    def check_logits(self, command: Command, reply: Reply) -> None:
        mine, other = self.worker.replica.logits, self.twin.replica.logits
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert reply.status is Status.OK
            assert torch.equal(mine, other)
        if reply.status is not Status.OK:
            assert mine is None


class Head:
    """Chooses the next valid command for a life, by chance, within what the rank can hold."""

    def __init__(self, life: Life) -> None:
        self.life, self.chance = life, life.chance
        self.rows = life.mirror.after(life.settled).rows
        taken = {block for row in self.rows.values() for block in row.blocks}
        self.free = [block for block in range(NUM_BLOCKS) if block not in taken]

    def command(self) -> Command:
        if self.life.seq == 0:
            return Load(NUM_BLOCKS)
        room = {slot for slot, row in self.rows.items() if row.length < 40}
        pick = self.chance.random()
        if self.rows and (pick < 0.15 or (len(self.rows) == MAX_BATCH and pick < 0.3) or len(self.free) < 8):
            return FreeSlot(Slot(self.chance.choice(list(self.rows))))
        if pick < 0.2:
            return Ping()
        if room and pick < 0.4:
            return Decode(self.span(self.chance.choice(sorted(room)), 1))
        if room and pick < 0.6:
            return DecodeBatch(tuple(self.span(slot, 1) for slot in sorted(room)))
        slots = sorted(room | set(range(MAX_BATCH)) - set(self.rows))
        if not slots:
            return Ping()
        if pick < 0.8:
            return PrefillChunk(self.span(self.chance.choice(slots), self.chance.randrange(1, 7)))
        return MixedStep(tuple(self.span(slot, self.chance.randrange(1, 4)) for slot in slots))

    def span(self, slot: int, num_tokens: int) -> Span:
        row = self.rows.get(slot, Row())
        end = row.length + num_tokens
        missing = max(0, -(-end // BLOCK_SIZE) - len(row.blocks))
        blocks = tuple(BlockId(self.free.pop(0)) for _ in range(missing))
        tokens = tuple(self.chance.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        return Span(Slot(slot), row.length, tokens, blocks, self.chance.choice(list(Logits)))


class Lives:
    """Damaged frames, each for the moment at which the worker is; and now and then one that is sound."""

    def __init__(self, setup: RankSetup, seed: int) -> None:
        self._setup = setup
        self._chance = random.Random(seed)
        self._mutator = Mutator(seed, [to_bytes(command, 2) for command in COMMANDS[2].values()])
        self.life = Life(setup, self._chance)
        self._moment: tuple[Life, int] | None = None  # for which the command below is
        self._command: Command = Ping()
        self._frame = Frame(to_bytes(Ping(), 2))
        self.sound: bytes | None = None
        self.num_lives = 1

    def next(self) -> bytes:
        """The next frame for `read`."""
        if self.life.has_ended or self.life.seq >= STEPS_OF_A_LIFE:
            self.end()
        if self._moment != (self.life, self.life.seq):
            self._moment = (self.life, self.life.seq)
            self._command = Head(self.life).command()
            self._frame = Frame(self.life.frame_of(self._command))
        pick = self._chance.random()
        # A load is sound: its one number may order any amount of memory.
        self.sound = self._frame.data if pick < 0.08 or self.life.seq == 0 else None
        if pick > 0.97 and self.sound is None:
            return self.life.frame_of(self._command, settles_otherwise=True)
        return self.sound or self._mutator.of(self._frame)

    def end(self) -> None:
        if not self.life.has_ended and self.life.seq > 1:
            for mine, other in zip(self.life.worker.cached(), self.life.twin.cached(), strict=True):
                assert torch.equal(mine, other)
        for side in (self.life.worker, self.life.twin):
            side.model.teardown()
        self.life = Life(self._setup, self._chance)
        self.num_lives += 1

    def read(self, data: bytes) -> str:
        """Give the frame to the worker. A sound one must succeed, whatever came before it."""
        try:
            name = self.life.give(data)
        except (FrameError, SessionError, Desync) as error:
            if data is self.sound:
                raise AssertionError("a sound frame was refused") from error
            raise
        if data is self.sound and " " in name:
            raise AssertionError(f"a sound command ended as {name}")
        return f"sound {name}" if data is self.sound else name


def test_a_damaged_command_runs_wholly_or_not_at_all(setup: RankSetup, scale: int) -> None:
    seed, num_frames = 6001, NUM_FRAMES * scale
    lives = Lives(setup, seed)
    with steady_memory():
        frames = (lives.next() for _ in range(num_frames))
        tally = run_frames("replica", seed, frames, lives.read, (FrameError, SessionError, Desync), 0)
    assert tally.num_frames == num_frames
    assert lives.num_lives > 5
    assert tally.refusals["Desync"] > 5
    assert tally.refusals["SessionError"] > num_frames // 50
    assert tally.refusals["FrameError"] > num_frames // 4
    for name in WITH_EFFECT:  # sound ones, damaged ones that ran, and damaged ones that the rank itself refused
        assert min(tally.messages[f"sound {name}"], tally.messages[name]) > num_frames // 200, name
        assert tally.messages[f"{name} REFUSED"] > num_frames // 500, name
    assert sum(n for name, n in tally.messages.items() if not name.startswith("sound")) > num_frames // 8
