# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a decode step of the model alone takes: one rank in this process, without head, sampler and driver.

    python -m bench.step [--model DIR] [--batch 1,8,32] [--context 128] [--steps 24] [--threads N] [--kernels auto]

Each row decodes a random token behind `--context` cached ones, so that the experts chosen are spread. Milliseconds: the
least and the median of the steps.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path

import torch

from bench.model import ensure_model
from metrale_ray.config import EngineConfig
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.collectives import OneRank
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.transformer import TransformerModel
from metrale_ray.protocol.commands import BlockId, Slot, Span

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kernels", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    blocks_each = -(-(args.context + args.steps) // BLOCK_SIZE)
    model, collectives = loaded(ensure_model(args.model), max(args.batch), blocks_each, args.kernels)
    print("| batch | least ms | median ms | tokens/s at the median |")
    print("|---|---|---|---|")
    for batch in args.batch:
        times_s = decode(model, collectives, batch, args.context, args.steps, blocks_each)
        median_s = statistics.median(times_s)
        print(f"| {batch} | {min(times_s) * 1e3:.1f} | {median_s * 1e3:.1f} | {batch / median_s:.1f} |", flush=True)


def loaded(folder: Path, most_rows: int, blocks_each: int, kernels: str) -> tuple[TransformerModel, OneRank]:
    """The model in bfloat16, with room for so many sequences."""
    checkpoint = open_checkpoint(str(folder))
    config = EngineConfig(model=str(folder), device="cpu", block_size=BLOCK_SIZE, kernels=kernels)
    collectives = OneRank(0, 1, most_rows, checkpoint.config["hidden_size"], torch.bfloat16, "cpu")
    model = TransformerModel(checkpoint, config, 0, collectives, None, CPU, torch.bfloat16)
    model.load(most_rows * blocks_each, lambda done, total: None)
    return model, collectives


@torch.inference_mode()
def decode(
    model: TransformerModel, collectives: OneRank, batch: int, context: int, num_steps: int, blocks_each: int
) -> list[float]:
    """Seconds of each step. What is cached before the first one are zeros: it is read all the same."""
    chance = random.Random(batch)
    seqs = [_sequence(model, Slot(row), context, blocks_each) for row in range(batch)]
    assert model.cache is not None, "it is loaded"
    for layer in model.cache.layers:
        layer.zero_()
    times_s = []
    for step in range(num_steps):
        spans = [Span(seq.slot, context + step, (chance.randrange(3, model.vocab_size),)) for seq in seqs]
        collectives.begin(batch, model.num_reductions())
        began_s = time.perf_counter()
        model.decode_batch(spans, seqs)
        times_s.append(time.perf_counter() - began_s)
        for seq in seqs:
            seq.length += 1
    for seq in seqs:
        model.free_sequence(seq)
    return times_s


def _sequence(model: TransformerModel, slot: Slot, length: int, num_blocks: int) -> SequenceState:
    seq = model.alloc_sequence(slot)
    seq.length = length
    seq.block_table.extend(BlockId(block) for block in range(slot * num_blocks, (slot + 1) * num_blocks))
    return seq


if __name__ == "__main__":
    main()
