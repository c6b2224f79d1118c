# SPDX-License-Identifier: MIT OR Apache-2.0
"""`SchedulerLimits`: everything that bounds what the scheduler may plan.

Rules: frozen, checked once, the same numbers that the handshake compared. Nothing else limits a plan, except the row
limit, which failed steps may lower while the scheduler runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from metrale_ray.errors import ConfigError

MAX_PROMPT_LOGITS = 64
"""Rows of prompt logits of one step. 64 rows of a vocabulary of 152,000 are 39 MB in fp32; a whole prompt of 4,096
tokens would be 2.5 GB beside the weights. They are reduced step by step, so a longer prompt only takes more steps."""

MAX_WAITING_PROMPT_TOKENS = 2**25
"""Prompt tokens of all requests that wait. 36 bytes each at most, as Python's integers are, so 1.2 GB in all: 256
prompts of 131,072 tokens, or 10,000 of 3,355."""

_COUNTS = (
    "max_batch_size",
    "max_model_len",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "max_queue_len",
    "max_prompt_logits",
    "max_waiting_prompt_tokens",
)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of one engine. Raises ConfigError when a number is out of range.

    `max_batch_size`: slots. `max_model_len`: tokens of one sequence, prompt and answer. `max_num_batched_tokens`:
    tokens of one step. `num_blocks` of `block_size` tokens: the KV cache. `watermark`: the share of the blocks that
    an admission leaves free. `max_queue_len`: requests that wait. `mixed_steps`: whether one step may hold several
    prompt chunks, or chunks beside decode rows. `resume_protection_tokens`: how many tokens a resumed sequence
    generates before it may be preempted again. `max_prompt_logits`: prompt positions of one step that give logits.
    `max_waiting_prompt_tokens`: of all requests that wait together; the sequences of one request share their prompt.
    """

    max_batch_size: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int
    watermark: float = 0.01
    max_queue_len: int = 10_000
    mixed_steps: bool = True
    resume_protection_tokens: int = 64  # four blocks of 16: enough to be worth the prefill that resuming cost
    max_prompt_logits: int = MAX_PROMPT_LOGITS
    max_waiting_prompt_tokens: int = MAX_WAITING_PROMPT_TOKENS

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _at_least(1, name, getattr(self, name))
        _at_least(0, "resume_protection_tokens", self.resume_protection_tokens)
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark!r}; it must be a share of the blocks, from 0 to below 1")

    @property
    def max_rows(self) -> int:
        """Rows of one step at most: each row has a slot of its own and at least one token."""
        return min(self.max_batch_size, self.max_num_batched_tokens)

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free while other sequences run."""
        return int(self.watermark * self.num_blocks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.num_blocks * self.block_size


def _at_least(lowest: int, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {lowest}")
