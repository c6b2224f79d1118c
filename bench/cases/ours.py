# SPDX-License-Identifier: MIT OR Apache-2.0
"""This engine: ranks on a local Ray, asked through the Python driver, greedy.

    python -m bench.cases.ours MODEL [--ranks 2] [--set attention=tensor] [--set quantization=int8]

The driver's session, its text and its process are part of what is timed, as a user has them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import yaml

from bench.cases.case import Run, case_parser, measure, run_of
from metrale_ray import LLM, SamplingParams

PREFILL_TOKENS = 2048  # of one step: a batch of 16 prompts is read with the weights once
FIGURES_S = 30.0


def main() -> None:
    parser = case_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one more setting")
    args = parser.parse_args()
    began_s = time.perf_counter()
    with LLM(**_settings(args)) as llm:
        start_s = time.perf_counter() - began_s
        for batch in args.batch:
            measure(args, batch, partial(_answer_all, llm), _Steps(llm, start_s).document)


class _Steps:
    """What decode steps were made of from now on, by the head's own figures."""

    def __init__(self, llm: LLM, start_s: float) -> None:
        self._llm = llm
        self._start_s = start_s
        self._before = self._decodes()

    def document(self) -> dict[str, Any]:
        """Milliseconds of each phase of a decode step, on the average; see CommandCounters for their names."""
        before, after = self._before, self._decodes()
        steps = max(1, after.pop("steps") - before["steps"])
        phases_ms = {name: round(1000 * (seconds - before[name]) / steps, 4) for name, seconds in after.items()}
        return {"start_s": round(self._start_s, 2), "step_ms": phases_ms}

    def _decodes(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        commands = self._llm._client.ask(FIGURES_S)["commands"]
        for name in ("decode", "decode_batch"):
            phases = commands[name]
            found["steps"] += sum(phases.pop("by_status").values())
            found.update(phases)
        return dict(found)


def _settings(args: Any) -> dict[str, Any]:
    return {
        "model": args.model,
        "ep_size": args.ranks,
        "dtype": "bfloat16",
        "device": "cpu",
        "max_batch_size": max(args.batch),
        "max_model_len": args.prompt + args.new + 16,
        "max_num_batched_tokens": PREFILL_TOKENS,
        "num_cpus_per_rank": args.threads / args.ranks,
        **{name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in args.set)},
    }


def _answer_all(llm: LLM, rows: Sequence[Sequence[int]], new: int) -> Run:
    return asyncio.run(_gather(llm, rows, new))


async def _gather(llm: LLM, rows: Sequence[Sequence[int]], new: int) -> Run:
    began_s = time.perf_counter()
    arrivals: list[list[float]] = [[] for _ in rows]
    await asyncio.gather(*(_answer(llm, row, new, times) for row, times in zip(rows, arrivals, strict=True)))
    return run_of(arrivals, began_s)


async def _answer(llm: LLM, prompt: Sequence[int], new: int, times: list[float]) -> None:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    async for _ in llm.astream(list(prompt), params):
        times.append(time.perf_counter())


if __name__ == "__main__":
    main()
