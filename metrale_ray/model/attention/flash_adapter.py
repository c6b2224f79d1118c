# SPDX-License-Identifier: MIT OR Apache-2.0
"""`FlashKernel`: the variable-length flash function of a package, called by keyword, whatever its signature.

Two signatures are known. The package `vllm_flash_attn` 2.6 takes the keys' cumulative lengths (`cu_seqlens_k`), as it
does without blocks. vLLM's bundled copy takes each span's number of keys (`seqused_k`) and refuses cumulative ones
together with blocks; it also lets its caller choose among generations of kernels. An adapter is a table from argument
names to what a plan gives; the one is taken whose names the function's signature accepts.

Leaves out: where the function comes from and whether this machine can run it (`choose`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from metrale_ray.model.attention.flash_plan import FlashPlan

# The generation that both packages have, and that runs on every GPU from compute capability 8.0 on.
GENERATION = 2


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a function of one signature is given beside `q`, `k` and `v`.

    `newest_capability` is the last compute capability that the package's kernels are built for, None for no limit.
    """

    arguments: Mapping[str, Callable[[FlashPlan], Any]]
    newest_capability: tuple[int, int] | None

    def fits(self, signature: inspect.Signature) -> bool:
        """Whether a function of this signature takes these arguments, and needs no others."""
        try:
            signature.bind(q=None, k=None, v=None, **dict.fromkeys(self.arguments))
        except TypeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """`function` with the adapter for its signature. `name` tells the package and its version."""

    name: str
    function: Callable[..., Any]
    adapter: Adapter

    def attend(self, q_TND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan) -> torch.Tensor:
        """The attention output [T, N, D] over keys and values [blocks, block_size, M, D]."""
        arguments = {name: get(plan) for name, get in self.adapter.arguments.items()}
        out_TND: torch.Tensor = self.function(q=q_TND, k=keys, v=values, **arguments)
        return out_TND


def adapter_for(function: Callable[..., Any]) -> Adapter | None:
    """The adapter whose arguments `function` takes, None for an unknown signature."""
    signature = inspect.signature(function)
    return next((adapter for adapter in (BY_LENGTH, BY_START) if adapter.fits(signature)), None)


def _window(plan: FlashPlan) -> tuple[int, int]:
    """How many keys before and after its own a query sees; -1 for all."""
    return (-1, -1) if plan.window is None else (plan.window - 1, 0)


_SHARED: dict[str, Callable[[FlashPlan], Any]] = {
    "cu_seqlens_q": lambda plan: plan.query_starts,
    "max_seqlen_q": lambda plan: plan.longest_query,
    "max_seqlen_k": lambda plan: plan.longest_key,
    "block_table": lambda plan: plan.block_table,
    "causal": lambda plan: True,
}
BY_LENGTH = Adapter(
    {
        **_SHARED,
        "seqused_k": lambda plan: plan.lengths,
        "window_size": lambda plan: list(_window(plan)),
        "fa_version": lambda plan: GENERATION,
    },
    newest_capability=None,
)
BY_START = Adapter(
    {**_SHARED, "cu_seqlens_k": lambda plan: plan.key_starts, "window_size": _window},
    newest_capability=(9, 0),
)
