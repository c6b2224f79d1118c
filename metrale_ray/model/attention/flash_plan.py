# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a flash kernel needs to know of a step, computed once for all layers with one window.

Rules. All int32 numbers of a plan travel to the device in one copy. The table of blocks is padded with the null block
to whole tiles of the kernel, which looks up a tile's blocks before it masks what lies past the end.

Shapes: T rows, B spans, L blocks of a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.protocol.commands import Span

# The largest number of keys that a kernel takes at a time; the others divide it.
MAX_TILE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """`places` [T], int64, is where the step's own keys and values go; all other tensors are int32.

    `query_starts` [B+1] and `key_starts` [B+1] count the tokens of all spans before, the new ones and all that are
    seen; `lengths` [B] is the number of keys of each span; `block_table` is [B, L]; `window` as in DecoderConfig.
    """

    places: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    longest_query: int
    longest_key: int
    window: int | None


def plan_flash(
    spans: Sequence[Span], seqs: Sequence[SequenceState], cache: KvCache, window: int | None, device: torch.device
) -> FlashPlan:
    """The plan of spans whose rows follow one another in this order."""
    queries = [len(span.token_ids) for span in spans]
    keys = [span.end for span in spans]
    width = _table_width(max(keys), cache.block_size)
    table = [_row(cache, span, seq, width) for span, seq in zip(spans, seqs, strict=True)]
    parts = [[0, *accumulate(queries)], [0, *accumulate(keys)], keys, [block for row in table for block in row]]
    numbers = torch.tensor([number for part in parts for number in part], dtype=torch.int32, device=device)
    query_starts, key_starts, lengths, blocks = torch.split(numbers, [len(part) for part in parts])
    places = [place for span, seq in zip(spans, seqs, strict=True) for place in _places(cache, span, seq)]
    return FlashPlan(
        places=torch.tensor(places, device=device),
        query_starts=query_starts,
        key_starts=key_starts,
        lengths=lengths,
        block_table=blocks.view(len(spans), width),
        longest_query=max(queries),
        longest_key=max(keys),
        window=window,
    )


def _table_width(num_keys: int, block_size: int) -> int:
    """The blocks of as many whole tiles as hold `num_keys`."""
    num_tiles = -(-num_keys // MAX_TILE_TOKENS)
    return -(-num_tiles * MAX_TILE_TOKENS // block_size)


def _places(cache: KvCache, span: Span, seq: SequenceState) -> list[int]:
    return cache.places(seq.block_table, span.start, span.end)


def _row(cache: KvCache, span: Span, seq: SequenceState, width: int) -> list[int]:
    num_blocks = -(-span.end // cache.block_size)
    return [*seq.block_table[:num_blocks], *[cache.null_block] * (width - num_blocks)]
