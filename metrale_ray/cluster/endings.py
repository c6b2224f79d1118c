# SPDX-License-Identifier: MIT OR Apache-2.0
"""Why an engine could not start or has ended, out of what Ray says of each rank's run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import ray

from metrale_ray.errors import EngineDead, MetraleError, StartError

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# Ray's own check of a process that joins, in its own lines.
VERSION_MISMATCH = re.compile(
    r"Version mismatch: .*?Ray: (?P<ray>\S+)\s+Python: (?P<python>\S+)"
    r".*?Ray: (?P<my_ray>\S+)\s+Python: (?P<my_python>\S+)",
    re.DOTALL,
)
MISSING_MODULE = re.compile(r"No module named '([\w.]+)'")
NAMED_ERROR = re.compile(r"[\w.]*(Error|Exception|Failed|Lost|Desync)\b.*: ")


def worst(reasons: Sequence[tuple[int, MetraleError | None]], place_of: Callable[[int], str]) -> EngineDead:
    """One error out of what each ended rank said: the head's own finding first, then a worker's reason.

    `place_of` tells of a rank by its number and, where there are several nodes, its node.
    """
    by_rank = dict(reasons)
    own = by_rank.get(0)
    others = [(rank, why) for rank, why in reasons if rank != 0 and why is not None]
    if isinstance(own, EngineDead) and own.rank is not None:
        theirs = next((why for rank, why in others if rank == own.rank), None)
        detail = f" ({theirs.message})" if theirs is not None and theirs.message not in own.message else ""
        place = place_of(own.rank)
        message = own.message if place == f"rank {own.rank}" else at_place(place, own.rank, own.message)
        return EngineDead(f"{message}{detail}", rank=own.rank)
    if others and own is None:
        rank, why = others[0]
        at_fault = getattr(why, "rank", None)  # a worker that lost the head says so
        return EngineDead(at_place(place_of(rank), rank, why.message), rank=rank if at_fault is None else at_fault)
    if own is not None:
        return EngineDead(at_place(place_of(0), 0, own.message), rank=0)
    rank = reasons[0][0]
    return EngineDead(f"{place_of(rank)} ended", rank=rank)


def at_place(place: str, rank: int, message: str) -> str:
    """The message with the rank's place in front, or in place of the rank where it begins with that: told once."""
    named = re.match(rf"rank {rank}(?=[: ])", message)
    return f"{place}{message[named.end() :]}" if named else f"{place}: {message}"


def unreachable(address: str, error: Exception) -> StartError:
    """Ray cannot be reached. That it wants a token is told in the cause of Ray's own error only."""
    mismatch = version_mismatch(error)
    if mismatch is not None:
        return StartError(f"cannot join Ray at {address!r}: {mismatch}; use the same versions everywhere")
    wants_token = "AuthenticationError" in f"{error} {error.__cause__}"
    hint = ". It wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    what = "cannot start a Ray here" if address == "local" else f"cannot reach Ray at {address!r}"
    return StartError(f"{what}: {first_line(error)}{hint if wants_token else ''}")


def version_mismatch(error: Exception) -> str | None:
    """The four versions in which a process and the Ray that it would join differ; None for another error."""
    differs = VERSION_MISMATCH.search(str(error))
    if differs is None:
        return None
    text = "it has Ray {ray} on Python {python}, and this process has Ray {my_ray} on Python {my_python}"
    return text.format(**differs.groupdict())


def unstarted(place: str, error: BaseException) -> StartError:
    """A rank's process did not come up; what its node has not installed is told as that."""
    line = first_line(error)
    missing = MISSING_MODULE.search(line)
    if missing is None:
        return StartError(f"{place} did not start: {line}")
    advice = "install metrale-ray with its dependencies there, in the Python that Ray runs in"
    return StartError(f"{place} did not start: {missing[1]} is not installed there; {advice}")


def reason(ref: Any) -> MetraleError | None:
    """What a rank's run raised; None when it returned."""
    error = own_error_of(ref)
    return error if error is None or isinstance(error, MetraleError) else EngineDead(first_line(error))


def own_error_of(ref: Any) -> MetraleError | None:
    try:
        ray.get(ref, timeout=0)
    except ray.exceptions.RayTaskError as error:
        return own_error(error)
    except ray.exceptions.RayError as error:
        return EngineDead(f"its process ended: {first_line(error)}")
    return None


def own_error(error: ray.exceptions.RayTaskError) -> MetraleError:
    """The error of ours inside Ray's wrapper; anything else becomes a StartError with its text."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, MetraleError):
        return cause
    return StartError(f"{type(cause).__name__}: {cause}" if cause is not None else str(error))


def first_line(error: BaseException) -> str:
    """The first line of an error's text; of one that broke an actor's constructor, the line that says what it was."""
    lines = [line.strip() for line in COLOURS.sub("", str(error)).splitlines() if line.strip()]
    named = [line for line in lines[1:] if NAMED_ERROR.match(line)]
    return (named[-1:] or lines or [type(error).__name__])[0]
