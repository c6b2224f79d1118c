# SPDX-License-Identifier: MIT OR Apache-2.0
"""`ModelFiles`: a checkpoint as whoever starts an engine needs it: found, checked, and with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metrale_ray.config import EngineConfig
from metrale_ray.model.checkpoint import open_checkpoint
from metrale_ray.model.weights import plan_weights, read_decoder_config
from metrale_ray.serve.text import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`max_model_len`: tokens of one sequence, prompt and answer. `tokenizer`: None where the checkpoint has none."""

    path: Path
    max_model_len: int
    tokenizer: Tokenizer | None


def open_model(config: EngineConfig) -> ModelFiles:
    """Look at the checkpoint of `config`, and refuse what cannot be served before anything is started.

    Raises CheckpointError and ConfigError.
    """
    checkpoint = open_checkpoint(config.model, config.revision)
    decoder = read_decoder_config(checkpoint)
    plan_weights(checkpoint, decoder, 0, config.ep_size)
    return ModelFiles(checkpoint.path, config.max_model_len or decoder.max_positions, load_tokenizer(checkpoint.path))
