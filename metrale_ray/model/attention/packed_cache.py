# SPDX-License-Identifier: MIT OR Apache-2.0
"""`PackedKvCache`: the paged cache as native attention reads it, without a gather.

A block holds the keys of each kv head and then the values of each, in packed sub-blocks of 16 tokens: keys as a matrix
of 16 outputs (tokens) and D inputs, values as one of D outputs and 16 inputs (tokens). See native/src/attention.h. D is
padded to a multiple of 16. Shapes: see KvCache; B blocks, S sub-blocks of a block, Z items of a pair.
"""

from __future__ import annotations

import torch

from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.kernels.layout import FORMATS
from metrale_ray.model.kv_cache import KvCache
from metrale_ray.native.library import BLOCK, STEPS


class PackedKvCache(KvCache):
    """Keys and values of one CPU rank."""

    @staticmethod
    def block_bytes(config: DecoderConfig, block_size: int, dtype: torch.dtype) -> int:
        """See KvCache."""
        return config.num_layers * 2 * config.num_kv_heads * _padded(config.head_dim) * block_size * dtype.itemsize

    def _make_layer(
        self, num_places: int, config: DecoderConfig, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        num_blocks = num_places // self.block_size
        items = 2 * config.num_kv_heads * _padded(config.head_dim) * self.block_size
        layer = torch.empty((num_blocks, items), device=device, dtype=dtype)
        layer[self.null_block :].zero_()
        return layer

    def write(self, layer: int, places_T: torch.Tensor, keys_TND: torch.Tensor, values_TND: torch.Tensor) -> None:
        """See KvCache: the plain form of what the core does."""
        keys, values = self._views(layer)
        block, sub, token = self._parts(places_T)
        step = keys.shape[-1]
        dim = self.head_dim
        keys[block, :, sub, : dim // step, token] = keys_TND.view(*keys_TND.shape[:2], -1, step)
        padded_TND = torch.nn.functional.pad(values_TND, (0, _padded(dim) - dim))
        as_blocks = padded_TND.view(*padded_TND.shape[:2], -1, BLOCK)
        values[block, :, sub, :, token // step, :, token % step] = as_blocks

    def gather(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """See KvCache."""
        keys, values = self._views(layer)
        block, sub, token = self._parts(places.reshape(-1))
        step = keys.shape[-1]
        keys_PND = keys[block, :, sub, :, token].flatten(2)[..., : self.head_dim]
        values_PND = values[block, :, sub, :, token // step, :, token % step].flatten(2)[..., : self.head_dim]
        return torch.stack((keys_PND, values_PND), dim=1).view(*places.shape, 2, self.num_kv_heads, self.head_dim)

    def first_value(self, layer: int, place: int) -> torch.Tensor:
        """See KvCache."""
        _, values = self._views(layer)
        block, offset = divmod(place, self.block_size)
        sub, token = divmod(offset, BLOCK)
        step = values.shape[-1]
        return values[block, 0, sub, 0, token // step, 0, token % step].view(1)

    def _parts(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block, sub-block and token of each place."""
        return places // self.block_size, places % self.block_size // BLOCK, places % BLOCK

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, N, S, D/Z, 16, Z] and values [B, N, S, D/16, 16/Z, 16, Z]."""
        flat = self.layers[layer]
        step = STEPS[FORMATS[flat.dtype]]
        halves = flat.view(flat.shape[0], 2, self.num_kv_heads, self.block_size // BLOCK, -1)
        keys, values = halves[:, 0], halves[:, 1]
        return keys.view(*keys.shape[:3], -1, BLOCK, step), values.view(
            *values.shape[:3], -1, BLOCK // step, BLOCK, step
        )


def _padded(head_dim: int) -> int:
    return -(-head_dim // BLOCK) * BLOCK
