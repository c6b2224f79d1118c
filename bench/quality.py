# SPDX-License-Identifier: MIT OR Apache-2.0
"""What int8 costs in quality: perplexity of a model over a text of this repository, and how far logits move.

    python -m bench.quality [--model DIR] [--tokens 4096] [--kernels auto]

The model is the demo's unless another is named. The text is cut into windows; each token is predicted from those
before it in the window. Both runs see the same tokens; a row of logits is compared with the row in the other run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from metrale_ray.config import EngineConfig
from metrale_ray.demo import ensure_demo_checkpoint
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.collectives import OneRank
from metrale_ray.model.dtypes import resolve_dtype
from metrale_ray.model.transformer import TransformerModel
from metrale_ray.protocol.commands import BlockId, Logits, Slot, Span

TEXT = Path(__file__).parent / "texts" / "documents.txt"  # of this repository, as it once was, so that figures stay
WINDOW = 512
BLOCK_SIZE = 16
CPU = torch.device("cpu")


class Quality(NamedTuple):
    """Of `num_tokens` predicted tokens. `largest_difference`, of `same_choice` the share: logits against plain ones."""

    num_tokens: int
    plain_perplexity: float
    perplexity: float
    largest_difference: float
    same_choice: float

    @property
    def relative_change(self) -> float:
        """Of the perplexity."""
        return self.perplexity / self.plain_perplexity - 1


def compare(folder: Path, num_tokens: int, kernels: str = "auto", quantization: str = "int8") -> Quality:
    """A quantised model beside the plain one, over the first tokens of the documents."""
    windows = list(_windows(folder, num_tokens))
    plain, quantised = Judge(folder, kernels, "none"), Judge(folder, kernels, quantization)
    losses, other_losses, difference, same, count = 0.0, 0.0, 0.0, 0, 0
    for token_ids in windows:
        want_TV, got_TV = plain.logits(token_ids), quantised.logits(token_ids)
        losses += _loss(want_TV, token_ids)
        other_losses += _loss(got_TV, token_ids)
        difference = max(difference, float((got_TV - want_TV).abs().max()))
        same += int((got_TV.argmax(dim=1) == want_TV.argmax(dim=1)).sum())
        count += len(token_ids)
    predicted = count - len(windows)
    return Quality(
        predicted, math.exp(losses / predicted), math.exp(other_losses / predicted), difference, same / count
    )


class Judge:
    """One rank of a model, which gives the logits of whole windows."""

    def __init__(self, folder: Path, kernels: str, quantization: str) -> None:
        checkpoint = open_checkpoint(str(folder))
        dtype = resolve_dtype("auto", checkpoint.config)
        config = EngineConfig(
            model=str(folder), device="cpu", block_size=BLOCK_SIZE, kernels=kernels, quantization=quantization
        )
        self._collectives = OneRank(0, 1, WINDOW, checkpoint.config["hidden_size"], dtype, "cpu")
        self._model = TransformerModel(checkpoint, config, 0, self._collectives, None, CPU, dtype)
        self._blocks = tuple(BlockId(block) for block in range(WINDOW // BLOCK_SIZE))
        self._model.load(len(self._blocks), lambda done, total: None)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Fp32 [T, V], memory of their own."""
        seq = self._model.alloc_sequence(Slot(0))
        blocks = self._blocks[: -(-len(token_ids) // BLOCK_SIZE)]
        seq.block_table.extend(blocks)
        self._collectives.begin(len(token_ids), self._model.num_reductions())
        logits_TV = self._model.prefill_chunk(Span(Slot(0), 0, tuple(token_ids), blocks, Logits.ALL), seq)
        self._model.free_sequence(seq)
        assert logits_TV is not None, "rank 0 has the output head"
        return logits_TV.clone()


def _windows(folder: Path, num_tokens: int) -> Iterator[list[int]]:
    from transformers import AutoTokenizer

    text = TEXT.read_text(encoding="utf-8")
    token_ids = AutoTokenizer.from_pretrained(str(folder), local_files_only=True).encode(text)[:num_tokens]
    yield from (token_ids[start : start + WINDOW] for start in range(0, len(token_ids) - 1, WINDOW))


def _loss(logits_TV: torch.Tensor, token_ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits_TV[:-1], torch.tensor(token_ids[1:]), reduction="sum"))


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    found = compare(options.model or ensure_demo_checkpoint(), options.tokens, options.kernels)
    print("| tokens | perplexity | int8 | change | largest difference of a logit | same first choice |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {found.num_tokens} | {found.plain_perplexity:.3f} | {found.perplexity:.3f} | {found.relative_change:+.2%} "
        f"| {found.largest_difference:.3f} | {found.same_choice:.1%} |"
    )


if __name__ == "__main__":
    main()
