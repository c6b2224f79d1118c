# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Answers`: the n answers to one prompt as they grow, and what the prompt's own tokens scored."""

from __future__ import annotations

from metrale_ray.protocol.front import Output
from metrale_ray.serve.completion import Completion
from metrale_ray.serve.deltas import Delta
from metrale_ray.serve.logprobs import logprob_entry
from metrale_ray.serve.outputs import Logprob, RequestOutput
from metrale_ray.serve.prompts import PromptRequest
from metrale_ray.serve.text import Tokenizer


class Answers:
    """One `Completion` for each sequence of a request."""

    def __init__(self, request_id: str, request: PromptRequest, tokenizer: Tokenizer | None) -> None:
        self._request_id = request_id
        self._request = request
        self._tokenizer = tokenizer
        self._prompt_token_ids = list(request.token_ids)
        params, stops = request.params, request.stops
        self._completions = [
            Completion(tokenizer, params, stops, request.token_ids, index) for index in range(params.n)
        ]
        self._has_news = False  # tokens or an end since the last snapshot or delta
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]  # nothing comes before the first token
        self._are_scores_told = params.prompt_logprobs is None

    @property
    def has_news(self) -> bool:
        """Whether there are new tokens or an end. What the prompt's tokens scored is told no later than the first."""
        return self._has_news and (self._are_scores_told or self._has_scores or self._completions[0].has_ended)

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(completion.has_ended for completion in self._completions)

    def push(self, output: Output) -> bool:
        """Take one output of the head. True: a stop string has ended its sequence, and the head does not know yet."""
        self._has_news |= bool(output.token_ids) or output.finish_reason is not None
        self._prompt_logprobs += [logprob_entry(scored, self._tokenizer) for scored in output.prompt_logprobs]
        if output.is_refusal and output.error is not None:
            self.refuse(*output.error)
        return self._completions[output.index].push(output)

    def refuse(self, code: str, message: str) -> None:
        """End all answers that have not ended with an error."""
        for completion in self._completions:
            completion.refuse(code, message)

    def snapshot(self) -> RequestOutput:
        """What there is so far. Later tokens do not change it; each `delta` is new since the last snapshot."""
        self._has_news = False
        is_scored = self._request.params.prompt_logprobs is not None
        return RequestOutput(
            self._request_id,
            self._request.text,
            self._prompt_token_ids,
            [completion.snapshot() for completion in self._completions],
            self.finished,
            self._prompt_logprobs if is_scored and self._has_scores else None,
        )

    def delta(self) -> Delta:
        """What is new since the last one. Whoever takes deltas takes no snapshots."""
        self._has_news = False
        scores = self._prompt_logprobs if self._has_scores and not self._are_scores_told else None
        self._are_scores_told |= scores is not None
        news = [completion.delta() for completion in self._completions if completion.has_news]
        return Delta(news, self.finished, scores)

    @property
    def _has_scores(self) -> bool:
        """Whether each token of the prompt has its entry."""
        return len(self._prompt_logprobs) == len(self._prompt_token_ids)
