# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a checkpoint is and what it takes, from config.json and the headers of its files: no weight is read.

Rules. Nothing is fetched: of a hub id the local cache is looked at. Every size comes from what a load itself uses: the
shard plan, the cache's own arithmetic and the placement of experts. A checkpoint that could not be served raises here
what it would raise there.

Not counted: the activations of a step, and the libraries' own memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError
from metrale_ray.model.attention_choice import AttentionMode
from metrale_ray.model.checkpoint import Checkpoint
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.dense_share import DenseShare, dense_share, local_config
from metrale_ray.model.experts.placement import experts_of
from metrale_ray.model.hub import absence, find
from metrale_ray.model.kernels.choose import layout_of
from metrale_ray.model.kernels.layout import Layout
from metrale_ray.model.kv_cache import kv_block_bytes
from metrale_ray.model.ranks import open_rank
from metrale_ray.model.shard_plan import ShardPlan
from metrale_ray.model.weights import plan_weights, shard_bytes

# More ranks than any model has experts; each is listed.
MAX_RANKS = 4096


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds: a run of experts (None: no expert) of every sparse layer, and its weights in bytes."""

    rank: int
    experts: range
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """What fits into `memory_bytes` of one rank, weights first and the cache in what is left.

    `num_blocks` is what the rank with the least room can hold; 0 when the weights leave none. `least_ranks` is the
    smallest number of ranks whose weights leave room for one block, `least_ranks_full_length` for one sequence of
    the full length; None when no number of ranks does.
    """

    memory_bytes: int
    num_blocks: int
    num_cache_tokens: int
    num_full_sequences: int
    least_ranks: int | None
    least_ranks_full_length: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint with `ranks` and, where a memory was given, what fits. Parameters are counted once, not by rank.

    `num_active_parameters` are those that take part in one token: all but the experts that are not chosen for it.
    `block_bytes` are of the first rank, which has the most heads; where attention is replicated all are alike.
    """

    checkpoint: Checkpoint
    decoder: DecoderConfig
    dtype: str
    quantization: str
    file_bytes: dict[str, int]
    stored_dtypes: dict[str, int]
    num_parameters: int
    num_active_parameters: int
    max_model_len: int
    attention: AttentionMode
    block_size: int
    block_bytes: int
    ranks: tuple[RankShare, ...]
    fit: Fit | None

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of all layers, on the first rank."""
        return self.block_bytes // self.block_size


def inspect(config: EngineConfig, memory_bytes: int | None = None) -> Inspection:
    """Look at the checkpoint that `config` names. Raises ConfigError or CheckpointError, as a start would.

    ConfigError also for a hub id that is not in the local cache, with what a start would fetch.
    """
    if config.ep_size > MAX_RANKS:
        raise ConfigError(f"ep_size is {config.ep_size}; up to {MAX_RANKS} ranks are told apart here")
    setup = open_rank(_local(config), 0)
    checkpoint, decoder = setup.checkpoint, setup.decoder
    plan = plan_weights(checkpoint, decoder, 0, config.ep_size)
    num_parameters = sum(math.prod(piece.shape) for piece in plan.pieces)
    layout = layout_of("torch", config.quantization)
    memory = _Memory(checkpoint, decoder, setup.dtype, layout, config.block_size, is_split=setup.is_split)
    return Inspection(
        checkpoint=checkpoint,
        decoder=decoder,
        dtype=str(setup.dtype).removeprefix("torch."),
        quantization=config.quantization,
        file_bytes=_file_bytes(checkpoint),
        stored_dtypes=_stored_dtypes(checkpoint, plan),
        num_parameters=num_parameters,
        num_active_parameters=num_parameters - _num_idle_parameters(decoder),
        max_model_len=setup.max_model_len,
        attention=setup.attention_mode,
        block_size=config.block_size,
        block_bytes=memory.block_bytes(config.ep_size),
        ranks=memory.shares(config.ep_size),
        fit=None if memory_bytes is None else memory.fit(memory_bytes, config, setup.max_model_len),
    )


def _local(config: EngineConfig) -> EngineConfig:
    """`config` with the model's folder on this machine."""
    folder = find(config.model, config.revision)
    if folder is None:
        raise ConfigError(f"{absence(config.model, config.revision)}. Fetch it first, or give a folder")
    return dataclasses.replace(config, model=str(folder), revision=None)


def _file_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    files = sorted({record.file for record in checkpoint.tensors.values()})
    return {file.name: file.stat().st_size for file in files}


def _stored_dtypes(checkpoint: Checkpoint, plan: ShardPlan) -> dict[str, int]:
    """Parameters in each of the format's dtypes."""
    counts: Counter[str] = Counter()
    for piece in plan.pieces:
        counts[checkpoint.tensors[piece.name].dtype] += math.prod(piece.shape)
    return dict(counts)


def _num_idle_parameters(decoder: DecoderConfig) -> int:
    """Parameters of the experts that one token does not use."""
    moe = decoder.moe
    if moe is None:
        return 0
    one_expert = 3 * moe.intermediate_size * decoder.hidden_size  # gate, up and down
    return decoder.num_sparse_layers * (moe.num_experts - moe.experts_per_token) * one_expert


class _Memory:
    """Sizes of ranks in groups of any number.

    A rank's size follows from its number of experts, from being first, and from its share where attention is split.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        decoder: DecoderConfig,
        dtype: torch.dtype,
        layout: Layout,
        block_size: int,
        *,
        is_split: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._decoder = decoder
        self._dtype = dtype
        self._layout = layout
        self._block_size = block_size
        self._is_split = is_split
        self._num_experts = decoder.moe.num_experts if decoder.moe is not None else 0
        self._known: dict[tuple[int, bool, tuple[int, ...]], int] = {}

    def block_bytes(self, world: int) -> int:
        """One block of the cache on the first rank of a group of `world`."""
        config = local_config(self._decoder, self._share(0, world))
        return kv_block_bytes(config, self._block_size, self._dtype)

    def shares(self, world: int) -> tuple[RankShare, ...]:
        """What each rank of a group of `world` holds."""
        placed = [(rank, experts_of(self._num_experts, rank, world)) for rank in range(world)]
        return tuple(RankShare(rank, mine, self._weight_bytes(rank, world)) for rank, mine in placed)

    def fit(self, memory_bytes: int, config: EngineConfig, max_model_len: int) -> Fit:
        """What fits into a rank's memory."""
        blocks_per_sequence = -(-max_model_len // config.block_size)
        num_blocks = self._num_blocks(memory_bytes, config.ep_size)
        return Fit(
            memory_bytes=memory_bytes,
            num_blocks=num_blocks,
            num_cache_tokens=num_blocks * config.block_size,
            num_full_sequences=num_blocks // blocks_per_sequence,
            least_ranks=self._least_ranks(memory_bytes, 1),
            least_ranks_full_length=self._least_ranks(memory_bytes, blocks_per_sequence),
        )

    def _num_blocks(self, memory_bytes: int, world: int) -> int:
        """Blocks of the rank with the largest share, which is the first. One more is the cache's own, always zero."""
        room_bytes = memory_bytes - self._weight_bytes(0, world)
        return max(0, room_bytes // self.block_bytes(world) - 1)

    def _least_ranks(self, memory_bytes: int, num_blocks: int) -> int | None:
        """The first rank only gets smaller as the group grows, until it has one expert, and one head where they are
        split."""
        most = max(1, self._num_experts, self._decoder.num_kv_heads if self._is_split else 0)
        worlds: Sequence[int] = range(1, most + 1)
        place = bisect.bisect_left(worlds, True, key=lambda world: self._num_blocks(memory_bytes, world) >= num_blocks)
        return worlds[place] if place < len(worlds) else None

    def _weight_bytes(self, rank: int, world: int) -> int:
        share = self._share(rank, world)
        sizes = (len(share.kv_heads), len(share.vocabulary), len(share.inner))
        key = (len(experts_of(self._num_experts, rank, world)), rank == 0, sizes)
        if key not in self._known:
            self._known[key] = shard_bytes(
                self._checkpoint, self._decoder, rank, world, self._dtype, self._layout, is_split=self._is_split
            )
        return self._known[key]

    def _share(self, rank: int, world: int) -> DenseShare:
        return dense_share(self._decoder, rank, world, is_split=self._is_split)
