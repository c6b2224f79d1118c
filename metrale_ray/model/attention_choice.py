# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether attention is replicated on all ranks or split over them (`tensor`), and why.

Rules. `auto` compares how long a decode step's reads and collectives would take either way, from bytes that follow
from the model and from assumed costs, and takes `tensor` where it is the faster one. Everything it looks at is equal on
all ranks, so all of them choose alike; the handshake compares what they chose. One rank is replicated. So are GPU ranks
unless they are asked to split, as the costs assumed here are those of CPUs.

What is read: of the slowest rank, weights as they are held and the keys and values of a typical batch. Experts are left
out, as they are the same either way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.dense_share import DenseShare, dense_share

# A step of decoding with few and short sequences, or as many as there may be: longer ones only gain more by the split.
TYPICAL_ROWS = 8
TYPICAL_TOKENS = 256
# What one rank reads: its own core's share of the memory of a server, in bytes per second.
READ_BYTES_PER_S = 10e9
GIB = 2**30


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What one sum or gather takes, with what is done around it, and each byte of its payload.

    Assumed from measurements with 2 ranks: 14 us through shared memory and 280 us by gloo, and the wait for the slower
    rank.
    """

    way: str
    seconds: float
    bytes_per_s: float


SHARED_MEMORY = CollectiveCost("shared memory", 40e-6, 4e9)
GLOO = CollectiveCost("gloo", 300e-6, 0.5e9)


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step either way: bytes that the slowest rank reads, its collectives, and the bytes that they move."""

    read_bytes: int
    num_collectives: int
    moved_bytes: int

    def seconds(self, cost: CollectiveCost) -> float:
        """How long reads and collectives take."""
        collectives_s = self.num_collectives * cost.seconds + self.moved_bytes / cost.bytes_per_s
        return self.read_bytes / READ_BYTES_PER_S + collectives_s


@dataclass(frozen=True, slots=True)
class AttentionMode:
    """`is_split`, and the reason in words."""

    is_split: bool
    reason: str

    @property
    def name(self) -> str:
        """The setting that asks for it."""
        return "tensor" if self.is_split else "replicated"


def choose_mode(
    setting: str,
    decoder: DecoderConfig,
    world: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    tokens: int,
    cost: CollectiveCost,
) -> AttentionMode:
    """The mode for `setting`: auto, replicated or tensor. At most `rows` sequences of `tokens` run at a time."""
    if world == 1:
        return AttentionMode(False, "there is one rank")
    if setting != "auto":
        return AttentionMode(setting == "tensor", f"the setting is {setting}")
    if device.type != "cpu":
        return AttentionMode(False, "what collectives cost is known of CPUs only")
    rows, tokens = min(rows, TYPICAL_ROWS), min(tokens, TYPICAL_TOKENS)
    modes = {
        name: decode_step(decoder, world, dtype, is_split=name == "tensor", rows=rows, tokens=tokens)
        for name in ("replicated", "tensor")
    }
    took_s = {name: step.seconds(cost) for name, step in modes.items()}
    told = "; ".join(f"{name} {_told(step)}, {1e3 * took_s[name]:.2f} ms" for name, step in modes.items())
    reason = f"a step of {rows} sequences of {tokens} tokens over {cost.way}, without experts: {told}"
    return AttentionMode(took_s["tensor"] < took_s["replicated"], reason)


def decode_step(
    decoder: DecoderConfig, world: int, dtype: torch.dtype, *, is_split: bool, rows: int, tokens: int
) -> Step:
    """What rank 0 does, which holds the most, in a step of `rows` sequences of `tokens` tokens."""
    share = dense_share(decoder, 0, world, is_split=is_split)
    num_layers = decoder.num_layers
    num_sums = 1 + 2 * num_layers if is_split else decoder.num_sparse_layers
    logits_bytes = rows * decoder.vocab_size * 4 if is_split else 0
    return Step(
        read_bytes=_weight_items(decoder, share) * dtype.itemsize + _cache_bytes(decoder, share, dtype, rows, tokens),
        num_collectives=num_sums + is_split,
        moved_bytes=num_sums * rows * decoder.hidden_size * dtype.itemsize + logits_bytes,
    )


def _weight_items(decoder: DecoderConfig, share: DenseShare) -> int:
    """Weights that a step reads, but for experts, routers, norms and the few rows of the embedding."""
    hidden, head_dim = decoder.hidden_size, decoder.head_dim
    attention = hidden * head_dim * 2 * (len(share.heads) + len(share.kv_heads))
    dense = 3 * hidden * len(share.inner)
    num_dense = decoder.num_layers - decoder.num_sparse_layers
    return decoder.num_layers * attention + num_dense * dense + len(share.vocabulary) * hidden


def _cache_bytes(decoder: DecoderConfig, share: DenseShare, dtype: torch.dtype, rows: int, tokens: int) -> int:
    """Keys and values that a step reads; a window limits them in its layers."""
    seen = sum(min(tokens, window if window is not None else tokens) for window in decoder.windows)
    return math.prod((2, seen, rows, len(share.kv_heads), decoder.head_dim, dtype.itemsize))


def _told(step: Step) -> str:
    return (
        f"reads {step.read_bytes / GIB:.3f} GiB and moves {step.moved_bytes / 2**20:.2f} MiB in "
        f"{step.num_collectives} collectives"
    )
