# SPDX-License-Identifier: MIT OR Apache-2.0
"""The shard plan of one rank: which tensors the checkpoint must hold, and which of them go where on this rank.

Rules. Everything follows from the configuration and from names, nothing from shapes. The plan lists every tensor of
the checkpoint, other ranks' experts included, so that every rank refuses the same faulty checkpoint. A rank holds its
own experts, the routers and norms, and its share of the rest (`dense_share`): all of it where attention is replicated,
and then the final norm and the output head are rank 0's alone. A matrix whose outputs are summed over the ranks is
split by columns, its bias is the first rank's; every other one is split by rows. Related matrices share one parameter
(q, k and v; gate and up), so that one product computes them. What a rank holds nothing of is no parameter there.

Leaves out: reading (`weights`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from metrale_ray.errors import CheckpointError
from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
from metrale_ray.model.dense_share import DenseShare, dense_share
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

    `parameter[index]` receives `rows` of it (None: all), and of those `columns` of the last dimension (None: all).
    `parameter` is None for what only other ranks need.
    """

    name: str
    shape: Shape
    parameter: str | None
    index: Index = ()
    rows: range | None = None
    columns: range | None = None

    @property
    def first_row(self) -> int:
        """The first of the tensor's rows that is read."""
        return 0 if self.rows is None else self.rows.start

    @property
    def num_rows(self) -> int:
        """Rows of the tensor's first dimension that are read; 1 of a tensor without dimensions."""
        if self.rows is not None:
            return len(self.rows)
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """`shapes` of this rank's parameters by name, and the pieces that fill them completely.

    `is_tied`: the embedding is the output head too, on every rank, also on those that have no head.
    """

    shapes: dict[str, Shape]
    pieces: tuple[Piece, ...]
    is_tied: bool = False


def plan_shard(
    config: DecoderConfig,
    layout: ExpertsLayout | None,
    rank: int,
    world: int,
    *,
    has_head: bool = False,
    is_split: bool = False,
) -> ShardPlan:
    """The plan of `rank` in a group of `world`. `layout` is None for a model without experts.

    `has_head`: the checkpoint holds an output head, which counts even where the configuration ties it to the embedding.
    `is_split`: attention is split over the ranks, see `dense_share`.
    """
    shapes: dict[str, Shape] = {}
    pieces: list[Piece] = []
    share = dense_share(config, rank, world, is_split=is_split)
    planner = _Planner(config, layout, rank, world, share, shapes, pieces)
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
        share: DenseShare,
        shapes: dict[str, Shape],
        pieces: list[Piece],
    ) -> None:
        self.config = config
        self.layout = layout
        self.rank = rank
        self.world = world
        self.share = share
        self.shapes = shapes
        self.pieces = pieces

    def ends(self, has_head: bool) -> None:
        """Embedding, final norm and output head. Without a head of its own the embedding is the head."""
        config, rows = self.config, self.share.vocabulary
        has_logits = self.rank == 0 or self.share.is_split
        table = (config.vocab_size, config.hidden_size)
        self._part("model.embed_tokens.weight", table, EMBEDDING, rows=rows)
        self._part("model.norm.weight", (config.hidden_size,), FINAL_NORM if has_logits else None)
        if has_head:
            self._part(HEAD_NAME, table, HEAD if has_logits else None, rows=rows)

    def attention(self, layer: int) -> None:
        """Norms and projections; q, k and v share one parameter."""
        config, share, source, target = self.config, self.share, f"model.layers.{layer}.", f"layers.{layer}."
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        for name in ("input_layernorm", "post_attention_layernorm"):
            self._part(f"{source}{name}.weight", (hidden,), f"{target}{name}")
        q, kv = _of_heads(share.heads, config), _of_heads(share.kv_heads, config)
        all_kv = config.num_kv_heads * config.head_dim
        parts = {"q_proj": (inner, q), "k_proj": (all_kv, kv), "v_proj": (all_kv, kv)}
        self._stacked(source + "self_attn.", "weight", parts, (hidden,), f"{target}qkv")
        self._part(f"{source}self_attn.o_proj.weight", (hidden, inner), f"{target}output", columns=q)
        if config.attention_bias:
            self._stacked(source + "self_attn.", "bias", parts, (), f"{target}qkv_bias")
            self._summed_bias(f"{source}self_attn.o_proj.bias", f"{target}output_bias")
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                norm = f"{target}{name}" if share.heads else None
                self._part(f"{source}self_attn.{name}.weight", (config.head_dim,), norm)

    def mlp(self, layer: int) -> None:
        """A dense mlp, or a router and this rank's experts."""
        config, source, target = self.config, f"model.layers.{layer}.", f"layers.{layer}."
        hidden, mine = config.hidden_size, self.share.inner
        if config.sparse_layers[layer]:
            assert config.moe is not None, "a sparse layer has experts"
            assert self.layout is not None, "experts have a layout"
            self._part(source + self.layout.router, (config.moe.num_experts, hidden), f"{target}router")
            self._experts(source, target, config.moe, self.layout)
            return
        parts = dict.fromkeys(("gate_proj", "up_proj"), (config.intermediate_size, mine))
        self._stacked(source + "mlp.", "weight", parts, (hidden,), f"{target}gate_up")
        down = (hidden, config.intermediate_size)
        self._part(f"{source}mlp.down_proj.weight", down, f"{target}down", columns=mine)
        if config.mlp_bias:
            self._stacked(source + "mlp.", "bias", parts, (), f"{target}gate_up_bias")
            self._summed_bias(f"{source}mlp.down_proj.bias", f"{target}down_bias")

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
            self.pieces.append(Piece(source + file_name, shapes[name], parameter, rows=mine))

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

    def _part(
        self,
        name: str,
        shape: Shape,
        parameter: str | None,
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> None:
        """One tensor of the checkpoint, of which this rank holds `rows` or `columns` (None: all) as a parameter."""
        rows = None if rows is None or len(rows) == shape[0] else rows
        columns = None if columns is None or len(columns) == shape[-1] else columns
        if parameter is None or _is_empty(rows) or _is_empty(columns):
            self.pieces.append(Piece(name, shape, None))
            return
        self.pieces.append(Piece(name, shape, parameter, rows=rows, columns=columns))
        held = shape if rows is None else (len(rows), *shape[1:])
        self.shapes[parameter] = held if columns is None else (*held[:-1], len(columns))

    def _summed_bias(self, name: str, parameter: str) -> None:
        """The bias of a product whose outputs are summed over the ranks: one of them adds it."""
        self._part(name, (self.config.hidden_size,), parameter if self.share.has_biases else None)

    def _stacked(
        self, source: str, kind: str, parts: Mapping[str, tuple[int, range]], rest: Shape, parameter: str
    ) -> None:
        """Several tensors of the checkpoint, some rows of each one below the other in one parameter.

        `parts`: how many rows each has, and which of them this rank holds.
        """
        target = parameter if any(mine for _, mine in parts.values()) else None
        places = _consecutive([len(mine) for _, mine in parts.values()])
        for (name, (num_rows, mine)), place in zip(parts.items(), places, strict=True):
            rows = None if len(mine) == num_rows else mine
            self.pieces.append(Piece(f"{source}{name}.{kind}", (num_rows, *rest), target, (place,), rows))
        if target is not None:
            self.shapes[target] = (sum(len(mine) for _, mine in parts.values()), *rest)


def _of_heads(heads: range, config: DecoderConfig) -> range:
    """The rows of a projection that are of these heads."""
    return range(heads.start * config.head_dim, heads.stop * config.head_dim)


def _is_empty(run: range | None) -> bool:
    return run is not None and not run


def _consecutive(sizes: Collection[int]) -> Iterator[slice]:
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size
