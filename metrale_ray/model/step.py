# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Step`: one forward's rows and what all layers share about them, computed once.

Rules. Spans are packed in the order that suits attention; `logit_rows` leads back to the order of the spans. Everything
follows from the spans and block tables, so it is equal on every rank. Shapes: T rows, D head_dim.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.layers.rotary import Rotary
from metrale_ray.protocol.commands import Logits, Span


@dataclass(frozen=True, slots=True)
class Step:
    """`token_ids` is [T], `cos` and `sin` are [T, 1, D]; `attention` has a plan for each window that a layer has.

    `logit_rows` are the packed rows whose logits are asked for, `last_rows` those of each span's last token, both in
    the order of the spans.
    """

    token_ids: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    attention: dict[int | None, Any]
    logit_rows: list[int]
    last_rows: list[int]


def plan_step(
    spans: Sequence[Span],
    seqs: Sequence[SequenceState],
    attention: Attention[Any],
    rotary: Rotary,
    windows: Collection[int | None],
    device: torch.device,
) -> Step:
    """The step that runs `spans`, each of the sequence at the same place in `seqs`.

    `windows` are those that layers have.
    """
    order = attention.order(spans, windows)
    packed, states = [spans[number] for number in order], [seqs[number] for number in order]
    token_ids = [token for span in packed for token in span.token_ids]
    positions = [position for span in packed for position in range(span.start, span.end)]
    cos_T1D, sin_T1D = rotary.angles(torch.tensor(positions, device=device))
    first_rows = _first_rows(spans, order)
    return Step(
        torch.tensor(token_ids, device=device),
        cos_T1D,
        sin_T1D,
        {window: attention.plan(packed, states, window) for window in windows},
        [row for number, span in enumerate(spans) for row in asked_rows(span, first_rows[number])],
        [first_rows[number] + len(span.token_ids) - 1 for number, span in enumerate(spans)],
    )


def _first_rows(spans: Sequence[Span], order: Sequence[int]) -> dict[int, int]:
    """By the number of each span: the packed row of its first token."""
    first_rows: dict[int, int] = {}
    num_rows = 0
    for number in order:
        first_rows[number] = num_rows
        num_rows += len(spans[number].token_ids)
    return first_rows


def asked_rows(span: Span, first_row: int = 0) -> range:
    """The packed rows whose logits a span asks for, where its first token is row `first_row`."""
    end = first_row + len(span.token_ids)
    match span.logits:
        case Logits.NONE:
            return range(0)
        case Logits.LAST:
            return range(end - 1, end)
        case Logits.ALL:
            return range(first_row, end)
