# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shard plan of one rank: which tensors the checkpoint must hold, and which of them go where on this rank.

Rules. Everything follows from the configuration and from names, nothing from shapes. The plan lists every tensor of
the checkpoint, other ranks' experts included, so that every rank refuses the same faulty checkpoint. A rank holds its
own experts and the replicated part; the final norm and the output head are rank 0's. Related matrices share one
parameter (q, k and v; gate and up), so that one product computes them.

Leaves out: reading (`weights`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
from metrale_ray.model.experts.placement import experts_of
from metrale_ray.model.families.family import ExpertsApart, ExpertsFused, ExpertsLayout, Family

EMBEDDING = "embedding"
FINAL_NORM = "final_norm"
HEAD = "head"
# The output head's name in every checkpoint.
HEAD_NAME = "lm_head.weight"

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor that the checkpoint must hold, `name` of `shape`, and what this rank takes of it.

    `parameter[index]` receives as many rows as it has, from `first_row` on. `parameter` is None for what only other
    ranks need.
    """

    name: str
    shape: Shape
    parameter: str | None
    index: Index = ()
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """`shapes` of this rank's parameters by name, and the pieces that fill them completely.

    `is_tied`: the embedding is the output head too, on every rank, also on those that have no head.
    """

    shapes: dict[str, Shape]
    pieces: tuple[Piece, ...]
    is_tied: bool = False


def plan_shard(
    config: DecoderConfig, layout: ExpertsLayout | None, rank: int, world: int, *, has_head: bool = False
) -> ShardPlan:
    """The plan of `rank` in a group of `world`. `layout` is None for a model without experts.

    `has_head`: the checkpoint holds an output head, which counts even where the configuration ties it to the embedding.
    """
    shapes: dict[str, Shape] = {}
    pieces: list[Piece] = []
    planner = _Planner(config, layout, rank, world, shapes, pieces)
    is_tied = config.tie_word_embeddings and not has_head
    planner.ends(not is_tied)
    for layer in range(config.num_layers):
        planner.attention(layer)
        planner.mlp(layer)
    return ShardPlan(shapes, tuple(pieces), is_tied)


def choose_layout(family: Family, config: DecoderConfig, names: Collection[str]) -> ExpertsLayout | None:
    """The layout that the checkpoint's names follow, None without experts. Raises CheckpointError for an unknown one.

    The first expert tensor of the first sparse layer tells; all others are then checked against the plan.
    """
    if not any(config.sparse_layers):
        return None
    prefix = f"model.layers.{config.sparse_layers.index(True)}."
    for layout in family.layouts:
        if any(prefix + name in names for name in _first_names(layout)):
            return layout
    expected = " or ".join(prefix + _first_names(layout)[0] for layout in family.layouts)
    raise CheckpointError(f"the checkpoint has no experts under a known name: {expected} is missing")


def _first_names(layout: ExpertsLayout) -> tuple[str, ...]:
    if isinstance(layout, ExpertsFused):
        return layout.gate_up, layout.down
    return tuple(name.format(E=0) for name in (layout.gate, layout.up, layout.down))


class _Planner:
    """Fills `shapes` and `pieces` part by part."""

    def __init__(
        self,
        config: DecoderConfig,
        layout: ExpertsLayout | None,
        rank: int,
        world: int,
        shapes: dict[str, Shape],
        pieces: list[Piece],
    ) -> None:
        self.config = config
        self.layout = layout
        self.rank = rank
        self.world = world
        self.shapes = shapes
        self.pieces = pieces

    def ends(self, has_head: bool) -> None:
        """Embedding, final norm and output head. Without a head of its own the embedding is the head."""
        config, is_first = self.config, self.rank == 0
        table = (config.vocab_size, config.hidden_size)
        self._whole("model.embed_tokens.weight", table, EMBEDDING)
        self._whole("model.norm.weight", (config.hidden_size,), FINAL_NORM if is_first else None)
        if has_head:
            self._whole(HEAD_NAME, table, HEAD if is_first else None)

    def attention(self, layer: int) -> None:
        """Norms and projections; q, k and v share one parameter."""
        config, source, target = self.config, f"model.layers.{layer}.", f"layers.{layer}."
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for name in ("input_layernorm", "post_attention_layernorm"):
            self._whole(f"{source}{name}.weight", (config.hidden_size,), f"{target}{name}")
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._stacked(source + "self_attn.", "weight", parts, (config.hidden_size,), f"{target}qkv")
        self._whole(f"{source}self_attn.o_proj.weight", (config.hidden_size, q_size), f"{target}output")
        if config.attention_bias:
            self._stacked(source + "self_attn.", "bias", parts, (), f"{target}qkv_bias")
            self._whole(f"{source}self_attn.o_proj.bias", (config.hidden_size,), f"{target}output_bias")
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                self._whole(f"{source}self_attn.{name}.weight", (config.head_dim,), f"{target}{name}")

    def mlp(self, layer: int) -> None:
        """A dense mlp, or a router and this rank's experts."""
        config, source, target = self.config, f"model.layers.{layer}.", f"layers.{layer}."
        if config.sparse_layers[layer]:
            assert config.moe is not None, "a sparse layer has experts"
            assert self.layout is not None, "experts have a layout"
            self._whole(source + self.layout.router, (config.moe.num_experts, config.hidden_size), f"{target}router")
            self._experts(source, target, config.moe, self.layout)
            return
        parts = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        self._stacked(source + "mlp.", "weight", parts, (config.hidden_size,), f"{target}gate_up")
        self._whole(f"{source}mlp.down_proj.weight", (config.hidden_size, config.intermediate_size), f"{target}down")
        if config.mlp_bias:
            self._stacked(source + "mlp.", "bias", parts, (), f"{target}gate_up_bias")
            self._whole(f"{source}mlp.down_proj.bias", (config.hidden_size,), f"{target}down_bias")

    def _experts(self, source: str, target: str, moe: MoeConfig, layout: ExpertsLayout) -> None:
        mine = experts_of(moe.num_experts, self.rank, self.world)
        hidden, inner = self.config.hidden_size, moe.intermediate_size
        self.shapes[f"{target}experts.gate_up"] = (len(mine), 2 * inner, hidden)
        self.shapes[f"{target}experts.down"] = (len(mine), hidden, inner)
        if isinstance(layout, ExpertsFused):
            self._fused_experts(source, target, moe, mine, layout)
            return
        for expert in range(moe.num_experts):
            self._one_expert(source, target, moe, expert, mine, layout)

    def _fused_experts(self, source: str, target: str, moe: MoeConfig, mine: range, layout: ExpertsFused) -> None:
        hidden, inner = self.config.hidden_size, moe.intermediate_size
        shapes = {"gate_up": (moe.num_experts, 2 * inner, hidden), "down": (moe.num_experts, hidden, inner)}
        for name, file_name in (("gate_up", layout.gate_up), ("down", layout.down)):
            parameter = f"{target}experts.{name}" if mine else None
            self.pieces.append(Piece(source + file_name, shapes[name], parameter, first_row=mine.start))

    def _one_expert(
        self, source: str, target: str, moe: MoeConfig, expert: int, mine: range, layout: ExpertsApart
    ) -> None:
        hidden, inner = self.config.hidden_size, moe.intermediate_size
        local = expert - mine.start
        parts: tuple[tuple[str, str, Shape, Index], ...] = (
            (layout.gate, "gate_up", (inner, hidden), (local, slice(0, inner))),
            (layout.up, "gate_up", (inner, hidden), (local, slice(inner, 2 * inner))),
            (layout.down, "down", (hidden, inner), (local,)),
        )
        for name, parameter, shape, index in parts:
            piece_name = source + name.format(E=expert)
            if expert in mine:
                self.pieces.append(Piece(piece_name, shape, f"{target}experts.{parameter}", index))
            else:
                self.pieces.append(Piece(piece_name, shape, None))

    def _whole(self, name: str, shape: Shape, parameter: str | None) -> None:
        self.pieces.append(Piece(name, shape, parameter))
        if parameter is not None:
            self.shapes[parameter] = shape

    def _stacked(self, source: str, kind: str, parts: Mapping[str, int], rest: Shape, parameter: str) -> None:
        """Several tensors of the checkpoint, one below the other in one parameter."""
        for (name, num_rows), rows in zip(parts.items(), _consecutive(parts.values()), strict=True):
            self.pieces.append(Piece(f"{source}{name}.{kind}", (num_rows, *rest), parameter, (rows,)))
        self.shapes[parameter] = (sum(parts.values()), *rest)


def _consecutive(sizes: Collection[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
