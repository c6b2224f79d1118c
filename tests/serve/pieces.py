# SPDX-License-Identifier: MIT OR Apache-2.0
"""A tokenizer whose tokens are whatever texts a test gives: token i is the i-th of them, and a text their chain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from metrale_ray.protocol.front import Output
from metrale_ray.serve.completion import Completion
from metrale_ray.serve.outputs import CompletionOutput
from metrale_ray.serve.text import Tokenizer


class Pieces:
    """What `Tokenizer` uses of one of transformers. `special` are the ids of special tokens."""

    is_fast = False
    chat_template = None
    eos_token_id = None

    def __init__(self, pieces: Sequence[str], special: Sequence[int] = ()) -> None:
        self.pieces = list(pieces)
        self.all_special_ids = list(special)

    def __len__(self) -> int:
        return len(self.pieces)

    def get_vocab(self) -> dict[str, int]:
        return {f"piece {index}": index for index in range(len(self.pieces))}

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.pieces[token_id] if token_id < len(self.pieces) else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, **more: Any) -> str:
        hidden = self.all_special_ids if skip_special_tokens else []
        return "".join(self.pieces[token_id] for token_id in token_ids if token_id not in hidden)


def piece_tokenizer(pieces: Sequence[str], special: Sequence[int] = ()) -> Tokenizer:
    """A tokenizer of these pieces; the special ones end a text."""
    return Tokenizer(Pieces(pieces, special), special)


def cut(whole: Any, cuts: Sequence[int]) -> list[Any]:
    """`whole` in parts, cut at the places of `cuts` that are within it."""
    edges = [0, *sorted(min(place, len(whole)) for place in cuts), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


def feed(completion: Completion, outputs: Sequence[Output]) -> list[CompletionOutput]:
    """Push outputs until the text has ended, and give every answer seen."""
    seen = []
    for output in outputs:
        completion.push(output)
        seen.append(completion.snapshot())
    return seen


def outputs_of(
    parts: Sequence[Sequence[int]], reason: str = "length", stop_token_id: int | None = None
) -> list[Output]:
    """One output for each part, the last one with `reason`."""
    return [
        Output(0, 0, tuple(part), reason if last else None, stop_token_id if last else None)  # type: ignore[arg-type]
        for part, last in ((part, place == len(parts) - 1) for place, part in enumerate(parts))
    ]
