# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Workload`: what is asked of the engine in one run of the simulation, drawn from a seed.

Rules: plain data, so that it can be printed, cut down and run again. An engine's life is a `Life`; a run has one or
two, with growing epochs. Times are virtual seconds since the engine was ready. Numbers of requests are small, as one
step of four ranks takes ten milliseconds of a real processor: what is rare is met by many seeds, not by long runs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tests.simulation.catalogue import MAX_TOKENS, Entry, catalogue
from tests.simulation.tiny_model import NUM_LAYERS, kv_block_bytes

Then = Literal["read", "abort", "finish"]
Leaving = Literal["close", "die", "reopen", "repeat"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of one front. `then`: what its front does when it has `after_tokens` tokens of sequence `index`.

    `max_tokens` None: as many as there is room for.
    """

    at_s: float
    front: int
    entry: int
    max_tokens: int | None
    priority: int = 0
    timeout_s: float | None = None
    then: Then = "read"
    after_tokens: int = 0
    index: int = 0

    @property
    def of(self) -> Entry:
        """Its entry of the catalogue."""
        return ENTRIES[self.entry]


@dataclass(frozen=True, slots=True)
class Leave:
    """A front goes: it closes its session, its process dies, or it uses a number twice, for which it is dropped. Or it
    closes its session and opens another with the same key, in which it asks for what comes later."""

    at_s: float
    front: int
    how: Leaving


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the engine, and what is asked of it."""

    num_fronts: int
    asks: tuple[Ask, ...]
    leaves: tuple[Leave, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """One run. The settings are EngineConfig's; `num_blocks` is the size of the KV cache, and `credit` the number of
    frames that a front may leave unread before its outputs are held."""

    ep_size: int
    ep_protocol: str
    max_batch_size: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_queue_len: int
    agreement_interval: int
    scrub: bool
    lives: tuple[Life, ...]
    credit: int = 256
    watermark: float = 0.01
    attention: str = "replicated"

    @property
    def longest(self) -> int:
        """The most tokens that one sequence may have: what the model takes, or what the cache holds and one more."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    @property
    def num_collectives(self) -> int:
        """In one step: after each layer's experts; where attention is split also after it and the embedding, and the
        gather of logits."""
        is_split = self.attention == "tensor" and self.ep_size > 1
        return 2 * NUM_LAYERS + 2 if is_split else NUM_LAYERS

    def settings(self) -> dict[str, Any]:
        """The settings as EngineConfig takes them, but for the model."""
        return {
            "ep_size": self.ep_size,
            "ep_protocol": self.ep_protocol,
            "max_batch_size": self.max_batch_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "kv_cache_memory": self.num_blocks * kv_block_bytes(self.block_size),
            "max_queue_len": self.max_queue_len,
            "agreement_interval": self.agreement_interval,
            "scrub": self.scrub,
            "watermark": self.watermark,
            "attention": self.attention,
        }


ENTRIES = catalogue()


def draw_workload(seed: int) -> Workload:
    """The workload of a seed."""
    chance = random.Random(f"workload {seed}")
    version = chance.choices(("v1", "v2"), (1, 5))[0]
    batch = chance.choice((2, 3, 4, 8)) if version == "v2" else 1
    block_size = 4
    max_model_len = chance.choice((24, 40, 40, 64))
    num_lives = chance.choices((1, 2), (3, 1))[0]
    num_blocks = _num_blocks(chance, max_model_len, batch, block_size)
    longest = min(max_model_len, num_blocks * block_size + 1)
    return Workload(
        ep_size=chance.choices((1, 2, 3, 4), (4, 8, 5, 3))[0],
        ep_protocol=version,
        max_batch_size=batch,
        max_num_batched_tokens=chance.choice((4, 7, 16, 64)),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        max_queue_len=chance.choice((1, 4, 100, 100, 100)),
        agreement_interval=chance.choice((0, 1, 4, 16)),
        scrub=version == "v2" and chance.random() < 0.3,
        lives=tuple(_life(chance, 7 if num_lives == 1 else 3, longest) for _ in range(num_lives)),
        credit=chance.choice((1, 3, 256, 256)),
        watermark=chance.choice((0.01, 0.01, 0.3)),
        attention=chance.choice(("replicated", "tensor")),
    )


def _num_blocks(chance: random.Random, max_model_len: int, batch: int, block_size: int) -> int:
    """Mostly too few for all sequences at once, and at times too few for the longest prompt."""
    of_all = batch * -(-max_model_len // block_size)
    return min(of_all, chance.choice((5, 5, 6, 6, 8, 10, of_all)))


def _life(chance: random.Random, most_asks: int, longest: int) -> Life:
    num_fronts = chance.choices((1, 2, 3), (3, 2, 1))[0]
    is_crowd = chance.random() < 0.4
    pace_s = 0.0 if is_crowd else chance.choice((0.0, 0.01, 0.3))
    entries = chance.sample(range(len(ENTRIES)), 2) if chance.random() < 0.3 else range(len(ENTRIES))
    asks = [
        _ask(chance, entries, num_fronts, pace_s, longest, MAX_TOKENS * 2 // 3 if is_crowd else 1)
        for _ in range(chance.randint(most_asks // 2 if is_crowd else 1, most_asks))
    ]
    leaves = []
    if chance.random() < 0.2:
        since_s = 0.0 if chance.random() < 0.5 else chance.choice(asks).at_s
        at_s = round(since_s + 0.001 * 200 ** chance.random(), 4)
        leaves = [Leave(at_s, chance.randrange(num_fronts), chance.choice(("close", "die", "reopen", "repeat")))]
    return Life(num_fronts, tuple(sorted(asks, key=lambda ask: ask.at_s)), tuple(leaves))


def _ask(
    chance: random.Random, entries: Sequence[int], num_fronts: int, pace_s: float, longest: int, least: int
) -> Ask:
    index = chance.choice(entries)
    entry = ENTRIES[index]
    max_tokens = chance.randint(max(entry.least, least), chance.choice((max(least, MAX_TOKENS // 2), MAX_TOKENS)))
    has_no_limit = 0 < longest - len(entry.prompt) <= MAX_TOKENS and entry.least == 1 and chance.random() < 0.3
    then: Then = chance.choices(("read", "abort", "finish"), (8, 1, entry.n))[0]
    return Ask(
        at_s=round(chance.uniform(0, 4) * pace_s, 4),
        front=chance.randrange(num_fronts),
        entry=index,
        max_tokens=None if has_no_limit else max_tokens,
        priority=chance.choice((0, 0, 0, -1, 1)),
        timeout_s=round(chance.uniform(0.001, 0.1), 4) if chance.random() < 0.15 else None,
        then=then,
        after_tokens=chance.randint(0, max_tokens) if then != "read" else 0,
        index=chance.randrange(entry.n) if then == "finish" else 0,
    )


def workload_to_map(workload: Workload) -> dict[str, Any]:
    """As JSON has it."""
    return asdict(workload)


def workload_from_map(data: Mapping[str, Any]) -> Workload:
    """The workload of `workload_to_map`. Raises TypeError for what is none."""
    lives = tuple(
        Life(
            life["num_fronts"],
            tuple(Ask(**ask) for ask in life["asks"]),
            tuple(Leave(**leave) for leave in life["leaves"]),
        )
        for life in data["lives"]
    )
    return Workload(**{**data, "lives": lives})
