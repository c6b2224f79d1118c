# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Request` and `Sequence`: what a client asked for, and the head's view of one stream of tokens made for it.

Rules: a request never changes; its sequence is changed by the scheduler alone. A token is in `tokens` from the moment
it is sampled, and its KV row exists only once a later step has computed it, so `num_computed` is at most one less
than the number of tokens while the sequence decodes.

A client's request for n texts is n requests here, each with a sequence of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

from metrale_ray.protocol.commands import BlockId, Logits, Slot

RequestId = NewType("RequestId", int)

FinishReason = Literal["stop", "length", "abort", "error"]
"""How a sequence ended: at a stop token or string, at a limit, as its client wanted no more, or as it failed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its limits.

    `max_tokens` None means as many as the model's length and the KV cache allow. `stop_token_ids` includes the
    end-of-sequence ids unless the client ignores them. `prompt_logits_all` asks for the logits of every prompt
    position, each once, whatever preemptions come between. `priority` may be negative; lower goes first.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None
    stop_token_ids: frozenset[int] = frozenset()
    prompt_logits_all: bool = False
    priority: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens: prompt and generated tokens, its slot and blocks, and how far the ranks are.

    `tokens` is the request's own prompt until the first token is generated, so what waits costs no copy of it. At
    `max_length` tokens, prompt and generated, it ends. `slot` is None while it waits. `blocks` are owned, the first
    `num_blocks_shipped` of them are in the ranks' block tables. `num_computed` is the settled length on every rank.
    `num_prompt_logits` prompt positions have had their logits. `num_generated_at_resume` is None until it was
    preempted or started over once.
    """

    request: Request
    arrival: int
    max_length: int
    tokens: list[int] | tuple[int, ...]
    slot: Slot | None = None
    blocks: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    num_blocks_shipped: int = 0
    num_prompt_logits: int = 0
    num_generated_at_resume: int | None = None

    @property
    def request_id(self) -> RequestId:
        """The request that this sequence serves."""
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Its place among all sequences, the same for its whole life: lower goes first."""
        return self.request.priority, self.arrival

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether its next row is a decode row: exactly one token is left to compute, and something precedes it."""
        if self.num_computed != len(self.tokens) - 1 or self.num_computed == 0:
            return False
        return not self.request.prompt_logits_all or not self.wants_prompt_logits

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether the row at the settled length is a prompt position whose logits are still owed."""
        return self.request.prompt_logits_all and self.num_prompt_logits <= self.num_computed < self.num_prompt

    def append(self, token_id: int) -> None:
        """One token was generated."""
        if isinstance(self.tokens, tuple):
            self.tokens = list(self.tokens)
        self.tokens.append(token_id)

    def chunk_end(self, max_num_tokens: int) -> int:
        """Where a prompt chunk of at most `max_num_tokens` tokens ends.

        A chunk never holds both positions whose logits were given before a preemption and positions still owed.
        """
        end = min(self.num_computed + max_num_tokens, len(self.tokens))
        if self.request.prompt_logits_all and self.num_computed < self.num_prompt_logits < self.num_prompt:
            return min(end, self.num_prompt_logits)
        return end

    def logits_until(self, end: int) -> Logits:
        """Which logits a span from the settled length to `end` asks for."""
        if self.wants_prompt_logits:
            return Logits.ALL
        return Logits.LAST if end == len(self.tokens) else Logits.NONE

    def is_protected(self, num_tokens: int) -> bool:
        """Whether it was resumed and has generated fewer than `num_tokens` tokens since."""
        resumed_at = self.num_generated_at_resume
        return resumed_at is not None and self.num_generated - resumed_at < num_tokens

    def start_over(self) -> None:
        """Forget slot, blocks and KV rows, which the caller has released. The tokens stay, so none is sampled twice."""
        self.slot = None
        self.blocks = []
        self.num_computed = 0
        self.num_blocks_shipped = 0
        self.num_generated_at_resume = self.num_generated
