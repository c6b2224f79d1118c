# SPDX-License-Identifier: MIT OR Apache-2.0
"""The native kernels of a CPU rank: metrale_ray/native, called on tensors.

Rules. Weights are packed. A structure that the core reads is made once, next to the tensors whose memory it names, and
lives as long. Rows come from this rank's own operations, so their shapes are right; what a command names (blocks, token
ids) is checked in the core or before. Shapes: see Kernels.
"""

from __future__ import annotations

from ctypes import byref

import torch

from metrale_ray.model.decoder_config import MoeConfig
from metrale_ray.model.kernels.buffers import Buffer, rows_into, rows_of
from metrale_ray.model.kernels.kernels import Embedding, GatedMlp, Kernels, Linear, LocalExperts, Norm, Rotation, Router
from metrale_ray.model.kernels.layout import FORMATS, Packed
from metrale_ray.model.layers.activation import ACTIVATIONS
from metrale_ray.model.quantization.int8 import scales_of
from metrale_ray.native import library


class NativeLinear(Linear):
    """A product with a packed matrix."""

    def __init__(
        self,
        kernels: NativeKernels,
        weight: torch.Tensor,
        shape: tuple[int, int],
        bias_O: torch.Tensor | None,
        is_wide: bool,
        scales: torch.Tensor | None = None,
    ) -> None:
        self._run = kernels.core.mr_linear
        self._threads = kernels.threads
        self._kept = weight, scales, bias_O
        addresses = weight.data_ptr(), _address(scales), _address(bias_O)
        self._matrix = byref(library.Matrix(*addresses, *shape, FORMATS[weight.dtype]))
        self._out = kernels.buffer(shape[0], torch.float32 if is_wide else kernels.dtype)

    def __call__(self, x_TI: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """See Linear."""
        if add_to is not None:
            rows = rows_of(x_TI)
            self._run(self._matrix, rows, rows_into(add_to, rows), 1, self._threads)
            return add_to
        out = self._out.output(x_TI.shape[0])
        self._run(self._matrix, rows_of(x_TI), out.rows, 0, self._threads)
        return out.tensor


class NativeExperts(LocalExperts):
    """Packed experts."""

    def __init__(
        self,
        kernels: NativeKernels,
        mine: range,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
        sizes: tuple[int, int],
        num_experts: int,
        activation: str,
    ) -> None:
        self._run = kernels.core.mr_experts
        self._threads = kernels.threads
        self._kept = gate_up, down, scales
        self.num_tokens_E = torch.zeros(num_experts, dtype=torch.int64)
        self._counts = self.num_tokens_E.data_ptr()
        self._experts = byref(_experts(gate_up, down, scales, mine, sizes, activation))

    def write(
        self, out_TH: torch.Tensor, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> None:
        """See LocalExperts. `chosen_TK` is int32."""
        rows = rows_of(x_TH)
        self._run(
            self._experts,
            rows,
            chosen_TK.data_ptr(),
            weights_TK.data_ptr(),
            chosen_TK.shape[1],
            rows_into(out_TH, rows),
            0,
            self._counts,
            self._threads,
        )


class NativeMlp(GatedMlp):
    """A dense mlp without biases: one expert that has all tokens."""

    def __init__(
        self,
        kernels: NativeKernels,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
        sizes: tuple[int, int],
        activation: str,
    ) -> None:
        self._run = kernels.core.mr_experts
        self._threads = kernels.threads
        self._kept = gate_up, down, scales
        self._mlp = byref(_experts(gate_up, down, scales, range(1), sizes, activation))

    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """See GatedMlp."""
        rows = rows_of(x_TH)
        self._run(self._mlp, rows, None, None, 1, rows_into(add_to, rows), 1, None, self._threads)
        return add_to


class NativeMlpWithBias(GatedMlp):
    """A dense mlp in three products."""

    def __init__(
        self,
        kernels: NativeKernels,
        weights: dict[str, torch.Tensor],
        sizes: tuple[int, int],
        activation: str,
    ) -> None:
        hidden, inner = sizes
        (gate, up), bias = weights["gate_up"], weights.get("gate_up_bias")
        gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
        gate_scales, up_scales = weights.get(scales_of("gate_up"), (None, None))
        self._gate = kernels.linear(gate[None], (inner, hidden), gate_bias, scales=gate_scales)
        self._up = kernels.linear(up[None], (inner, hidden), up_bias, scales=up_scales)
        down_scales = weights.get(scales_of("down"))
        self._down = kernels.linear(weights["down"], (hidden, inner), weights.get("down_bias"), scales=down_scales)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x_TH: torch.Tensor, add_to: torch.Tensor) -> torch.Tensor:
        """See GatedMlp."""
        gate_TI = self._activation(self._gate(x_TH))
        return self._down(gate_TI * self._up(x_TH), add_to)


class NativeKernels(Kernels):
    """The core's kernels for `dtype`, with `threads` threads."""

    def __init__(self, dtype: torch.dtype, threads: int, *, is_quantised: bool = False) -> None:
        core = library.library()
        assert core is not None, "native kernels are chosen where the core is there"
        self.core = core
        self.layout = Packed(is_quantised=is_quantised)
        self.dtype = dtype
        self.threads = threads
        self._buffers: dict[tuple[int, torch.dtype], Buffer] = {}

    def buffer(self, width: int, dtype: torch.dtype) -> Buffer:
        """Outputs of a product. Products of one width share it: a layer's output is used up before the next comes."""
        return self._buffers.setdefault((width, dtype), Buffer(width, dtype))

    def embedding(self, weight: torch.Tensor, shape: tuple[int, int], *, is_matrix: bool) -> Embedding:
        """See Kernels."""
        if not is_matrix:
            return lambda ids_T: weight.index_select(0, ids_T)
        matrix = byref(library.Matrix(weight.data_ptr(), None, None, *shape, FORMATS[weight.dtype]))

        def rows(ids_T: torch.Tensor) -> torch.Tensor:
            if ids_T.numel() and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < shape[0]:
                raise IndexError(f"a token id is outside 0..{shape[0] - 1}")
            x_TH = torch.empty((ids_T.numel(), shape[1]), dtype=weight.dtype)
            self.core.mr_unpack_rows(matrix, ids_T.data_ptr(), ids_T.numel(), rows_of(x_TH))
            return x_TH

        return rows

    def linear(
        self,
        weight: torch.Tensor,
        shape: tuple[int, int],
        bias_O: torch.Tensor | None = None,
        *,
        is_wide: bool = False,
        scales: torch.Tensor | None = None,
    ) -> Linear:
        """See Kernels."""
        return NativeLinear(self, weight, shape, bias_O, is_wide, scales)

    def norm(self, weight_H: torch.Tensor, eps: float) -> Norm:
        """See Kernels."""
        width, weight = len(weight_H), weight_H.data_ptr()
        buffer = Buffer(width, self.dtype)
        run, threads = self.core.mr_norm, self.threads

        def norm(x_TH: torch.Tensor) -> torch.Tensor:
            out = buffer.output(x_TH.shape[0])
            run(rows_of(x_TH), weight, width, eps, out.rows, threads)
            return out.tensor

        return norm

    def rotation(self, norms_RD: torch.Tensor | None, eps: float, num_rotated: int, head_dim: int) -> Rotation:
        """See Kernels: in place."""
        norms = None if norms_RD is None else norms_RD.data_ptr()
        run, threads = self.core.mr_rotate, self.threads

        def turn(qkv_TXD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
            run(rows_of(qkv_TXD), num_rotated, head_dim, norms, eps, cos_T1D.data_ptr(), sin_T1D.data_ptr(), threads)
            return qkv_TXD

        return turn

    def gated_mlp(
        self, weights: dict[str, torch.Tensor], hidden_size: int, inner_size: int, activation: str
    ) -> GatedMlp:
        """See Kernels."""
        sizes = hidden_size, inner_size
        if "gate_up_bias" in weights or "down_bias" in weights:
            return NativeMlpWithBias(self, weights, sizes, activation)
        is_quantised = scales_of("down") in weights
        scales = (weights[scales_of("gate_up")], weights[scales_of("down")]) if is_quantised else None
        return NativeMlp(self, weights["gate_up"], weights["down"], scales, sizes, activation)

    def router(self, weight: torch.Tensor, hidden_size: int, moe: MoeConfig) -> Router:
        """See Kernels."""
        scores = NativeLinear(self, weight, (moe.num_experts, hidden_size), None, is_wide=False)
        chosen, weights = Buffer(moe.experts_per_token, torch.float32), Buffer(moe.experts_per_token, torch.float32)
        run, threads = self.core.mr_route, self.threads

        def route(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            num_rows = x_TH.shape[0]
            chosen_TK, weights_TK = chosen.output(num_rows).tensor, weights.output(num_rows).tensor
            run(
                rows_of(scores(x_TH)),
                moe.num_experts,
                moe.experts_per_token,
                moe.normalize_weights,
                moe.round_weights,
                chosen_TK.data_ptr(),
                weights_TK.data_ptr(),
                threads,
            )
            return chosen_TK.view(torch.int32), weights_TK

        return route

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
        """See Kernels."""
        sizes = hidden_size, moe.intermediate_size
        return NativeExperts(self, mine, gate_up, down, scales, sizes, moe.num_experts, activation)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    mine: range,
    sizes: tuple[int, int],
    activation: str,
) -> library.Experts:
    kind = FORMATS[gate_up.dtype]
    return library.Experts(
        gate_up.data_ptr(),
        down.data_ptr(),
        *((None, None) if scales is None else map(torch.Tensor.data_ptr, scales)),
        mine.start,
        len(mine),
        *sizes,
        kind,
        library.ACTIVATIONS[activation],
    )
