# SPDX-License-Identifier: MIT OR Apache-2.0
"""What the sampler costs per step: 32 rows of a 152,000-token vocabulary on the CPU, for each kind of parameter.

    python -m bench.sampler [--rows 32] [--vocab 152000] [--reps 15] [--threads 1]

Beside it, in the same run, a naive sampler: the same steps over whole matrices in PyTorch, with a full sort of the
vocabulary where one is needed to find top-k, top-p or the most likely tokens. Medians in milliseconds, with the 95th
percentile. Steep logits fall with the rank as those of a language model do; flat ones are normal noise, the worst case
for top-p.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.philox import draw
from metrale_ray.sampling.sampler import SampleError, SampleRow, sample
from metrale_ray.sampling.token_params import TokenParams

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
ALL_LIMITS = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("greedy", "steep", {"temperature": 0.0}),
    ("temperature 0.8", "steep", {"temperature": 0.8}),
    ("top-p 0.9", "steep", {"temperature": 0.8, "top_p": 0.9}),
    ("top-p 0.9", "flat", {"temperature": 0.8, "top_p": 0.9}),
    ("top-k 50", "steep", {"temperature": 0.8, "top_k": 50}),
    ("top-k 50", "flat", {"temperature": 0.8, "top_k": 50}),
    ("min_p 0.02", "steep", {"temperature": 0.8, "min_p": 0.02}),
    ("top-k 50, top-p 0.9, min_p 0.02", "steep", {"temperature": 0.8, **ALL_LIMITS}),
    ("greedy, penalties", "steep", {"temperature": 0.0, **PENALTIES}),
    ("the three limits, penalties", "steep", {"temperature": 0.8, **ALL_LIMITS, **PENALTIES}),
    ("greedy, logprobs 5", "steep", {"temperature": 0.0, "logprobs": 5}),
    ("the three limits, logprobs 5", "steep", {"temperature": 0.8, **ALL_LIMITS, "logprobs": 5}),
]
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 500
NAIVE_REPS = 3  # it takes a second for one step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logits = {"steep": _steep(args.rows, args.vocab), "flat": _flat(args.rows, args.vocab)}
    print(f"{args.rows} rows of {args.vocab:,} tokens, {args.threads} thread(s)\n")
    print("| parameters | logits | ms per step (p95) | naive ms | ratio |")
    print("|---|---|---|---|---|")
    for name, shape, values in CASES:
        rows = [_row(TokenParams(**values), number, args.vocab) for number in range(args.rows)]
        _check(logits[shape], rows)
        ours = _times_ms(args.reps, lambda rows=rows, shape=shape: sample(logits[shape], rows))
        naive = _times_ms(NAIVE_REPS, lambda rows=rows, shape=shape: _naive(logits[shape], rows))
        ms, naive_ms = statistics.median(ours), statistics.median(naive)
        p95 = ours[int(len(ours) * 0.95)]
        print(f"| {name} | {shape} | {ms:.2f} ({p95:.2f}) | {naive_ms:.1f} | {naive_ms / ms:.1f} |")


def _steep(rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    by_rank_V = -1.3 * torch.arange(1, vocab_size + 1).log()
    shuffled = [by_rank_V[torch.randperm(vocab_size, generator=generator)] for _ in range(rows)]
    return 25 + torch.stack(shuffled) + 0.1 * torch.randn(rows, vocab_size, generator=generator)


def _flat(rows: int, vocab_size: int) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2))


def _row(params: TokenParams, number: int, vocab_size: int) -> SampleRow:
    history = TokenHistory([(number + 7 * place) % vocab_size for place in range(PROMPT_TOKENS)])
    for place in range(OUTPUT_TOKENS):
        history.append((number + 11 * place) % vocab_size)
    return SampleRow(params, number, 0, PROMPT_TOKENS + OUTPUT_TOKENS, history, OUTPUT_TOKENS)


def _times_ms(reps: int, work: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(reps):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


def _check(logits_RV: torch.Tensor, rows: list[SampleRow]) -> None:
    """Both choose the same tokens, but for draws that fall between two roundings of one sum.

    Made before the times are taken, so what happens once per request is not in them.
    """
    ours = [result if isinstance(result, SampleError) else result.token_id for result in sample(logits_RV, rows)]
    same = sum(one == other for one, other in zip(ours, _naive(logits_RV, rows), strict=True))
    assert same >= len(rows) - 1, f"only {same} of {len(rows)} tokens agree"


def _naive(logits_RV: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """The tokens of rows that all have the same parameters, in whole matrices."""
    params = rows[0].params
    if params.logprobs is not None:
        torch.log_softmax(logits_RV, 1).sort(dim=1, descending=True, stable=True)
    if params.has_penalties:
        logits_RV = _penalized(logits_RV, rows)
    if params.is_greedy:
        return logits_RV.argmax(dim=1).tolist()
    probabilities_RV = torch.softmax(logits_RV / params.temperature, 1)
    if params.min_p:
        probabilities_RV[probabilities_RV < params.min_p * probabilities_RV.amax(1, keepdim=True)] = 0
    if params.top_k or params.top_p < 1:
        probabilities_RV = _limited(probabilities_RV, params)
    sums_RV = probabilities_RV.double().cumsum(1)
    draws_R = torch.tensor([draw(row.seed, row.sequence_index, row.position) for row in rows], dtype=torch.float64)
    return torch.searchsorted(sums_RV, (draws_R * sums_RV[:, -1])[:, None], right=True).flatten().tolist()


def _penalized(logits_RV: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    params = rows[0].params
    counts_RV, seen_RV = torch.zeros_like(logits_RV), torch.zeros_like(logits_RV, dtype=torch.bool)
    for r, row in enumerate(rows):
        assert row.history is not None
        counts_RV[r, row.history.token_ids] = torch.from_numpy(row.history.counts).float()
        seen_RV[r, row.history.token_ids] = True
    scaled_RV = torch.where(logits_RV > 0, logits_RV / params.repetition_penalty, logits_RV * params.repetition_penalty)
    logits_RV = torch.where(seen_RV, scaled_RV, logits_RV) - params.frequency_penalty * counts_RV
    return logits_RV - params.presence_penalty * (counts_RV > 0)


def _limited(probabilities_RV: torch.Tensor, params: TokenParams) -> torch.Tensor:
    values_RV, order_RV = probabilities_RV.sort(dim=1, descending=True, stable=True)
    if params.top_k:
        values_RV[:, params.top_k :] = 0
    before_RV = values_RV.double().cumsum(1) - values_RV
    values_RV[before_RV >= params.top_p * values_RV.double().sum(1, keepdim=True)] = 0
    return torch.zeros_like(values_RV).scatter_(1, order_RV, values_RV)


if __name__ == "__main__":
    main()
