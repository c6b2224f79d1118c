# SPDX-License-Identifier: MIT OR Apache-2.0
"""Attention of a CPU rank by the native core, which reads the blocks where they lie.

Single tokens and longer spans run in one call per layer, in the order of the step, and nothing is gathered. Shapes: see
Attention.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from ctypes import byref
from dataclasses import dataclass

import torch

from metrale_ray.errors import CommandRefused
from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.contract.sequence import SequenceState
from metrale_ray.model.kernels.buffers import Buffer, Output, rows_of
from metrale_ray.model.kernels.layout import FORMATS
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.native import library
from metrale_ray.protocol.commands import Span


@dataclass(frozen=True, slots=True)
class NativePlan:
    """`spans` names the memory of `kept`. `window` is 0 where a layer attends to everything before."""

    spans: library.Spans
    kept: tuple[array[int], ...]
    window: int


class NativeAttention(Attention[NativePlan]):
    """Writes a step's keys and values into the packed cache, then attends, in the core."""

    def __init__(self, cache: KvCache) -> None:
        core = library.library()
        assert core is not None, "native attention is chosen where the core is there"
        self._store, self._attend = core.mr_store_kv, core.mr_attend
        self._cache = cache
        self._head_dim = cache.head_dim
        self._scale = 1 / math.sqrt(cache.head_dim)
        self._threads = torch.get_num_threads()
        self._layers = [
            byref(
                library.Cache(
                    layer.data_ptr(),
                    cache.num_kv_heads,
                    cache.head_dim,
                    cache.block_size,
                    cache.num_blocks,
                    FORMATS[layer.dtype],
                )
            )
            for layer in cache.layers
        ]
        self._outs: dict[int, Buffer] = {}  # by the number of query heads

    def order(self, spans: Sequence[Span], windows: Collection[int | None]) -> list[int]:
        """As they are."""
        return list(range(len(spans)))

    def plan(self, spans: Sequence[Span], seqs: Sequence[SequenceState], window: int | None) -> NativePlan:
        """Rows, starts and block tables of the spans; the same arrays for all windows of a step."""
        first_row, start, first_block, blocks = array("i", [0]), array("i"), array("i"), array("I")
        row = 0
        for span, seq in zip(spans, seqs, strict=True):
            row += len(span.token_ids)
            first_row.append(row)
            start.append(span.start)
            first_block.append(len(blocks))
            if len(seq.block_table) * self._cache.block_size < span.end:
                raise CommandRefused(
                    f"slot {span.slot} has blocks for {len(seq.block_table) * self._cache.block_size} tokens, and its "
                    f"step ends at {span.end}",
                    slots=[span.slot],
                )
            blocks.extend(seq.block_table)
        kept = first_row, start, first_block, blocks
        addresses = (numbers.buffer_info()[0] for numbers in kept)
        return NativePlan(library.Spans(*addresses, len(spans), len(blocks)), kept, window or 0)

    def __call__(self, layer: int, qkv_TXD: torch.Tensor, plan: NativePlan) -> torch.Tensor:
        """See Attention. Raises CommandRefused for a block that the cache has not."""
        cache, rows, spans = self._layers[layer], rows_of(qkv_TXD), byref(plan.spans)
        num_heads = qkv_TXD.shape[1] - 2 * self._cache.num_kv_heads
        if self._store(cache, spans, rows, num_heads, self._threads):
            raise CommandRefused(f"a block table names a block that is not one of {self._cache.num_blocks}")
        out = self._output(num_heads, rows.count)
        self._attend(cache, spans, rows, num_heads, plan.window, self._scale, out.rows, self._threads)
        return out.tensor.view(rows.count, num_heads, self._head_dim)

    def _output(self, num_heads: int, num_rows: int) -> Output:
        if num_heads not in self._outs:
            self._outs[num_heads] = Buffer(num_heads * self._head_dim, self._cache.layers[0].dtype)
        return self._outs[num_heads].output(num_rows)
