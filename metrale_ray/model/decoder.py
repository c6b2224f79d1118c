# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Decoder`: the layers that the families share, from token ids to hidden states, on one rank.

Replicated parts do the same operations on the same shapes on every rank; ranks differ only inside the experts.
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
from metrale_ray.model.experts.local import LocalExperts
from metrale_ray.model.experts.placement import experts_of
from metrale_ray.model.experts.sparse_mlp import OnRouting, SparseMlp
from metrale_ray.model.layers.activation import ACTIVATIONS
from metrale_ray.model.layers.linear import Product
from metrale_ray.model.layers.mlp import DenseMlp
from metrale_ray.model.layers.norm import rms_norm
from metrale_ray.model.layers.self_attention import SelfAttention
from metrale_ray.model.shard_plan import EMBEDDING, FINAL_NORM, HEAD
from metrale_ray.model.step import Step
from metrale_ray.model.weights import Weights

Mlp = Callable[[torch.Tensor], torch.Tensor]


class Decoder:
    """Weights and layers of one rank."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        attention: Attention[Any],
        collectives: Collectives,
        product: Product,
    ) -> None:
        self._embedding_VH = weights[EMBEDDING]
        self._final_norm_H = weights.get(FINAL_NORM)
        self._head_VH = weights.get(HEAD, weights[EMBEDDING])
        self._eps = config.rms_norm_eps
        self._product = product
        self._layers = [
            _Layer(number, config, _layer_weights(weights, number), attention, collectives, product)
            for number in range(config.num_layers)
        ]

    def hidden(self, step: Step) -> torch.Tensor:
        """The hidden states after the last layer, [T, H]. Raises PeerFailed, LinkLost."""
        x_TH = self._embedding_VH.index_select(0, step.token_ids)
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

    def logits(self, x_TH: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Final norm and output head of some rows, fp32 [R, V]; rank 0 only."""
        assert self._final_norm_H is not None, "only rank 0 holds the final norm"
        if rows != list(range(x_TH.shape[0])):
            x_TH = x_TH.index_select(0, torch.tensor(rows, dtype=torch.int64, device=x_TH.device))
        return self._product(rms_norm(x_TH, self._final_norm_H, self._eps), self._head_VH, None).float()


class _Layer:
    def __init__(
        self,
        number: int,
        config: DecoderConfig,
        weights: Weights,
        attention: Attention[Any],
        collectives: Collectives,
        product: Product,
    ) -> None:
        self._eps = config.rms_norm_eps
        self._input_norm_H = weights["input_layernorm"]
        self._mlp_norm_H = weights["post_attention_layernorm"]
        self._attention = SelfAttention(number, config, weights, attention, product)
        build = _sparse_mlp if config.sparse_layers[number] else _dense_mlp
        self.mlp: Mlp = build(config, weights, collectives, product)

    def __call__(self, x_TH: torch.Tensor, step: Step) -> torch.Tensor:
        x_TH = x_TH + self._attention(rms_norm(x_TH, self._input_norm_H, self._eps), step)
        return x_TH + self.mlp(rms_norm(x_TH, self._mlp_norm_H, self._eps))


def _dense_mlp(config: DecoderConfig, weights: Weights, collectives: Collectives, product: Product) -> Mlp:
    return DenseMlp(weights, ACTIVATIONS[config.activation], product)


def _sparse_mlp(config: DecoderConfig, weights: Weights, collectives: Collectives, product: Product) -> Mlp:
    assert config.moe is not None, "a sparse layer has experts"
    mine = experts_of(config.moe.num_experts, collectives.rank, collectives.world)
    activation = ACTIVATIONS[config.activation]
    experts = LocalExperts(
        mine, weights["experts.gate_up"], weights["experts.down"], activation, product, config.moe.num_experts
    )
    return SparseMlp(config.moe, weights["router"], experts, collectives, product)


def _layer_weights(weights: Weights, number: int) -> Weights:
    prefix = f"layers.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
