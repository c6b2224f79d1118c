# SPDX-License-Identifier: MIT OR Apache-2.0
"""What attention needs to know of a step, computed once for all layers.

Rules. Rows of one token form groups of similar length, each attended as one batch, padded with the null place and a
mask. Longer spans are attended one by one over cached and new tokens. The groups' rows, then the spans' rows, follow
one another in the step's order. With a sliding window only places inside it are gathered.

Shapes: T rows, B rows of a group, Q tokens of a span, L gathered places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import Span

# Rows with up to this many gathered places are one group; above, a group's rows differ by less than a factor of 2.
MIN_GROUP_PLACES = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each: `places` [B, L], and `mask` [B, 1, 1, L] to add to the scores, None without padding."""

    rows: slice
    places: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One span of several tokens: `places` [L], and `mask` [Q, L] to add to the scores, None where it is causal."""

    rows: slice
    places: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`places` [T] is where the step's own keys and values go."""

    places: torch.Tensor
    groups: tuple[DecodeGroup, ...]
    spans: tuple[PrefillSpan, ...]


def attention_order(spans: Sequence[Span], window: int | None) -> list[int]:
    """The order in which a step packs its spans: single tokens by group, then the longer spans."""
    return sorted(range(len(spans)), key=lambda number: _group_key(spans[number], window))


def plan_attention(
    spans: Sequence[Span],
    seqs: Sequence[SequenceState],
    cache: KvCache,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """The plan of spans that are in `attention_order` already."""
    builder = _Builder(cache, window, dtype, device)
    singles: dict[int, list[tuple[Span, SequenceState]]] = {}
    longer: list[tuple[Span, SequenceState]] = []
    places_T: list[int] = []
    for span, seq in zip(spans, seqs, strict=True):
        places_T += cache.places(seq.block_table, span.start, span.end)
        into = singles.setdefault(_group_key(span, window), []) if len(span.token_ids) == 1 else longer
        into.append((span, seq))
    groups = tuple(builder.group(rows) for rows in singles.values())
    prefills = tuple(builder.prefill(span, seq) for span, seq in longer)
    return AttentionPlan(torch.tensor(places_T, device=device), groups, prefills)


def _group_key(span: Span, window: int | None) -> int:
    """Equal for the rows of one group; the largest value for spans of several tokens."""
    if len(span.token_ids) > 1:
        return 64
    num_places = span.end - _first_seen(span.start, window)
    return (max(num_places, MIN_GROUP_PLACES) - 1).bit_length()


def _first_seen(position: int, window: int | None) -> int:
    """The first position that the token at `position` attends to."""
    return 0 if window is None else max(0, position + 1 - window)


class _Builder:
    """Builds groups and spans, counting rows as it goes."""

    def __init__(self, cache: KvCache, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._cache = cache
        self._window = window
        self._dtype = dtype
        self._device = device
        self._num_rows = 0

    def group(self, rows: Sequence[tuple[Span, SequenceState]]) -> DecodeGroup:
        """One group of single tokens, padded to its longest."""
        places = [
            self._cache.places(seq.block_table, _first_seen(span.start, self._window), span.end) for span, seq in rows
        ]
        longest = max(map(len, places))
        padded = [row + [self._cache.null_place] * (longest - len(row)) for row in places]
        places_BL = torch.tensor(padded, device=self._device)
        is_padded = any(len(row) < longest for row in places)
        mask_B11L = self._mask(places_BL != self._cache.null_place)[:, None, None, :] if is_padded else None
        return DecodeGroup(self._take(len(rows)), places_BL, mask_B11L)

    def prefill(self, span: Span, seq: SequenceState) -> PrefillSpan:
        """One span of several tokens over everything that its first token sees."""
        first = _first_seen(span.start, self._window)
        places_L = torch.tensor(self._cache.places(seq.block_table, first, span.end), device=self._device)
        rows = self._take(len(span.token_ids))
        if span.start == 0 and (self._window is None or span.end <= self._window):
            return PrefillSpan(rows, places_L, None)
        queries_Q1 = torch.arange(span.start, span.end, device=self._device)[:, None]
        keys_L = torch.arange(first, span.end, device=self._device)
        seen_QL = keys_L <= queries_Q1
        if self._window is not None:
            seen_QL &= keys_L > queries_Q1 - self._window
        return PrefillSpan(rows, places_L, self._mask(seen_QL))

    def _take(self, num_rows: int) -> slice:
        start, self._num_rows = self._num_rows, self._num_rows + num_rows
        return slice(start, self._num_rows)

    def _mask(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.zeros(seen.shape, dtype=self._dtype, device=self._device).masked_fill_(~seen, float("-inf"))
