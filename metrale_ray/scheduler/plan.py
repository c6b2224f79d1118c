# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Plan`: what the head does next, in plain integers, and the command that says it to the ranks.

Rules: the frees of a plan are sent before its rows, so slots and blocks that they release may be used again by the
rows of the same plan. Decode rows come first, then prompt chunks. A request has at most one row in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metrale_ray.errors import ProtocolError
from metrale_ray.protocol.commands import Command, Decode, DecodeBatch, Logits, MixedStep, PrefillChunk, Slot, Span
from metrale_ray.protocol.versions import ProtocolVersion
from metrale_ray.scheduler.request import RequestId


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One span of one request. `samples`: the last row of its logits gives the request's next token."""

    request_id: RequestId
    span: Span
    samples: bool

    @property
    def is_decode(self) -> bool:
        """Whether this is one token after others, with one row of logits; a prompt's last token alone counts too."""
        span = self.span
        return self.samples and span.start > 0 and len(span.token_ids) == 1 and span.logits is Logits.LAST


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots to free, one command each, then rows to run in one command. Either may be empty, not both."""

    frees: tuple[Slot, ...]
    rows: tuple[PlanRow, ...]


def plan_command(rows: Sequence[PlanRow], version: ProtocolVersion) -> Command:
    """The one command that runs `rows`. Raises ProtocolError when there are none, or v1 cannot say it."""
    if not rows:
        raise ProtocolError("a plan without rows has no command; send only its frees")
    if version is ProtocolVersion.V1 and (len(rows) > 1 or rows[0].span.slot != 0):
        slots = [row.span.slot for row in rows]
        raise ProtocolError(f"protocol v1 runs one row, in slot 0; these are for slots {slots}. Use v2.")
    if len(rows) == 1:
        return Decode(rows[0].span) if rows[0].is_decode else PrefillChunk(rows[0].span)
    spans = tuple(row.span for row in rows)
    return DecodeBatch(spans) if all(row.is_decode for row in rows) else MixedStep(spans)
