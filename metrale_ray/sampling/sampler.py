# SPDX-License-Identifier: MIT OR Apache-2.0
"""`sample`: from a step's logits to one token per row. Rank 0 calls it; no other rank chooses anything.

Rules: a row's token and its log probabilities depend on its logits and its SampleRow alone, to the last bit, whatever
else is in the batch: every row goes through its own few operations on the CPU. A row whose logits hold NaN or +inf, or
nothing finite, gives a SampleError, and so does one whose masks leave no token; the rows beside it are not touched.
-inf is a token that cannot be chosen.

The order, as in vLLM: log probabilities of the raw logits; the grammar's mask; allowed ids, bad sequences, ends before
`min_tokens` (unless the grammar leaves nothing else); biases; penalties; the largest logit where the temperature is 0;
temperature; min_p and top-k; top-p; the draw.

How a token is drawn: the candidates that are left stand in the order of their ids, their weights are laid end to end,
and the one on which `draw(...)` times the total falls is taken.

Shapes: R rows of the step, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from metrale_ray.sampling.history import TokenHistory
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.penalties import add_penalties
from metrale_ray.sampling.philox import draw
from metrale_ray.sampling.prepared import Prepared, prepared
from metrale_ray.sampling.processors import MIN_TEMPERATURE, Floats, candidates, draw_index
from metrale_ray.sampling.scores import score
from metrale_ray.sampling.token_params import TokenParams

# Rows of a prompt that are brought to the CPU at a time: about 10 MB of a vocabulary of 150 000.
_PROMPT_ROWS = 16


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose token a row of logits is for.

    `seed` is the request's, or the engine's choice for it (u64); `sequence_index` tells apart the sequences of one
    request; `position` is the place of the new token in its sequence, the prompt included. `history` is there when
    `params.needs_history`. `end_token_ids` are not chosen while `num_generated`, the tokens that the sequence has so
    far, is below `params.min_tokens`; ids outside the vocabulary are ignored there and are nowhere else allowed.
    `mask` tells the tokens that the request's grammar allows (bool, [V]); None: there is no grammar.
    """

    params: TokenParams
    seed: int
    sequence_index: int
    position: int
    history: TokenHistory | None = None
    num_generated: int = 0
    end_token_ids: frozenset[int] = frozenset()
    mask: NDArray[np.bool_] | None = None


BAD_LOGITS = "bad_logits"
"""The code of a row whose logits are not finite."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's token. `logprobs` is there when `params.logprobs` is."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SampleError:
    """Why a row has no token. `code` ("bad_logits", "no_token_left") is stable; the message is for people."""

    code: str
    message: str

    def __str__(self) -> str:
        return self.message


def sample(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | SampleError]:
    """One token or error per row of `logits_RV`, which is fp32 on any device and is not changed.

    Raises ValueError when the shape or the dtype is not what `rows` need, or a row lacks the history that it needs.
    """
    _check(logits_RV, len(rows))
    for row in rows:
        if row.history is None and row.params.needs_history:
            raise ValueError(f"the row of position {row.position} has penalties or bad sequences and no history")
    if not rows:
        return []
    if logits_RV.device.type != "cpu":
        return _sample_from_device(logits_RV, rows)
    return [_sample_row(logits_V, row) for logits_V, row in zip(_host(logits_RV), rows, strict=True)]


def prompt_logprobs(
    logits_RV: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs] | SampleError:
    """What `token_ids[i]` scores in row i, with the `num_top` most likely tokens; an error if a row is not finite.

    `logits_RV` is fp32 on any device and is not changed. A few rows at a time are worked on, so nothing large is kept.
    Raises ValueError when the shape or the dtype is not what `token_ids` need.
    """
    _check(logits_RV, len(token_ids))
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _PROMPT_ROWS):
        ids = token_ids[start : start + _PROMPT_ROWS]
        for logits_V, token_id in zip(_host(logits_RV[start : start + _PROMPT_ROWS]), ids, strict=True):
            peak = float(logits_V[logits_V.argmax()])
            if not np.isfinite(peak):
                return SampleError(BAD_LOGITS, f"the logits for token {len(found)} of a part of the prompt are bad")
            found.append(score(logits_V, peak, token_id, num_top))
    return found


def _sample_from_device(logits_RV: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | SampleError]:
    """Only what must be is brought from the device: not the rows whose largest logit alone is asked for."""
    best_R = logits_RV.argmax(dim=1)  # the first on a tie; a NaN counts as the largest
    peaks = logits_RV.gather(1, best_R[:, None]).flatten().tolist()
    results = [_best(token_id, peak, row) for token_id, peak, row in zip(best_R.tolist(), peaks, rows, strict=True)]
    needed = [r for r, row in enumerate(rows) if not _is_plain(row)]
    if needed:
        index = torch.tensor(needed, device=logits_RV.device)
        for r, logits_V in zip(needed, _host(logits_RV.index_select(0, index)), strict=True):
            results[r] = _sample_row(logits_V, rows[r])
    return results


def _sample_row(logits_V: Floats, row: SampleRow) -> Sampled | SampleError:
    """`logits_V` is the row's own on the CPU; it is not changed."""
    params = row.params
    best = int(logits_V.argmax())  # the first on a tie; a NaN counts as the largest
    peak = float(logits_V[best])
    if _is_plain(row) or not np.isfinite(peak):
        return _best(best, peak, row)
    token_id = _choose(logits_V, best, row)
    if isinstance(token_id, SampleError) or params.logprobs is None:
        return token_id if isinstance(token_id, SampleError) else Sampled(token_id)
    return Sampled(token_id, score(logits_V, peak, token_id, params.logprobs))


def _is_plain(row: SampleRow) -> bool:
    """Whether the largest logit is all that the row asks for."""
    params = row.params
    return params.temperature < MIN_TEMPERATURE and params.logprobs is None and not _changes_logits(row)


def _changes_logits(row: SampleRow) -> bool:
    return row.mask is not None or prepared(row.params).changes_logits or _ends_are_masked(row)


def _ends_are_masked(row: SampleRow) -> bool:
    return row.num_generated < row.params.min_tokens and bool(row.end_token_ids)


def _best(token_id: int, peak: float, row: SampleRow) -> Sampled | SampleError:
    if not np.isfinite(peak):
        return SampleError(BAD_LOGITS, f"the logits of position {row.position} are not finite numbers")
    return Sampled(token_id)


def _choose(logits_V: Floats, best: int, row: SampleRow) -> int | SampleError:
    """The token of a row of good logits, of which `best` has the largest."""
    params = row.params
    if _changes_logits(row):
        logits_V = _changed(logits_V, prepared(params), row)
        best = int(logits_V.argmax())
    peak = float(logits_V[best])
    if peak == -np.inf:
        return SampleError("no_token_left", f"the parameters forbid every token at position {row.position}")
    if params.temperature < MIN_TEMPERATURE:
        return best
    ids_C, weights_C = candidates(logits_V, peak, params)
    index = draw_index(weights_C, draw(row.seed, row.sequence_index, row.position))
    return index if ids_C is None else int(ids_C[index])


def _changed(logits_V: Floats, known: Prepared, row: SampleRow) -> Floats:
    """A copy of the row with masks, biases and penalties."""
    if known.allowed_ids is None:
        changed_V = logits_V.copy()
    else:
        changed_V = np.full_like(logits_V, -np.inf)
        changed_V[known.allowed_ids] = logits_V[known.allowed_ids]
    changed_V[known.bad_ids] = -np.inf
    if row.history is not None:
        changed_V[known.bad_ids_after(row.history)] = -np.inf
    if row.mask is not None:
        np.putmask(changed_V, ~row.mask, -np.inf)
    if _ends_are_masked(row):
        _mask_ends(changed_V, row)
    changed_V[known.bias_ids] += known.bias_values
    if row.history is not None and row.params.has_penalties:
        add_penalties(changed_V, row.params, row.history)
    return changed_V


def _mask_ends(changed_V: Floats, row: SampleRow) -> None:
    """No end, unless a grammar leaves nothing else: then it wins over `min_tokens`."""
    ends = [token_id for token_id in row.end_token_ids if token_id < changed_V.size]
    before = changed_V[ends]
    changed_V[ends] = -np.inf
    if row.mask is not None and changed_V.max() == -np.inf:
        changed_V[ends] = before


def _host(logits_RV: torch.Tensor) -> NDArray[np.float32]:
    """The rows on the CPU, each contiguous; without a copy where they are so already."""
    host_RV: NDArray[np.float32] = logits_RV.detach().cpu().contiguous().numpy()
    return host_RV


def _check(logits_RV: torch.Tensor, num_rows: int) -> None:
    if logits_RV.dim() != 2 or logits_RV.shape[0] != num_rows or logits_RV.shape[1] == 0:
        raise ValueError(f"logits have the shape {tuple(logits_RV.shape)}; {num_rows} rows of a vocabulary are needed")
    if logits_RV.dtype != torch.float32:
        raise ValueError(f"logits are {logits_RV.dtype}; they must be torch.float32")
