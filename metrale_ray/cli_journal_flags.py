# SPDX-License-Identifier: MIT OR Apache-2.0
"""The flags of the commands that read journals: replay, bisect and inspect-journal."""

from __future__ import annotations

import argparse
import math

from metrale_ray.cli_flags import ENGINE_FLAGS, OBJECT_FLAG, Flag, with_default
from metrale_ray.replay.parting import DEFAULT_TOLERANCE

RANK_SETTINGS = ("ep_size", "device", "dtype", "quantization", "kernels", "attention", "attention_backend")
"""What may be another one than was recorded."""

DEFAULT_LIMIT = 50


def front_request(text: str) -> tuple[int, int]:
    """The front and the number in a text such as "2:15"."""
    front, _, number = text.partition(":")
    if not all(part.isascii() and part.isdigit() for part in (front, number)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a front and the number of its request, such as 2:15")
    return int(front), int(number)


def at_least_zero(text: str) -> int:
    """An integer from 0."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 0")
    return int(text)


def tolerance(text: str) -> float:
    """A difference of two logits."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0, such as 0.001")
    return value


def side(text: str) -> dict[str, str | int]:
    """The settings in a text such as "ep-size=1,dtype=float32"; they are checked where they are used."""
    found: dict[str, str | int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        setting = name.replace("-", "_")
        if setting not in RANK_SETTINGS or setting in found or not value:
            allowed = ", ".join(known.replace("_", "-") for known in RANK_SETTINGS)
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} must be NAME=VALUE, each name once, of {allowed}; such as ep-size=1,dtype=float32"
            )
        found[setting] = int(value) if setting == "ep_size" and value.isascii() and value.isdigit() else value
    return found


def replay_flags() -> tuple[Flag, ...]:
    """The flags of `replay`, each with what it is without it."""
    return (*_as_recorded(("model", *RANK_SETTINGS)), ANY_CHECKPOINT_FLAG)


def bisect_flags() -> tuple[Flag, ...]:
    """The flags of `bisect`."""
    return (*SIDE_FLAGS, *_as_recorded(("model",)), ANY_CHECKPOINT_FLAG)


def _as_recorded(settings: tuple[str, ...]) -> tuple[Flag, ...]:
    defaults = dict.fromkeys(settings, "as recorded")
    return tuple(with_default(flag, defaults) for flag in ENGINE_FLAGS if flag.setting in settings)


LOG_FLAGS = tuple(flag for flag in ENGINE_FLAGS if flag.setting == "log_level")
ANY_CHECKPOINT_FLAG = Flag(("--any-checkpoint",), "go on with another checkpoint than the recorded one", switch=True)
SIDE_FLAGS = (
    Flag(("--tolerance",), f"difference of two logits that may be (default: {DEFAULT_TOLERANCE})", tolerance),
    Flag(("--a",), "settings of the first run of one journal, such as ep-size=1,dtype=float32", side, "SETTINGS"),
    Flag(("--b",), "settings of the second run; what is in neither is as recorded", side, "SETTINGS"),
)
INSPECT_FLAGS = (
    Flag(("--request",), "only what is of this request, by the engine's number", at_least_zero, "N"),
    Flag(("--front-request",), "only what is of this request, by the front's number", front_request, "FRONT:N"),
    Flag(("--failures",), "only what failed", switch=True),
    Flag(
        ("--limit",),
        f"how many of the last commands, sequences and failures to list; 0 for all (default: {DEFAULT_LIMIT})",
        at_least_zero,
        "N",
    ),
)
OUTPUT_FLAGS = (OBJECT_FLAG,)
