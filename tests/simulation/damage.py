# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a fault makes of one frame. See `faults.FrameFault`."""

from __future__ import annotations

from tests.simulation.faults import FrameFault


def damaged(fault: FrameFault, frames: list[bytes], earlier: list[bytes]) -> list[bytes]:
    """What arrives instead of these frames, of which the last is the one that the fault is about."""
    *before, data = frames
    match fault.kind:
        case "lose":
            return before
        case "duplicate":
            return [*before, data, data]
        case "truncate":
            return [*before, data[: min(len(data) - 1, int(fault.amount * len(data)))]]
        case "flip":
            return [*before, _flipped(data, fault.amount)]
        case "stale":
            return [*before, earlier[min(len(earlier) - 1, int(fault.amount * len(earlier)))], data]
        case _:
            return frames


def _flipped(data: bytes, share: float) -> bytes:
    """With one bit changed."""
    if not data:
        return data
    bit = min(8 * len(data) - 1, int(share * 8 * len(data)))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
