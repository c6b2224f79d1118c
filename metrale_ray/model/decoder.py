# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Decoder`: the layers that the families share, from token ids to hidden states, on one rank.

Replicated parts do the same operations on the same shapes on every rank. Ranks differ inside the experts, and where
attention is split in all that is summed over the ranks (layers/split): what is between two sums is the same everywhere.
Shapes: T rows, H hidden, V vocabulary, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from metrale_ray.model.attention.attention import Attention
from metrale_ray.model.collectives import Collectives
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.dense_share import DenseShare
from metrale_ray.model.experts.placement import experts_of
from metrale_ray.model.experts.sparse_mlp import OnRouting, SparseMlp
from metrale_ray.model.kernels.kernels import GatedMlp, Kernels
from metrale_ray.model.layers.self_attention import SelfAttention
from metrale_ray.model.layers.split import GatheredHead, SummedAttention, SummedEmbedding, SummedMlp
from metrale_ray.model.quantization.int8 import scales_of
from metrale_ray.model.shard_plan import EMBEDDING, FINAL_NORM, HEAD
from metrale_ray.model.step import Step
from metrale_ray.model.weights import Weights


class Decoder:
    """Weights and layers of one rank, which holds `share`; `config` has its own numbers of heads and inner size."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: Attention[Any],
        collectives: Collectives,
        kernels: Kernels,
        share: DenseShare,
        *,
        is_tied: bool,
    ) -> None:
        table = len(share.vocabulary), config.hidden_size
        embed = kernels.embedding(weights[EMBEDDING], table, is_matrix=is_tied) if share.vocabulary else None
        self._embed = SummedEmbedding(embed, share.vocabulary, collectives) if share.is_split else embed
        self._vocab_size = config.vocab_size
        self._rank = collectives.rank
        self._head: Callable[[torch.Tensor], torch.Tensor | None] | None = None
        if FINAL_NORM in weights:  # on rank 0, or on all
            self._final_norm = kernels.norm(weights[FINAL_NORM], config.rms_norm_eps)
            matrix = weights.get(EMBEDDING if is_tied else HEAD)
            head = None if matrix is None else kernels.linear(matrix, table, is_wide=True)
            self._head = GatheredHead(head, collectives) if share.is_split else head
        self._layers = [
            _Layer(number, config, _layer_weights(weights, number), attention, collectives, kernels, share)
            for number in range(config.num_layers)
        ]

    def hidden(self, step: Step) -> torch.Tensor:
        """The hidden states after the last layer, [T, H]. Raises PeerFailed, LinkLost."""
        assert self._embed is not None, "a model has a vocabulary"
        x_TH = self._embed(step.token_ids)
        for layer in self._layers:
            x_TH = layer(x_TH, step)
        return x_TH

    @contextmanager
    def watched(self, on_routing: OnRouting) -> Iterator[None]:
        """While in it, `on_routing` is told of each layer's routing, in the order of the layers."""
        with ExitStack() as watches:
            for layer in self._layers:
                if isinstance(layer.mlp, SparseMlp):
                    watches.enter_context(layer.mlp.watched(on_routing))
            yield

    def expert_tokens(self) -> list[int]:
        """For how many tokens each expert was chosen so far, over all layers; empty without experts."""
        loads_E = [layer.mlp.num_tokens_E for layer in self._layers if isinstance(layer.mlp, SparseMlp)]
        return [int(count) for count in torch.stack(loads_E).sum(dim=0).tolist()] if loads_E else []

    def logits(self, x_TH: torch.Tensor, rows: list[int]) -> torch.Tensor | None:
        """Final norm and output head of some rows, fp32 [R, V] on rank 0, None elsewhere. Raises PeerFailed, LinkLost.

        Without rows there is no collective.
        """
        if not rows or self._head is None:
            return x_TH.new_empty((0, self._vocab_size), dtype=torch.float32) if self._rank == 0 else None
        if rows != list(range(x_TH.shape[0])):
            x_TH = x_TH.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x_TH.device))
        return self._head(self._final_norm(x_TH))


class _Layer:
    def __init__(
        self,
        number: int,
        config: DecoderConfig,
        weights: Weights,
        attention: Attention[Any],
        collectives: Collectives,
        kernels: Kernels,
        share: DenseShare,
    ) -> None:
        self._input_norm = kernels.norm(weights["input_layernorm"], config.rms_norm_eps)
        self._mlp_norm = kernels.norm(weights["post_attention_layernorm"], config.rms_norm_eps)
        heads = SelfAttention(number, config, weights, attention, kernels) if share.heads else None
        self._attention = SummedAttention(heads, collectives) if share.is_split else heads
        build = _sparse_mlp if config.sparse_layers[number] else _dense_mlp
        self.mlp = build(config, weights, collectives, kernels, share)

    def __call__(self, x_TH: torch.Tensor, step: Step) -> torch.Tensor:
        """Adds the layer's outputs to `x_TH` in place."""
        assert self._attention is not None, "a model has heads"
        x_TH = self._attention(self._input_norm(x_TH), step, x_TH)
        return self.mlp(self._mlp_norm(x_TH), x_TH)


def _dense_mlp(
    config: DecoderConfig, weights: Weights, collectives: Collectives, kernels: Kernels, share: DenseShare
) -> GatedMlp:
    mine = None
    if share.inner:
        mine = kernels.gated_mlp(weights, config.hidden_size, config.intermediate_size, config.activation)
    if share.is_split:
        return SummedMlp(mine, collectives)
    assert mine is not None, "a dense layer has an inner dimension"
    return mine


def _sparse_mlp(
    config: DecoderConfig, weights: Weights, collectives: Collectives, kernels: Kernels, share: DenseShare
) -> GatedMlp:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "a sparse layer has experts"
    mine = experts_of(moe.num_experts, collectives.rank, collectives.world)
    gate_up, down = weights["experts.gate_up"], weights["experts.down"]
    scales = None
    if scales_of("experts.down") in weights:
        scales = weights[scales_of("experts.gate_up")], weights[scales_of("experts.down")]
    experts = kernels.experts(mine, gate_up, down, hidden, moe, config.activation, scales)
    return SparseMlp(kernels.router(weights["router"], hidden, moe), experts, collectives)


def _layer_weights(weights: Weights, number: int) -> Weights:
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
