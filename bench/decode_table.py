# SPDX-License-Identifier: MIT OR Apache-2.0
"""The tables of `decode`: what a step must read, how fast each engine was, what this engine's steps were made of."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.bandwidth import Bandwidth
from bench.bound import distinct_experts, step_bytes
from bench.engines import ENGINE_CASES, EngineCase
from bench.load import BUSY_CORES
from bench.repeats import spread

PHASES = ("run_s", "reduce_s", "plan_s", "send_s", "reply_s", "sample_s", "deliver_s")

Found = dict[str, list[dict[str, Any]]]  # by engine: one entry for each batch size


def print_tables(
    args: argparse.Namespace,
    found: Found,
    speed: Bandwidth,
    bandwidths: Sequence[Bandwidth],
    distinct: Mapping[int, float],
) -> None:
    for title, all_of in (("one process or all", "all_cores"), ("one core", "one_core")):
        rates = spread([getattr(each, all_of) / 1e9 for each in bandwidths or [speed]])
        print(f"Read bandwidth, {title}: {rates.text()} GB/s (median, lowest and highest before each engine).")
    print(f"Prompt {args.prompt}, {args.new} new tokens, {args.threads} cores in all, {args.reps} repeats.\n")
    _print_bound(args, speed, distinct)
    print("\n| batch | engine | prefill tok/s | decode tok/s | of the bound | of vLLM | of llama.cpp | others' cores |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in args.batch:
        for case in ENGINE_CASES:
            for each in found.get(case.name, ()):
                if each["batch"] == batch:
                    _print_row(args, case, each, found, speed, distinct.get(batch))
    _print_phases(found)


def _print_bound(args: argparse.Namespace, speed: Bandwidth, distinct: Mapping[int, float]) -> None:
    """What a step reads, by layout: the formula is in `bound.py`."""
    print(
        "| batch | layout | experts read in a layer, measured / at random | MB per step, slowest rank | bound tok/s |"
    )
    print("|---|---|---|---|---|")
    layouts = dict.fromkeys(case.layout for case in ENGINE_CASES)
    for batch in args.batch:
        for layout in layouts:
            size = step_bytes(layout, batch, args.prompt + args.new / 2, distinct.get(batch))
            known = f"{distinct[batch]:.1f}" if batch in distinct else "not measured"
            name = f"{layout.ranks} rank(s), attention {'tensor' if layout.is_split else 'whole'}"
            name += ", int8" if layout.is_int8 else ", bf16"
            rate = batch * speed.of_rank(layout.ranks) / size
            print(f"| {batch} | {name} | {known} / {distinct_experts(batch):.1f} | {size / 1e6:.1f} | {rate:.1f} |")


def _print_row(
    args: argparse.Namespace,
    case: EngineCase,
    each: Mapping[str, Any],
    found: Found,
    speed: Bandwidth,
    distinct: float | None,
) -> None:
    batch, decode = each["batch"], spread(each["decode"])
    size = step_bytes(case.layout, batch, args.prompt + args.new / 2, distinct)
    share = decode.median * size / (batch * speed.of_rank(case.layout.ranks))
    vllm = "vllm-two" if case.layout.ranks > 1 else "vllm"
    llama = "llama-q8" if case.layout.is_int8 else "llama"
    others = max(each["others"])
    cells = (
        str(batch),
        case.label,
        _with_ratio(each, found, "prefill", vllm),
        decode.text(),
        f"{share:.2f}",
        _ratio(each, found, "decode", vllm),
        _ratio(each, found, "decode", llama),
        f"{others:.2f}" + (" (disturbed)" if others > BUSY_CORES else ""),
    )
    print("| " + " | ".join(cells) + " |")


def _with_ratio(each: Mapping[str, Any], found: Found, what: str, rival: str) -> str:
    ratio = _ratio(each, found, what, rival)
    return spread(each[what]).text(0) + (f", {ratio} of vLLM" if ratio != "-" else "")


def _ratio(each: Mapping[str, Any], found: Found, what: str, rival: str) -> str:
    for other in found.get(rival, ()):
        if other["batch"] == each["batch"] and other is not each:
            return f"{statistics.median(each[what]) / statistics.median(other[what]):.2f}"
    return "-"


def _print_phases(found: Found) -> None:
    """Where the head's time went in this engine's own decode steps."""
    ours = [(case, each) for case in ENGINE_CASES if not case.is_peer for each in found.get(case.name, ())]
    if not ours:
        return
    print(
        "\nMilliseconds of a decode step on the head, by its own counters (means): rank 0's part, of that the sums, and"
    )
    print("planning, framing and sending, the other ranks' replies, sampling, delivering.\n")
    print("| batch | engine | rank 0 | of that sums | plan | send | replies | sample | deliver |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case, each in ours:
        cells = " | ".join(f"{each['step_ms'][phase]:.3f}" for phase in PHASES)
        print(f"| {each['batch']} | {case.label} | {cells} |")
