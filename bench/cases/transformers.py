# SPDX-License-Identifier: MIT OR Apache-2.0
"""Hugging Face transformers: `generate` in one process, experts by grouped_mm, greedy.

It also says how many distinct experts a layer has in a decode step of these prompts, for the bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.cases.case import WARM_UP_TOKENS, Run, case_parser, measure
from bench.prompts import prompts

ROUTED_STEPS = 12


class Clock:
    """A streamer. Its first call is for the prompt, each later one for a finished step."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: Any) -> None:
        """See transformers' BaseStreamer."""
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        """See transformers' BaseStreamer."""


def main() -> None:
    args = case_parser(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16, experts_implementation="grouped_mm"
    ).eval()
    for batch in args.batch:
        distinct = _distinct_experts(model, prompts(batch, args.prompt))
        measure(args, batch, partial(_once, model), partial(dict, distinct_experts=distinct))


@torch.inference_mode()
def _once(model: Any, rows: Sequence[Sequence[int]], new: int) -> Run:
    clock = Clock()
    token_ids = torch.tensor(rows)
    model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    prompted, first, *later = clock.moments
    return Run(first - prompted, later[-1] - first, len(rows) * len(later))


def _distinct_experts(model: Any, rows: Sequence[Sequence[int]]) -> float:
    """The mean over layers and decode steps."""
    counts: list[int] = []

    def note(router: Any, inputs: Any, outputs: Any) -> None:
        chosen = outputs[-1]  # [tokens, experts of each]
        if chosen.shape[0] == len(rows):  # a decode step, not the prompts
            counts.append(chosen.unique().numel())

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    _once(model, rows, max(WARM_UP_TOKENS, ROUTED_STEPS))
    for hook in hooks:
        hook.remove()
    return sum(counts) / len(counts)


if __name__ == "__main__":
    main()
