# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Kernels`: the operations that a decoder is composed of, on one kind of device and dtype.

Rules. There is a plain set, in PyTorch, and faster ones; each gives the same up to rounding. What an operation needs of
the weights is settled when it is made, so a step only passes rows. An output is valid until an operation of the same
kind is asked: products of one width share their memory. Operations belong to the rank's one engine thread. A weight may
come with scales: then it is quantised, see quantization/int8.py.

Shapes: T rows, H hidden, I inputs, O outputs, X = N + 2·M heads (queries, keys, values), R = N + M rotated heads,
D head_dim, E experts, K experts per token, L local experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.kernels.layout import Layout

# token ids [T] -> [T, H], memory of its own
Embedding = Callable[[torch.Tensor], torch.Tensor]
# [T, H] -> [T, H]
Norm = Callable[[torch.Tensor], torch.Tensor]
# (qkv [T, X, D], cos [T, 1, D], sin [T, 1, D]) -> [T, X, D] with the first R heads rotated, possibly in place
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# rows [T, H] -> the chosen experts [T, K], integers, best first, and their weights [T, K], fp32
Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Linear(ABC):
    """A product with a weight matrix [O, I], and its bias."""

    @abstractmethod
    def __call__(self, x_TI: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """[T, O]; with `add_to` [T, O], it is added to that in place, which is given back."""


class GatedMlp(ABC):
    """down(activation(gate(x)) · up(x)), with biases where there are."""

    @abstractmethod
    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """Add the mlp's output [T, H] to `add_to` in place, and give that back."""


class LocalExperts(ABC):
    """What this rank's experts add to each token. `chosen` holds global numbers; absent experts cost nothing.

    `num_tokens_E`, int64 on the CPU: for how many tokens each expert was chosen so far, of all ranks.
    """

    num_tokens_E: torch.Tensor  # noqa: N815  tensor names end in their logical shape

    @abstractmethod
    def write(
        self, out_TH: torch.Tensor, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> None:
        """Write this rank's share of every token, zeros where it has none."""


class Kernels(ABC):
    """`layout` is how weights lie in memory."""

    layout: Layout

    @abstractmethod
    def embedding(self, weight: torch.Tensor, shape: tuple[int, int], *, is_matrix: bool) -> Embedding:
        """Rows of a table [V, H]. `is_matrix`: it serves as the output head too, and lies as matrices do."""

    @abstractmethod
    def linear(
        self,
        weight: torch.Tensor,
        shape: tuple[int, int],
        bias_O: torch.Tensor | None = None,
        *,
        is_wide: bool = False,
        scales: torch.Tensor | None = None,
    ) -> Linear:
        """A product with a matrix of `shape` [O, I]. `is_wide`: the outputs are fp32."""

    @abstractmethod
    def norm(self, weight_H: torch.Tensor, eps: float) -> Norm:
        """Root-mean-square norm."""

    @abstractmethod
    def rotation(self, norms_RD: torch.Tensor | None, eps: float, num_rotated: int, head_dim: int) -> Rotation:
        """The norm of each rotated head, where there is one, and then its rotation."""

    @abstractmethod
    def gated_mlp(
        self, weights: dict[str, torch.Tensor], hidden_size: int, inner_size: int, activation: str
    ) -> GatedMlp:
        """Of the parameters `gate_up` and `down`, and of each one's bias and scales where there are: `down_scales`."""

    @abstractmethod
    def router(self, weight: torch.Tensor, hidden_size: int, moe: MoeConfig) -> Router:
        """The choice of experts by a matrix [E, H]."""

    @abstractmethod
    def experts(
        self,
        mine: range,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        hidden_size: int,
        moe: MoeConfig,
        activation: str,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> LocalExperts:
        """The experts `mine` of a layer: gate_up [L, 2·I, H], the gate's rows first, and down [L, H, I].

        `scales`: those of both.
        """
