# SPDX-License-Identifier: MIT OR Apache-2.0
"""Decode attention over the paged cache: one layer, each way this engine has, beside the time that reading it takes.

    python -m bench.attention [--sequences 32] [--contexts 256,1024,4096] [--reps 30] [--threads N]

16 query heads, 4 kv heads, head_dim 64, bf16, blocks of 16 tokens in a scattered order. Each call writes one token of
every sequence and attends to all of it, for four layers in turn, so that keys and values come from memory. The bound
is their bytes over the read bandwidth of these cores, measured here. `error` is the largest difference from a plain
computation in fp32, over its largest value. Making the plan of a step, once for all layers, is given apart.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench import bandwidth
from bench.model import SIZES
from bench.repeats import Spread, repeat, spread
from bench.results import write_results
from metrale_ray.errors import ConfigError
from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.attention.choose import AttentionChoice, choose_attention
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.families import family_of
from metrale_ray.model.kernels.choose import choose_kind
from metrale_ray.protocol.commands import BlockId, Slot, Span

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
BLOCK_SIZE = 16
LAYERS = 4
BACKENDS = ("native", "sdpa")
AIM_CONTEXT, AIM = 1024, 2.0
REPEATS = 3


@dataclass(frozen=True)
class Bed:
    """A filled cache behind one way to attend, and the step that every call makes."""

    attention: Attention[Any]
    cache: Any
    spans: list[Span]
    seqs: list[SequenceState]
    qkv: torch.Tensor  # [T, X, D]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[256, 1024, 4096])
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = bandwidth.measure()
    bytes_per_s = found.one_core if args.threads == 1 else found.all_cores
    print(f"{args.sequences} sequences, {args.threads} thread(s), read bandwidth {bytes_per_s / 1e9:.1f} GB/s.\n")
    print("| context | backend | ms per layer | MB | bound ms | times the bound | plan ms | error | others' cores |")
    print("|---|---|---|---|---|---|---|---|---|")
    results: dict[str, dict[int, float]] = {}
    for context in args.contexts:
        for backend in BACKENDS:
            ms = _print_backend(args, backend, context, bytes_per_s)
            if ms is not None:
                results.setdefault(backend, {})[context] = ms
    print(f"\nThe aim is at most {AIM:g} times the bound at {AIM_CONTEXT} tokens.")
    write_results("attention", {"sequences": args.sequences, "bytes_per_s": bytes_per_s, "ms": results})


@torch.inference_mode()
def _print_backend(args: argparse.Namespace, backend: str, context: int, bytes_per_s: float) -> float | None:
    """The median; None where the backend cannot be had."""
    try:
        choice = _choice(backend)
    except ConfigError as error:
        reason = error.message.partition(": ")[2] or error.message
        print(f"| {context} | {backend} | left out: {reason} | | | | | | |")
        return None
    bed = _bed(choice, args.sequences, context)
    plan = bed.attention.plan(bed.spans, bed.seqs, None)
    error = _error(bed, plan)
    measured = repeat(lambda: _layer_ms(bed, plan, args.reps), REPEATS)
    ms = spread([one.value for one in measured])
    size = bed.cache.layers[0].nbytes * bed.cache.num_blocks / (bed.cache.num_blocks + 1)
    bound_ms = 1e3 * size / bytes_per_s
    plan_ms = _median_ms(args.reps, lambda: bed.attention.plan(bed.spans, bed.seqs, None))
    _print_row(
        context, choice.name, ms, size, bound_ms, f"{plan_ms:.3f} | {error:.4f}", max(o.others for o in measured)
    )
    return ms.median


def _print_row(context: int, name: str, ms: Spread, size: float, bound_ms: float, more: str, others: float) -> None:
    times = f"{ms.median / bound_ms:.2f}"
    print(
        f"| {context} | {name} | {ms.text(2)} | {size / 1e6:.1f} | {bound_ms:.2f} | {times} | {more} | {others:.2f} |"
    )


def _config() -> Any:
    values = {**SIZES, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": LAYERS}
    values |= {"decoder_sparse_step": 1, "norm_topk_prob": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    values |= {"hidden_act": "silu", "rope_theta": 1e6, "tie_word_embeddings": False, "mlp_only_layers": []}
    return family_of(values).read_config(values)


def _choice(backend: str) -> AttentionChoice:
    config = _config()
    kind, _ = choose_kind("auto", CPU, DTYPE, config)
    return choose_attention(backend, CPU, DTYPE, BLOCK_SIZE, config.head_dim, kind)


def _bed(choice: AttentionChoice, num_sequences: int, context: int) -> Bed:
    config, per_sequence = _config(), -(-context // BLOCK_SIZE)
    cache = choice.cache(config, num_sequences * per_sequence, BLOCK_SIZE, CPU, DTYPE)
    torch.manual_seed(0)
    for layer in cache.layers:
        layer.view(cache.num_blocks + 1, -1)[:-1].normal_()
    blocks = [BlockId(block) for block in range(cache.num_blocks)]
    random.Random(0).shuffle(blocks)
    spans, seqs = [], []
    for number in range(num_sequences):
        seq = SequenceState(Slot(number))
        seq.length = context - 1
        seq.block_table.extend(blocks[number * per_sequence : (number + 1) * per_sequence])
        seqs.append(seq)
        spans.append(Span(Slot(number), context - 1, (7,)))
    qkv_TXD = torch.randn(num_sequences, config.num_heads + 2 * config.num_kv_heads, config.head_dim, dtype=DTYPE)
    return Bed(choice.build(cache), cache, spans, seqs, qkv_TXD)


def _layer_ms(bed: Bed, plan: Any, reps: int) -> float:
    for layer in range(LAYERS):
        bed.attention(layer, bed.qkv, plan)
    began_s = time.perf_counter()
    for turn in range(reps):
        bed.attention(turn % LAYERS, bed.qkv, plan)
    return 1e3 * (time.perf_counter() - began_s) / reps


def _median_ms(reps: int, work: Callable[[], object]) -> float:
    times_ms = []
    for _ in range(reps):
        began_s = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(times_ms)


def _error(bed: Bed, plan: Any) -> float:
    """Of the first layer."""
    out_TND = bed.attention(0, bed.qkv, plan).float().clone()
    num_kv = bed.cache.num_kv_heads
    group = out_TND.shape[1] // num_kv
    worst = largest = 0.0
    for number, seq in enumerate(bed.seqs):
        places = torch.tensor(bed.cache.places(seq.block_table, 0, seq.length + 1))
        kv_C2ND = bed.cache.gather(0, places).float()
        keys_NCD = kv_C2ND[:, 0].transpose(0, 1).repeat_interleave(group, 0)
        values_NCD = kv_C2ND[:, 1].transpose(0, 1).repeat_interleave(group, 0)
        query_N1D = bed.qkv[number, : out_TND.shape[1]].float().unsqueeze(1)
        scores_N1C = query_N1D @ keys_NCD.transpose(1, 2) / keys_NCD.shape[2] ** 0.5
        wanted_ND = (scores_N1C.softmax(-1) @ values_NCD).squeeze(1)
        worst = max(worst, float((out_TND[number] - wanted_ND).abs().max()))
        largest = max(largest, float(wanted_ND.abs().max()))
    return worst / largest


if __name__ == "__main__":
    main()
