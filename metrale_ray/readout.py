# SPDX-License-Identifier: MIT OR Apache-2.0
"""`read_out`: from the logits of a step that succeeded to tokens and log probabilities.

Rules: pure but for the sampler's use of the requests' histories. Each row's last logits give its token, where it
samples one. The logits of prompt positions are reduced here to a few numbers each, at once; no logits are kept. An
error of one row, or of its grammar, costs that request alone.

Shapes: R rows of logits, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metrale_ray.grammar.constraint import masks
from metrale_ray.live import LiveRequest
from metrale_ray.protocol.commands import Logits
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.sampler import Sampled, SampleError, prompt_logprobs, sample
from metrale_ray.scheduler.plan import PlanRow
from metrale_ray.scheduler.request import RequestId

Tensor = Any  # of torch, which is imported under `model` and `sampling` alone


@dataclass(slots=True)
class Readout:
    """By request: its token, and which row of the logits it is from; the log probabilities of a part of its prompt; or
    why there is no token."""

    sampled: dict[RequestId, Sampled] = field(default_factory=dict)
    prompt: dict[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    errors: dict[RequestId, SampleError] = field(default_factory=dict)
    logit_rows: dict[RequestId, int] = field(default_factory=dict)  # of the tokens in `sampled`


def read_out(logits_RV: Tensor | None, rows: Sequence[PlanRow], live: Mapping[RequestId, LiveRequest]) -> Readout:
    """What the step of `rows` gives to the requests of `live`. `logits_RV` are the step's, None if it gave none."""
    readout = Readout()
    if logits_RV is None:
        return readout
    picked: list[tuple[int, PlanRow]] = []
    first = 0  # the row's first logits
    for row in rows:
        request, num_logits = live.get(row.request_id), _num_logits(row)
        if request is not None and num_logits:
            if request.params.prompt_logprobs is not None and row.span.logits is Logits.ALL:
                _read_prompt(logits_RV[first : first + num_logits], row, request, readout)
            if row.samples and row.request_id not in readout.errors:
                picked.append((first + num_logits - 1, row))
        first += num_logits
    _sample(logits_RV, picked, live, readout)
    return readout


def _num_logits(row: PlanRow) -> int:
    span = row.span
    return len(span.token_ids) if span.logits is Logits.ALL else int(span.logits is Logits.LAST)


def _read_prompt(logits_RV: Tensor, row: PlanRow, request: LiveRequest, readout: Readout) -> None:
    """Position p's logits score the token at p + 1; the last position's are for the token that is sampled."""
    scored = request.prompt_token_ids[row.span.start + 1 : row.span.end + 1]
    if not scored:
        return
    found = prompt_logprobs(logits_RV[: len(scored)], scored, request.params.prompt_logprobs or 0)
    if isinstance(found, SampleError):
        readout.errors[row.request_id] = found
    else:
        readout.prompt[row.request_id] = tuple(found)


def _sample(
    logits_RV: Tensor,
    picked: Sequence[tuple[int, PlanRow]],
    live: Mapping[RequestId, LiveRequest],
    readout: Readout,
) -> None:
    masks_V = _masks(picked, live, readout)
    picked = [(index, row) for index, row in picked if row.request_id not in readout.errors]
    if not picked:
        return
    readout.logit_rows = {row.request_id: index for index, row in picked}
    if len(picked) < len(logits_RV):  # else they are all the rows, in order
        logits_RV = logits_RV[[index for index, _ in picked]]
    rows = [live[row.request_id].sample_row(row.span.end, masks_V.get(row.request_id)) for _, row in picked]
    results = sample(logits_RV, rows)
    for (_, row), result in zip(picked, results, strict=True):
        if isinstance(result, SampleError):
            readout.errors[row.request_id] = result
        else:
            readout.sampled[row.request_id] = result


def _masks(
    picked: Sequence[tuple[int, PlanRow]], live: Mapping[RequestId, LiveRequest], readout: Readout
) -> dict[RequestId, NDArray[np.bool_]]:
    """What the grammars of these rows allow, all asked for at once. A grammar that fails is its row's error."""
    asked = {row.request_id: constraint for _, row in picked if (constraint := live[row.request_id].constraint)}
    found: dict[RequestId, NDArray[np.bool_]] = {}
    for request_id, mask in zip(asked, masks(list(asked.values())), strict=True):
        if isinstance(mask, str):
            readout.errors[request_id] = SampleError("grammar_failed", f"the grammar cannot go on here: {mask}")
        else:
            found[request_id] = mask
    return found
