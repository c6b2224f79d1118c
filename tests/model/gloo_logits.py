# SPDX-License-Identifier: MIT OR Apache-2.0
"""What each process does in the test of logits over gloo. Kept apart: the processes need no reference to import."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from metrale_ray.config import EngineConfig
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.transformer import TransformerModel
from metrale_ray.protocol.commands import BlockId, Logits, Slot, Span

BLOCK_SIZE = 16
LENGTHS = (1, 5, 64, 200)
CHUNKS = (None, 16)
VOCAB_SIZE = 320  # of the TINY checkpoints


def prompt(length: int) -> list[int]:
    generator = random.Random(length)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def logits_of_prompts(join: Callable[..., Collectives], folder: str, world: int) -> list[Any]:
    """Rank 0's logits at every position, for each length and chunk size, as lists."""
    checkpoint = open_checkpoint(folder)
    collectives = join(256, checkpoint.config["hidden_size"])
    config = EngineConfig(model=folder, ep_size=world, block_size=BLOCK_SIZE)
    cpu = torch.device("cpu")
    model = TransformerModel(checkpoint, config, collectives.rank, collectives, None, cpu, torch.float32)
    model.load(32, lambda done, total: None)
    found = []
    for length in LENGTHS:
        for chunk in CHUNKS:
            found.append(_one_prompt(model, collectives, prompt(length), chunk or length))
    collectives.close()
    return found


def _one_prompt(model: TransformerModel, collectives: Collectives, ids: list[int], size: int) -> Any:
    seq = model.alloc_sequence(Slot(0))
    seq.block_table.extend(BlockId(block) for block in range(-(-len(ids) // BLOCK_SIZE)))
    parts = []
    for start in range(0, len(ids), size):
        span = Span(Slot(0), start, tuple(ids[start : start + size]), logits=Logits.ALL)
        collectives.begin(len(span.token_ids), model.num_reductions())
        logits = model.prefill_chunk(span, seq)
        parts.append(None if logits is None else logits.clone())  # they are valid until the next step
        seq.length = span.end
    model.free_sequence(seq)
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None]).tolist()
