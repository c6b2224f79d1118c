# SPDX-License-Identifier: MIT OR Apache-2.0
"""A rank's weights: the checkpoint checked whole against the shard plan, and this rank's share of it read.

Every rank checks every name, dtype and shape, those of other ranks' experts included, so all ranks accept or refuse
alike. A rank reads only its share, straight into parameters made beforehand: the peak is the share, and for each
thread that reads one buffer of a fixed size where rows are packed, quantised or converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from metrale_ray.errors import CheckpointError
from metrale_ray.model.checkpoint import Checkpoint, TensorReader, TensorRecord
from metrale_ray.model.decoder_config import DecoderConfig
from metrale_ray.model.families import family_of
from metrale_ray.model.kernels.layout import Layout, Plain, Stored
from metrale_ray.model.kv_cache import kv_block_bytes
from metrale_ray.model.parallel_reading import read_pieces
from metrale_ray.model.safetensors_file import first_few
from metrale_ray.model.shard_plan import HEAD_NAME, Piece, Shape, ShardPlan, choose_layout, plan_shard

# Both sizes that a rank plans its memory with are found here.
__all__ = [
    "Weights",
    "check_tensors",
    "kv_block_bytes",
    "load_weights",
    "plan_weights",
    "read_decoder_config",
    "shard_bytes",
]

FLOATS = ("BF16", "F16", "F32")
# Rotary frequencies that old checkpoints store for each layer. The reference computes them from config.json, as here.
NOT_READ = ".self_attn.rotary_emb.inv_freq"

Weights = dict[str, torch.Tensor]
PLAIN = Plain()


def read_decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The decoder that the checkpoint holds. Raises CheckpointError for what is not supported."""
    return family_of(checkpoint.config).read_config(checkpoint.config)


def plan_weights(
    checkpoint: Checkpoint, config: DecoderConfig, rank: int, world: int, *, is_split: bool = False
) -> ShardPlan:
    """This rank's plan, after checking that the checkpoint is exactly what the plan needs. Raises CheckpointError.

    `is_split`: attention is split over the ranks.
    """
    layout = choose_layout(family_of(checkpoint.config), config, checkpoint.tensors)
    plan = plan_shard(config, layout, rank, world, has_head=HEAD_NAME in checkpoint.tensors, is_split=is_split)
    check_tensors(plan, checkpoint.tensors)
    return plan


def shard_bytes(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    rank: int,
    world: int,
    dtype: torch.dtype,
    layout: Layout = PLAIN,
    *,
    is_split: bool = False,
) -> int:
    """The memory that this rank's weights will take, known before anything is read. Raises CheckpointError."""
    plan = plan_weights(checkpoint, config, rank, world, is_split=is_split)
    return sum(stored.num_bytes for held in _stored(plan, dtype, layout).values() for stored in held.values())


def load_weights(
    plan: ShardPlan,
    tensors: Mapping[str, TensorRecord],
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None],
    layout: Layout = PLAIN,
) -> Weights:
    """Read this rank's share. `on_progress(done, total)` counts bytes of the files. Raises CheckpointError."""
    weights = {
        name: _memory_for(stored, plan.shapes[parameter], device)
        for parameter, held in _stored(plan, dtype, layout).items()
        for name, stored in held.items()
    }
    work = [(tensors[piece.name], piece) for piece in plan.pieces if piece.parameter is not None]
    work.sort(key=lambda item: (item[0].file, item[0].offset))  # files are read from front to back
    total_bytes, done_bytes = sum(_bytes_read(record, piece) for record, piece in work), 0
    on_progress(0, total_bytes)

    def read(reader: TensorReader, item: tuple[TensorRecord, Piece]) -> None:
        record, piece = item
        layout.read(reader, record, piece, plan.shapes[_parameter(piece)], weights)

    def note(item: tuple[TensorRecord, Piece]) -> None:
        nonlocal done_bytes
        done_bytes += _bytes_read(*item)
        on_progress(done_bytes, total_bytes)

    num_threads = torch.get_num_threads() if device.type == "cpu" else 1
    read_pieces(work, read, note, num_threads)
    return weights


def _stored(plan: ShardPlan, dtype: torch.dtype, layout: Layout) -> dict[str, dict[str, Stored]]:
    """The tensors that hold each parameter."""
    return {name: layout.tensors(name, shape, dtype, is_tied=plan.is_tied) for name, shape in plan.shapes.items()}


def _memory_for(stored: Stored, shape: Shape, device: torch.device) -> torch.Tensor:
    """Of a parameter; where a layout pads it, what no piece fills is zero."""
    make = torch.empty if math.prod(stored.shape) == math.prod(shape) else torch.zeros
    return make(stored.shape, device=device, dtype=stored.dtype)


def _parameter(piece: Piece) -> str:
    assert piece.parameter is not None, "only pieces of this rank are read"
    return piece.parameter


def _bytes_read(record: TensorRecord, piece: Piece) -> int:
    """Of the file: whole rows, also where only some of their columns are kept."""
    num_rows = record.shape[0] if record.shape else 1
    return record.num_bytes // max(num_rows, 1) * piece.num_rows


def check_tensors(plan: ShardPlan, tensors: Mapping[str, TensorRecord]) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the planned tensors, with their dtypes and shapes.

    Stored rotary frequencies may be there too, and are not read.
    """
    tensors = {name: record for name, record in tensors.items() if not name.endswith(NOT_READ)}
    expected = {piece.name: piece.shape for piece in plan.pieces}
    faults = [
        _fault("missing from the checkpoint", [name for name in expected if name not in tensors]),
        _fault("not part of this model", [_where(tensors[name]) for name in tensors if name not in expected]),
        _fault(
            f"of a dtype that is not served ({', '.join(FLOATS)} are)",
            [f"{_where(r)} is {r.dtype}" for r in tensors.values() if r.dtype not in FLOATS],
        ),
        _fault(
            "of another shape than config.json says",
            [
                f"{_where(tensors[name])} is {list(tensors[name].shape)}, expected {list(shape)}"
                for name, shape in expected.items()
                if name in tensors and tensors[name].shape != shape
            ],
        ),
    ]
    found = [fault for fault in faults if fault]
    if found:
        raise CheckpointError("; ".join(found))


def _fault(what: str, tensors: list[str]) -> str:
    return f"{len(tensors)} tensor(s) {what}: {first_few(tensors)}" if tensors else ""


def _where(record: TensorRecord) -> str:
    return f"{record.name} in {record.file}"
