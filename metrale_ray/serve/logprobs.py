# SPDX-License-Identifier: MIT OR Apache-2.0
"""From the head's numbers for one place to the entry that a user sees: token ids, logprobs, ranks and texts."""

from __future__ import annotations

from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.serve.outputs import Logprob
from metrale_ray.serve.text import Tokenizer


def logprob_entry(scored: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token of the text first, then the most likely ones from rank 1; each token once."""

    own = scored.token_id
    text = _no_text if tokenizer is None else tokenizer.token_text
    entries = {own: Logprob(scored.logprob, scored.rank, text(own))}
    for rank, (token_id, logprob) in enumerate(zip(scored.top_ids, scored.top_logprobs, strict=True), start=1):
        if token_id != own:
            entries[token_id] = Logprob(logprob, rank, text(token_id))
    return entries


def _no_text(token_id: int) -> None:
    return None
