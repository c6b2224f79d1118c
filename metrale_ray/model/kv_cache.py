# SPDX-License-Identifier: MIT OR Apache-2.0
"""The paged KV cache: for every layer, keys and values of all tokens, in blocks that the head hands out.

Rules. A token's place is block · block_size + offset. Behind the last block lies one more, the null block, which stays
zero: padding of a gather points there, so stale rows of other sequences, even NaN, cannot reach an output. Rows past
a sequence's length are scratch and are never gathered.

Shapes: P places, N kv heads, D head_dim, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metrale_ray.model.decoder_config import DecoderConfig


class KvCache:
    """Keys and values of one rank. Nothing is cleared between sequences. `layers` are the tensors that hold them."""

    def __init__(
        self, config: DecoderConfig, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.null_block = num_blocks
        self.null_place = num_blocks * block_size
        num_places = self.null_place + block_size
        self.layers = [self._make_layer(num_places, config, device, dtype) for _ in range(config.num_layers)]

    @staticmethod
    def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
        """The memory of one block over all layers, keys and values."""
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * block_size * dtype.itemsize

    def _make_layer(
        self, num_places: int, config: DecoderConfig, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        layer_P2ND = torch.empty(num_places, 2, config.num_kv_heads, config.head_dim, device=device, dtype=dtype)
        layer_P2ND[self.null_place :].zero_()
        return layer_P2ND

    def places(self, block_table: Sequence[int], start: int, end: int) -> list[int]:
        """Where the tokens of positions `start`..`end`-1 of a sequence lie. Raises IndexError past the table."""
        size = self.block_size
        places: list[int] = []
        for number in range(start // size, -(-end // size)):
            first = block_table[number] * size
            places += range(first + max(start - number * size, 0), first + min(end - number * size, size))
        return places

    def write(self, layer: int, places_T: torch.Tensor, keys_TND: torch.Tensor, values_TND: torch.Tensor) -> None:
        """Store the step's keys and values."""
        layer_P2ND = self.layers[layer]
        layer_P2ND[:, 0].index_copy_(0, places_T, keys_TND)
        layer_P2ND[:, 1].index_copy_(0, places_T, values_TND)

    def gather(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """Keys and values at `places` of any shape: [*places.shape, 2, N, D]."""
        layer_P2ND = self.layers[layer]
        return layer_P2ND.index_select(0, places.reshape(-1)).view(*places.shape, *layer_P2ND.shape[1:])

    def first_value(self, layer: int, place: int) -> torch.Tensor:
        """The first item of the values at a place, as a view [1]."""
        return self.layers[layer][place, 1].view(-1)[:1]

    def blocks(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values by block, the null block last: two views [blocks, block_size, N, D] of one tensor.

        Only their last dimension is without gaps: a place holds its keys and then its values.
        """
        layer_P2ND = self.layers[layer]
        blocks = layer_P2ND.view(-1, self.block_size, *layer_P2ND.shape[1:])
        return blocks[:, :, 0], blocks[:, :, 1]


def kv_block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
    """The memory of one block of a plain cache over all layers, keys and values."""
    return KvCache.block_bytes(config, block_size, dtype)
