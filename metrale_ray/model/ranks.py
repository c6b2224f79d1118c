# SPDX-License-Identifier: MIT OR Apache-2.0
"""Building one rank: what it can say of itself before anything is loaded, and then its replica.

Rules. Everything that ranks must agree on is in `must_equal`; the handshake compares it before a weight is read. The
number of KV blocks that a rank can hold follows from its memory and its shard; the head takes the minimum.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass

import torch

from metrale_ray.clock import Clock
from metrale_ray.config import EngineConfig
from metrale_ray.errors import ConfigError, StartError
from metrale_ray.model.attention.choose import AttentionChoice, choose_attention
from metrale_ray.model.attention_choice import GLOO, SHARED_MEMORY, AttentionMode, choose_mode
from metrale_ray.model.checkpoint import Checkpoint, open_checkpoint
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.damage import Damage
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.dense_share import DenseShare, dense_share, local_config
from metrale_ray.model.device import resolve_device
from metrale_ray.model.dtypes import resolve_dtype
from metrale_ray.model.execute import OnProgress, Replica
from metrale_ray.model.families import family_of
from metrale_ray.model.faults import Faults
from metrale_ray.model.identity import build, instructions, versions
from metrale_ray.model.kernels.choose import Kind, check_quantization, choose_kind, kernels_name, layout_of
from metrale_ray.model.memory import memory
from metrale_ray.model.slot_checks import SlotLimits
from metrale_ray.model.slots import Slots
from metrale_ray.model.transformer import TransformerModel
from metrale_ray.model.weights import shard_bytes
from metrale_ray.native.library import library
from metrale_ray.protocol.commands import Hello, Rank
from metrale_ray.protocol.port import CommandPort

log = logging.getLogger(__name__)

# What a rank's address is where all of them are on one host.
ONE_HOST = ("", "127.0.0.1", "::1")

# The share of the memory left after the weights that the cache may take by default.
CPU_CACHE_SHARE = 0.5  # page cache, other processes and activations live there too
GPU_CACHE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class RankSetup:
    """One rank before it holds a weight. `host` is its node's address, for messages; empty where there is one node.

    `process` is what it tells of its process.
    """

    config: EngineConfig
    rank: int
    host: str
    checkpoint: Checkpoint
    decoder: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    process: str

    @property
    def kernels(self) -> Kind:
        """The kind of this rank's kernels. Raises ConfigError for a setting that cannot be had."""
        return choose_kind(self.config.kernels, self.device, self.dtype, self.decoder)[0]

    @property
    def attention(self) -> AttentionChoice:
        """How this rank attends. Raises ConfigError for a setting that cannot be had."""
        config, head_dim = self.config, self.decoder.head_dim
        return choose_attention(
            config.attention_backend, self.device, self.dtype, config.block_size, head_dim, self.kernels
        )

    @property
    def is_split(self) -> bool:
        """Whether attention is split over the ranks, and dense layers, embedding and output head as well."""
        return self.attention_mode.is_split

    @property
    def attention_mode(self) -> AttentionMode:
        """Whether attention is replicated or split, and why. The same on all ranks."""
        config = self.config
        return choose_mode(
            config.attention,
            self.decoder,
            config.ep_size,
            self.device,
            self.dtype,
            rows=config.max_batch_size,
            tokens=self.max_model_len,
            cost=SHARED_MEMORY if self._shares_memory else GLOO,
        )

    @property
    def _shares_memory(self) -> bool:
        """Whether the ranks are known to be on one host, where sums go through memory; else `auto` counts on gloo."""
        is_one_host = self.host in ONE_HOST or self.config.placement == "STRICT_PACK"
        return is_one_host and library() is not None

    @property
    def share(self) -> DenseShare:
        """What this rank holds beside experts, routers and norms."""
        return dense_share(self.decoder, self.rank, self.config.ep_size, is_split=self.is_split)

    @property
    def limits(self) -> SlotLimits:
        """What each row of a command is checked against."""
        return SlotLimits(
            max_batch_size=self.config.max_batch_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            vocab_size=self.decoder.vocab_size,
            block_size=self.config.block_size,
        )


def open_rank(config: EngineConfig, rank: int, host: str = "", process: str | None = None) -> RankSetup:
    """Read the checkpoint's configuration and headers, on this rank's node. Raises ConfigError or CheckpointError.

    `process` names the rank's process; None: by its number.
    """
    checkpoint = open_checkpoint(config.model, config.revision)
    decoder = family_of(checkpoint.config).read_config(checkpoint.config)
    device = resolve_device(config.device)
    check_quantization(config.quantization, device)
    return RankSetup(
        config=config,
        rank=rank,
        host=host,
        checkpoint=checkpoint,
        decoder=decoder,
        device=device,
        dtype=resolve_dtype(config.dtype, checkpoint.config),
        max_model_len=_max_model_len(config, decoder),
        process=str(os.getpid()) if process is None else process,
    )


def introduce(setup: RankSetup) -> Hello:
    """What this rank says of itself at the handshake. Raises StartError when its memory holds no cache."""
    config = setup.config
    must_equal = {
        "build": build(),
        **versions(),
        "architecture": setup.decoder.architecture,
        "dtype": str(setup.dtype),
        "device": setup.device.type,
        "instructions": instructions(setup.device),
        "threads": str(torch.get_num_threads()) if setup.device.type == "cpu" else "any",
        "kernels": kernels_name(setup.kernels),
        "quantization": config.quantization,
        "attention": setup.attention.name,
        "attention_over_ranks": setup.attention_mode.name,
        "ep_size": str(config.ep_size),
        "block_size": str(config.block_size),
        "max_batch_size": str(config.max_batch_size),
        "max_model_len": str(setup.max_model_len),
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "agreement_interval": str(config.agreement_interval),
    }
    must_equal |= {f"file {name}": digest for name, digest in setup.checkpoint.digests.items()}
    told = {
        "host": socket.gethostname(),
        "address": setup.host,
        "process": setup.process,
    }
    return Hello(
        rank=Rank(setup.rank),
        version=config.protocol_version.value,
        must_equal=must_equal,
        told=told,
        num_blocks=_num_blocks(setup),
    )


def differences(mine: Hello, other: Hello) -> list[str]:
    """One line for each entry that differs, with both values, each rank with its node."""
    here, there = _where(mine), _where(other)
    lines = []
    if mine.version != other.version:
        lines.append(f"protocol: {here} has v{mine.version}, {there} has v{other.version}")
    for name in sorted(mine.must_equal.keys() | other.must_equal.keys()):
        my_value, other_value = mine.must_equal.get(name), other.must_equal.get(name)
        if my_value != other_value:
            lines.append(f"{name}: {here} has {_shown(my_value)}, {there} has {_shown(other_value)}")
    return lines


def _where(hello: Hello) -> str:
    node = hello.told.get("address")
    return f"rank {hello.rank} on {node}" if node else f"rank {hello.rank}"


def _shown(value: str | None) -> str:
    return "none" if value is None else repr(value)


def build_replica(
    setup: RankSetup,
    collectives: Collectives,
    port: CommandPort | None,
    on_progress: OnProgress,
    clock: Clock = time.monotonic,
) -> tuple[Replica, TransformerModel]:
    """The rank's model and its replica, not loaded yet. `clock` times its replies."""
    mode = setup.attention_mode
    if setup.rank == 0 and setup.config.ep_size > 1:
        log.info("attention: %s (%s)", mode.name, mode.reason)
    model = TransformerModel(
        setup.checkpoint,
        setup.config,
        setup.rank,
        collectives,
        port,
        setup.device,
        setup.dtype,
        is_split=mode.is_split,
    )
    slots = Slots(setup.limits, model.alloc_sequence, model.free_sequence)
    faults = Faults(setup.config.faults, setup.rank, Damage(slots, model))
    if setup.config.faults:
        collectives.at_phase = faults.check
    collectives.clock = clock
    interval = setup.config.agreement_interval
    return Replica(setup.rank, model, slots, collectives, faults, on_progress, clock, interval), model


def _max_model_len(config: EngineConfig, decoder: DecoderConfig) -> int:
    if config.max_model_len is None:
        return decoder.max_positions
    if config.max_model_len > decoder.max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; this model knows positions up to {decoder.max_positions}. "
            "Set it to that or less, or leave it out."
        )
    return config.max_model_len


def _num_blocks(setup: RankSetup) -> int:
    """KV blocks that this rank can hold: no more than all slots can fill, and so many where it has no heads."""
    config = setup.config
    decoder = local_config(setup.decoder, setup.share)
    block_bytes = setup.attention.cache.block_bytes(decoder, config.block_size, setup.dtype)
    if block_bytes == 0:
        return setup.limits.max_num_blocks
    budget_bytes = config.kv_cache_memory if config.kv_cache_memory is not None else _cache_budget_bytes(setup)
    num_blocks = min(setup.limits.max_num_blocks, budget_bytes // block_bytes)
    if num_blocks < 1:
        raise StartError(
            f"rank {setup.rank} has {budget_bytes} bytes for its KV cache and one block of {config.block_size} tokens "
            f"takes {block_bytes}; free some memory, or set kv_cache_memory",
            rank=setup.rank,
        )
    return num_blocks


def _cache_budget_bytes(setup: RankSetup) -> int:
    layout = layout_of(setup.kernels, setup.config.quantization)
    shard = shard_bytes(
        setup.checkpoint, setup.decoder, setup.rank, setup.config.ep_size, setup.dtype, layout, is_split=setup.is_split
    )
    if setup.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(setup.device)
        return max(0, int((free_bytes - shard) * GPU_CACHE_SHARE))
    # All ranks may be on this host: each takes its part of what is left when all shards are loaded.
    ranks = setup.config.ep_size
    return max(0, int((_available_bytes() - shard * ranks) * CPU_CACHE_SHARE / ranks))


def _available_bytes() -> int:
    """Memory that this process can still get; the free pages alone where the system tells no more."""
    available = memory().available_bytes
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if available is None else available
