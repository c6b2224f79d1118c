# SPDX-License-Identifier: MIT OR Apache-2.0
"""What all cases have in common: their arguments, and one line of JSON on the standard output for each batch size.

Prefill is batch·prompt tokens over the time until every sequence has its first token; decode is the tokens after that
moment over the time after it, so that a prompt computed in chunks is no part of it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.prompts import prompts
from bench.repeats import repeat

MARK = "bench-case "  # what other lines an engine prints do not begin with
WARM_UP_TOKENS = 4


class Run(NamedTuple):
    """One batch, answered: seconds to the last first token, seconds after it, and the tokens of those."""

    prefill_s: float
    decode_s: float
    decoded_tokens: int


Once = Callable[[Sequence[Sequence[int]], int], Run]  # from prompts, and the number of new tokens


def case_parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every case; a case adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch", type=lambda text: [int(number) for number in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of all ranks together")
    return parser


def measure(args: argparse.Namespace, batch: int, once: Once, more: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Warm up, repeat, and print what came out; `more` gives further figures of this case when all is done."""
    rows = prompts(batch, args.prompt)
    once(rows, WARM_UP_TOKENS)
    measured = repeat(lambda: once(rows, args.new), args.reps)
    found = {
        "batch": batch,
        "prefill": [batch * args.prompt / one.value.prefill_s for one in measured],
        "decode": [one.value.decoded_tokens / one.value.decode_s for one in measured],
        "others": [round(one.others, 2) for one in measured],
        **more(),
    }
    print(MARK + json.dumps(found), flush=True)


def run_of(arrivals: Sequence[Sequence[float]], began_s: float) -> Run:
    """From the moments at which each sequence got a token."""
    first_s = max(times[0] for times in arrivals)
    last_s = max(times[-1] for times in arrivals)
    after = sum(moment > first_s for times in arrivals for moment in times)
    return Run(first_s - began_s, last_s - first_s, after)
