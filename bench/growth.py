# SPDX-License-Identifier: MIT OR Apache-2.0
"""How a decode step grows with ranks, batch and context: bytes by formula, time as measured, and modelled beyond.

    python -m bench.growth      (within the report: it reads what `decode`, `fan_out` and `collectives` left)

    time(R, b, c) = bytes(R, b, c) / (speed / k) + S·sum(b) + protocol(R)

bytes as in `bound.py`, of the slowest rank; speed is what one rank's cores read while all read. k says how much longer
the kernels take than reading: the largest of the measured cases of one rank, so that the model is not kinder than they
are. S sums in a step, one of b rows for each layer with experts (and one more for each layer where attention is split);
sum(b) and protocol(R) as measured, straight lines between and beyond. Ranks beyond this machine are thought to have
cores and memory of their own, as fast as one of these, on one host; between hosts the sums take longer, which is not
modelled.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.bandwidth import Bandwidth
from bench.bound import Layout, step_bytes
from bench.engines import ENGINE_CASES
from bench.model import SIZES
from bench.results import read_results

RANKS, BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (1, 8, 32, 128), (256, 1024, 4096, 8192)
BATCH, CONTEXT = 32, 1024
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Model:
    """The parts of the formula. `sums` are (tokens, ms), `protocol` (workers, ms)."""

    bytes_per_s: float
    slowness: float
    sums: Curve
    protocol: Curve

    def step_ms(self, layout: Layout, batch: int, context: float) -> float:
        """The time of a step."""
        reading = 1e3 * step_bytes(layout, batch, context) * self.slowness / self.bytes_per_s
        if layout.ranks == 1:
            return reading
        num_sums = SIZES["num_hidden_layers"] * (2 if layout.is_split else 1)
        return reading + num_sums * on_line(self.sums, batch) + on_line(self.protocol, layout.ranks - 1)


def main() -> None:
    decode = read_results("decode")
    if not decode:
        print("Not modelled: `decode` did not run here, and the model is made of its figures.")
        return
    measured = _measured(decode)
    model = _model(decode, measured)
    print(f"k = {model.slowness:.2f}, speed {model.bytes_per_s / 1e9:.1f} GB/s for each rank.\n")
    _print_measured(decode, model, measured)
    print("\nBy ranks, attention tensor, bf16:\n")
    _print_grid(model, [(Layout(ranks, True), BATCH, CONTEXT) for ranks in RANKS])
    print("\nBy batch, two ranks, attention tensor:\n")
    _print_grid(model, [(Layout(2, True), batch, CONTEXT) for batch in BATCHES])
    print("\nBy context, two ranks, attention tensor:\n")
    _print_grid(model, [(Layout(2, True), BATCH, context) for context in CONTEXTS])


def _measured(decode: Mapping[str, Any]) -> list[tuple[Layout, int, float]]:
    """Layout, batch and milliseconds of a step of each case of this engine in bf16."""
    found = []
    for case in ENGINE_CASES:
        if not case.is_peer and not case.layout.is_int8:
            for each in decode["engines"].get(case.name, ()):
                found.append((case.layout, each["batch"], 1e3 * each["batch"] / statistics.median(each["decode"])))
    return found


def _model(decode: Mapping[str, Any], measured: Sequence[tuple[Layout, int, float]]) -> Model:
    speed = Bandwidth(**decode["bandwidth"])
    context = decode["prompt"] + decode["new"] / 2
    alone = [(1e3 * step_bytes(layout, batch, context), ms) for layout, batch, ms in measured if layout.ranks == 1]
    slowness = max((ms * speed.all_cores / least for least, ms in alone), default=1.0)
    fan_out = sorted((float(workers), ms) for workers, ms in (read_results("fan_out") or {}).items())
    sums = sorted((float(tokens), us / 1e3) for tokens, us in (read_results("collectives") or {}).items())
    return Model(speed.one_core, slowness, sums, fan_out)


def on_line(curve: Curve, place: float) -> float:
    """The height at `place` of the straight lines through the points, of which the outer ones go on. 0: no points."""
    if not curve:
        return 0.0
    if len(curve) == 1:
        return curve[0][1]
    index = next((number for number in range(1, len(curve) - 1) if curve[number][0] >= place), len(curve) - 1)
    (left, low), (right, high) = curve[index - 1], curve[index]
    return max(0.0, low + (high - low) * (place - left) / (right - left))


def _print_measured(decode: Mapping[str, Any], model: Model, measured: Sequence[tuple[Layout, int, float]]) -> None:
    context = decode["prompt"] + decode["new"] / 2
    shared = Bandwidth(**decode["bandwidth"])
    print("| ranks | attention | batch | MB per step | ms measured | ms modelled |\n|---|---|---|---|---|---|")
    for layout, batch, ms in measured:
        here = Model(shared.of_rank(layout.ranks), model.slowness, model.sums, model.protocol)
        size = step_bytes(layout, batch, context) / 1e6
        way = "tensor" if layout.is_split else "whole"
        print(
            f"| {layout.ranks} | {way} | {batch} | {size:.1f} | {ms:.1f} | {here.step_ms(layout, batch, context):.1f} |"
        )


def _print_grid(model: Model, cases: Sequence[tuple[Layout, int, int]]) -> None:
    print("| ranks | batch | context | MB per step, slowest rank | ms modelled | tok/s |\n|---|---|---|---|---|---|")
    for layout, batch, context in cases:
        ms, size = model.step_ms(layout, batch, context), step_bytes(layout, batch, context) / 1e6
        print(f"| {layout.ranks} | {batch} | {context} | {size:.1f} | {ms:.1f} | {1e3 * batch / ms:.0f} |")


if __name__ == "__main__":
    main()
