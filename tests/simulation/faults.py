# SPDX-License-Identifier: MIT OR Apache-2.0
"""Faults of a simulated group, as plain data: what goes wrong, where and when.

Rules: every field is a text, a number or nothing, so that a schedule of faults can be written down and read back.
Processes are named "head", "rank 1", ..., "front 0", .... `life` is the number of the group's life, from 0. A fault
whose place or time never comes does not happen; what did happen is in `Network.fired` and in `Life.fired`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FrameFaultKind = Literal["delay", "lose", "duplicate", "truncate", "flip", "stale", "close"]
ProcessFaultKind = Literal["kill", "stop"]
SumFaultKind = Literal["delay", "never", "kill"]


@dataclass(frozen=True, slots=True)
class FrameFault:
    """Of the `number`-th frame from `sender` to `receiver` in this life, from 1.

    "delay": it takes `amount` seconds more, and those behind it wait. "truncate", "flip": at this share (0 to 1) of its
    bytes it is cut, or one bit is changed. "stale": a frame of an earlier life, at this share of those that there are,
    comes before it. "close": the connection breaks instead.
    """

    life: int
    sender: str
    receiver: str
    number: int
    kind: FrameFaultKind
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing comes from `a` to `b`, and with `both` from `b` to `a`, between two times since the life began."""

    life: int
    a: str
    b: str
    from_s: float
    to_s: float
    both: bool = True


@dataclass(frozen=True, slots=True)
class ProcessFault:
    """A process is killed, or stopped and resumed after `for_s` (None: never).

    When: at a hand-over (`at_turn`, counted from the life's beginning) or at a time since then (`at_s`).
    """

    life: int
    process: str
    kind: ProcessFaultKind
    at_turn: int | None = None
    at_s: float | None = None
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class SumFault:
    """Of the `number`-th sum that `rank` enters in this life, from 1.

    "delay": it enters `amount` seconds late. "never": it does not enter, and hangs. "kill": its process dies there,
    before it has entered (`amount` below 0.5) or after.
    """

    life: int
    rank: int
    number: int
    kind: SumFaultKind
    amount: float = 0.0


Fault = FrameFault | Partition | ProcessFault | SumFault
