# SPDX-License-Identifier: MIT OR Apache-2.0
"""An answer that is content from its beginning to its end."""

from __future__ import annotations

from metrale_ray.serve.parsing.pieces import Piece


class Plain:
    """An `OutputParser` that changes nothing."""

    has_calls = False
    has_cut_call = False

    def push(self, text: str) -> Piece:
        """All of it is content."""
        return Piece(content=text)

    def flush(self) -> Piece:
        """Nothing is held back."""
        return Piece()
