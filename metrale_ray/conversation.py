# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Conversation`: what has been said so far, kept short enough for the model's context.

Rules. A turn is a question and its answer. Where the whole does not fit, the oldest turns go first, never the system
message and never the newest question. A question without an answer is taken back, so that roles always alternate.

Leaves out: the layout of messages as tokens, which is the chat template's, and what to do with an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Message = dict[str, str]
CountTokens = Callable[[Sequence[Message]], int]

# Of the context, this part at most is kept free for the answer: more would forget turns that the model could still see.
ANSWER_SHARE = 4


class Conversation:
    """One conversation. `count_tokens` says how long messages are as a prompt; it may raise RequestError."""

    def __init__(self, system: str | None, count_tokens: CountTokens, max_prompt_tokens: int) -> None:
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[Message, Message]] = []
        self._question: Message | None = None
        self._count_tokens = count_tokens
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def messages(self) -> list[Message]:
        """All messages, oldest first: the prompt for the next answer."""
        said = [message for turn in self._turns for message in turn]
        return [*self._system, *said, *([self._question] if self._question is not None else [])]

    @property
    def num_turns(self) -> int:
        """Answered questions that are still known."""
        return len(self._turns)

    def ask(self, question: str) -> int:
        """Add a question, and forget as many turns as it takes for all to fit; their number. May raise RequestError."""
        self._question = {"role": "user", "content": question}
        num_forgotten = 0
        try:
            while self._count_tokens(self.messages) > self._max_prompt_tokens and self.forget_oldest():
                num_forgotten += 1
        except BaseException:
            self.take_back()
            raise
        return num_forgotten

    def forget_oldest(self) -> bool:
        """Drop the oldest turn; False when there is none."""
        if not self._turns:
            return False
        del self._turns[0]
        return True

    def answer(self, text: str) -> None:
        """Keep the open question with its answer."""
        if self._question is not None:
            self._turns.append((self._question, {"role": "assistant", "content": text}))
            self._question = None

    def take_back(self) -> None:
        """Forget the open question."""
        self._question = None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._turns.clear()
        self._question = None


def max_prompt_tokens(max_model_len: int, max_tokens: int | None) -> int:
    """Tokens that a prompt may have, so that there is room for an answer; at least 1."""
    share = max_model_len // ANSWER_SHARE
    return max(1, max_model_len - (share if max_tokens is None else min(max_tokens, share)))
