# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray inspect MODEL`: what a checkpoint is and what it takes, as a table or as one JSON object.

Rules. Nothing is loaded and no Ray is started. What cannot be served is said with its reason, and ends with 3; with
`--json` that is an object too, with `servable` false. Sizes are bytes in JSON, and in units of 1024 in the table.

The JSON's keys: `model`, `servable`, `path`, `digests` (by file, as ranks compare them), `architecture`, `family`,
`layers` (`total`, `dense`, `sparse`), `hidden_size`, `vocab_size`, `heads` (`query`, `key_value`, `size`), `experts`
(null without: `count`, `per_token`, `intermediate_size`), `parameters` (`total`, `active_per_token`, `stored_as`),
`dtype`, `quantization`, `files` (bytes by name), `file_bytes`, `context_length` (of the model), `max_model_len`
(served), `rope`, `window` (null without: `size`, `layers`), `attention` (replicated or tensor), `cache` (of the first
rank: `bytes_per_token`, `block_size`, `block_bytes`), `ranks` (each `rank`, `first_expert`, `num_experts`,
`weight_bytes`), `fit` (null without --memory: `memory_bytes`, `fits`, `cache_blocks`, `cache_tokens`,
`full_length_sequences`, `least_ranks`, `least_ranks_full_length`). Of what cannot be served: `model`, `servable`,
`code`, `reason`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from metrale_ray.cli_output import console, size_text, write_object
from metrale_ray.config import EngineConfig
from metrale_ray.errors import StartError

if TYPE_CHECKING:
    from metrale_ray.model.decoder_config import DecoderConfig, MoeConfig
    from metrale_ray.model.inspection import Fit, Inspection, RankShare

Row = tuple[str, str]


def inspect(config: EngineConfig, memory_bytes: int | None, answers: TextIO, *, as_json: bool) -> int:
    """Write what is known of the checkpoint and give the exit code. Raises UserError, and StartError (see above)."""
    from metrale_ray.model import inspection

    try:
        found = inspection.inspect(config, memory_bytes)
    except StartError as error:
        if as_json:
            write_object(answers, {"model": config.model, "servable": False, **_refusal(error)})
        raise
    if as_json:
        write_object(answers, describe(config.model, found))
    else:
        _write_table(answers, config.model, found)
    return 0


def describe(model: str, found: Inspection) -> dict[str, Any]:
    """The JSON object of a checkpoint that can be served; the keys are those of the file's docstring."""
    return {
        "model": model,
        "servable": True,
        "path": str(found.checkpoint.path),
        "digests": found.checkpoint.digests,
        "architecture": found.decoder.architecture,
        "family": _family(found),
        **_sizes(found.decoder),
        "parameters": {
            "total": found.num_parameters,
            "active_per_token": found.num_active_parameters,
            "stored_as": found.stored_dtypes,
        },
        "dtype": found.dtype,
        "quantization": found.quantization,
        "files": found.file_bytes,
        "file_bytes": sum(found.file_bytes.values()),
        "context_length": found.decoder.max_positions,
        "max_model_len": found.max_model_len,
        "rope": dataclasses.asdict(found.decoder.rope),
        "window": _window(found.decoder),
        "attention": found.attention.name,
        "cache": {
            "bytes_per_token": found.cache_bytes_per_token,
            "block_size": found.block_size,
            "block_bytes": found.block_bytes,
        },
        "ranks": [_share(share) for share in found.ranks],
        "fit": None if found.fit is None else _fit(found.fit),
    }


def _sizes(decoder: DecoderConfig) -> dict[str, Any]:
    num_sparse = decoder.num_sparse_layers
    return {
        "layers": {"total": decoder.num_layers, "dense": decoder.num_layers - num_sparse, "sparse": num_sparse},
        "hidden_size": decoder.hidden_size,
        "vocab_size": decoder.vocab_size,
        "heads": {"query": decoder.num_heads, "key_value": decoder.num_kv_heads, "size": decoder.head_dim},
        "experts": None if decoder.moe is None else _experts(decoder.moe),
    }


def _experts(moe: MoeConfig) -> dict[str, int]:
    return {"count": moe.num_experts, "per_token": moe.experts_per_token, "intermediate_size": moe.intermediate_size}


def _refusal(error: StartError) -> dict[str, str]:
    return {"code": error.code, "reason": error.message}


def _family(found: Inspection) -> str | None:
    family = found.checkpoint.config.get("model_type")
    return family if isinstance(family, str) and family.isprintable() else None


def _window(decoder: DecoderConfig) -> dict[str, int] | None:
    num_layers = sum(window is not None for window in decoder.windows)
    return None if decoder.sliding_window is None else {"size": decoder.sliding_window, "layers": num_layers}


def _share(share: RankShare) -> dict[str, int | None]:
    return {
        "rank": share.rank,
        "first_expert": share.experts.start if share.experts else None,
        "num_experts": len(share.experts),
        "weight_bytes": share.weight_bytes,
    }


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        "memory_bytes": fit.memory_bytes,
        "fits": fit.num_blocks > 0,
        "cache_blocks": fit.num_blocks,
        "cache_tokens": fit.num_cache_tokens,
        "full_length_sequences": fit.num_full_sequences,
        "least_ranks": fit.least_ranks,
        "least_ranks_full_length": fit.least_ranks_full_length,
    }


def _write_table(answers: TextIO, model: str, found: Inspection) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _rows(model, found):
        table.add_row(name, value)
    where = console(answers)
    where.print(table)
    ranks = Table("rank", "experts", "weights", box=None, pad_edge=False)
    for first, last, share in _alike(found.ranks):
        name = str(first.rank) if first is last else f"{first.rank}-{last.rank}"
        ranks.add_row(name, share, size_text(first.weight_bytes))
    where.print()
    where.print(ranks)
    answers.flush()


def _rows(model: str, found: Inspection) -> Iterator[Row]:
    decoder, moe = found.decoder, found.decoder.moe
    yield "model", model
    yield "architecture", f"{decoder.architecture} ({_family(found) or 'no model_type'})"
    dense = decoder.num_layers - decoder.num_sparse_layers
    yield "layers", f"{decoder.num_layers}: {decoder.num_sparse_layers} with experts, {dense} dense"
    yield "hidden size", f"{decoder.hidden_size}, vocabulary {decoder.vocab_size:,}"
    yield "heads", f"{decoder.num_heads} of {decoder.head_dim}, keys and values {decoder.num_kv_heads}"
    yield "experts", "none" if moe is None else f"{moe.num_experts}, {moe.experts_per_token} for each token"
    yield "parameters", f"{found.num_parameters:,}, {found.num_active_parameters:,} of them active for one token"
    held = found.dtype if found.quantization == "none" else f"{found.dtype}, layers' matrices in {found.quantization}"
    yield "dtype", f"{held}, stored as {', '.join(sorted(found.stored_dtypes))}"
    yield "files", f"{len(found.file_bytes)}, {size_text(sum(found.file_bytes.values()))}"
    served = "" if found.max_model_len == decoder.max_positions else f", {found.max_model_len:,} served"
    yield "context", f"{decoder.max_positions:,} tokens{served}"
    factor = "" if decoder.rope.kind == "default" else f", factor {decoder.rope.factor:g}"
    yield "rope", f"{decoder.rope.kind}, theta {decoder.rope.theta:g}{factor}"
    window = _window(decoder)
    yield "window", "none" if window is None else f"{window['size']:,} tokens in {window['layers']} layers"
    where = "on rank 0, which has the most heads" if found.attention.is_split else "on every rank"
    if len(found.ranks) > 1:
        yield "attention", found.attention.name
    yield "cache", f"{size_text(found.cache_bytes_per_token)} for each token, {where}"
    if found.fit is not None:
        yield from _fit_rows(found.fit, found)


def _fit_rows(fit: Fit, found: Inspection) -> Iterator[Row]:
    world = len(found.ranks)
    into = f"into {size_text(fit.memory_bytes)} of each of {world} rank{'s' * (world > 1)}"
    if fit.num_blocks:
        sequences = f"{fit.num_full_sequences:,} sequence{'s' * (fit.num_full_sequences != 1)}"
        yield "fits", f"{into}: {fit.num_cache_tokens:,} tokens of cache, {sequences} of {found.max_model_len:,}"
    else:
        need = found.ranks[0].weight_bytes + 2 * found.block_bytes
        yield "fits", f"not {into}: rank 0 needs {size_text(need)} for its weights and one block of cache"
    yield "least ranks", f"{_number(fit.least_ranks)}; {_number(fit.least_ranks_full_length)} for a whole sequence"


def _number(least_ranks: int | None) -> str:
    return "no number of ranks" if least_ranks is None else str(least_ranks)


def _alike(ranks: tuple[RankShare, ...]) -> Iterator[tuple[RankShare, RankShare, str]]:
    """Runs of ranks with the same weights: the first, the last and their experts in words."""
    first = last = ranks[0]
    for share in (*ranks[1:], None):
        if share is not None and (share.weight_bytes, len(share.experts)) == (first.weight_bytes, len(first.experts)):
            last = share
            continue
        yield first, last, _experts_text(first, last)
        if share is not None:
            first = last = share


def _experts_text(first: RankShare, last: RankShare) -> str:
    if not first.experts:
        return "none"
    run = f"{first.experts.start}-{last.experts.stop - 1}"
    if len(first.experts) == 1 and first is last:
        run = str(first.experts.start)
    return run if first is last else f"{run}, {len(first.experts)} each"
