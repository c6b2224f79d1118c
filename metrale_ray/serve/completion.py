# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Completion`: from the head's outputs for one sequence to the text that its reader sees.

Rules. No part of a character is shown, and no part of a possible stop string, unless the stop string is wanted too. A
stop string ends the text for its reader here, and the caller then tells the head. What is given depends on the tokens
alone, not on how many came at once: nothing behind the token that completed a stop string is kept. A stop string that
is complete within the text of the first `min_tokens` tokens does not end it. Without a tokenizer there are token ids
and no text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from metrale_ray.errors import SessionError
from metrale_ray.protocol.front import Output
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.deltas import SequenceDelta
from metrale_ray.serve.logprobs import logprob_entry
from metrale_ray.serve.outputs import CompletionOutput
from metrale_ray.serve.stop_strings import StopAutomaton, StopStrings
from metrale_ray.serve.text import IncrementalDetokenizer, Tokenizer

# Tokens of the prompt that the text's beginning may depend on; a character takes at most a few.
CONTEXT_TOKENS = 8


class Completion:
    """One answer as it grows. `stops`: of the parameters' stop strings; all answers of a call share it."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        stops: StopAutomaton,
        prompt_token_ids: Sequence[int],
        index: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._output = CompletionOutput(index)  # what snapshots have given
        self._news = SequenceDelta(index)
        self._is_scored = params.logprobs is not None
        if self._is_scored:
            self._output.logprobs, self._output.cumulative_logprob = [], 0.0
        self.has_ended = False  # whether the answer is complete
        self._num_read = 0  # tokens whose text is in the answer, or held back
        self._num_characters = 0  # of their text, as far as it is certain
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            # Some tokenizers write a word's leading space only where something comes before it.
            context = prompt_token_ids[-CONTEXT_TOKENS:]
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, context)
        self._stops = StopStrings(stops, included=params.include_stop_str_in_output)

    def push(self, output: Output) -> bool:
        """Take one output of the head. True: a stop string has ended the text, and the head does not know it yet.

        Raises SessionError when the logprobs that were asked for are not there. After the end nothing is taken.
        """
        if self.has_ended:
            return False
        if self._is_scored and len(output.logprobs) != len(output.token_ids):
            raise SessionError(f"{len(output.logprobs)} logprobs came with {len(output.token_ids)} tokens")
        for place, token_id in enumerate(output.token_ids):
            if self._take_token(token_id, output, place):
                return output.finish_reason is None
        if output.finish_reason is not None:
            self._end(output)
        return False

    def refuse(self, code: str, message: str) -> None:
        """End an answer that the head does not give, unless it has ended."""
        self.push(Output(0, self._output.index, (), "error", None, (code, message)))

    @property
    def has_news(self) -> bool:
        """Whether anything is new since the last snapshot or delta."""
        return not self._news.is_empty

    def delta(self) -> SequenceDelta:
        """What is new since the last one. Whoever takes deltas takes no snapshots."""
        news, self._news = self._news, SequenceDelta(self._output.index)
        return news

    def snapshot(self) -> CompletionOutput:
        """A copy of the answer so far, which later tokens do not change; `delta` is new since the last snapshot."""
        answer, news = self._output, self.delta()
        delta = news.text
        answer.text += delta
        answer.token_ids += news.token_ids
        if answer.logprobs is not None and answer.cumulative_logprob is not None:
            for token_id, entry in zip(news.token_ids, news.logprobs, strict=True):
                answer.cumulative_logprob += entry[token_id].logprob
            answer.logprobs += news.logprobs
        if news.finish_reason is not None:
            answer.finish_reason, answer.stop_reason = news.finish_reason, news.stop_reason
            answer.error, answer.error_code = news.error, news.error_code
        logprobs = None if answer.logprobs is None else list(answer.logprobs)
        return dataclasses.replace(answer, token_ids=list(answer.token_ids), delta=delta, logprobs=logprobs)

    def _take_token(self, token_id: int, output: Output, place: int) -> bool:
        """Take one token; True when a stop string has ended the text with it."""
        news = self._news
        news.token_ids.append(token_id)
        if self._is_scored:
            news.logprobs.append(logprob_entry(output.logprobs[place], self._tokenizer))
            news.offsets.append(self._num_characters)
        is_end = output.stop_token_id is not None and place == len(output.token_ids) - 1
        if self._detokenizer is None or (is_end and not self._params.include_stop_str_in_output):
            news.texts.append("")
            return False  # what ends the text is not part of it
        # One at a time: which token completed a stop string must not depend on how many came at once.
        self._num_read += 1
        return self._add_text(self._detokenizer.push([token_id]), may_end=self._may_end)

    @property
    def _may_end(self) -> bool:
        """Whether a stop string may be complete in the text of the newest token."""
        return self._num_read > self._params.min_tokens

    def _add_text(self, text: str, *, may_end: bool) -> bool:
        """Show what can be shown; True when a stop string has ended the text."""
        self._num_characters += len(text)
        shown, stop = self._stops.push(text, may_end=may_end)
        self._news.texts.append(shown)
        if stop is not None:
            self._news.finish_reason, self._news.stop_reason = "stop", stop
            self.has_ended = True
        return stop is not None

    def _end(self, output: Output) -> None:
        """The head has ended the sequence: what was held back is shown, as far as it holds no stop string."""
        news = self._news
        is_whole = output.finish_reason in ("stop", "length")
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        if self._add_text(rest, may_end=is_whole and self._may_end):
            return
        news.texts.append(self._stops.flush())
        news.finish_reason, self.has_ended = output.finish_reason, True
        if output.stop_token_id in self._params.stop_token_ids:  # the model's own end is no reason to name
            news.stop_reason = output.stop_token_id
        if output.error is not None:
            news.error_code, news.error = output.error
