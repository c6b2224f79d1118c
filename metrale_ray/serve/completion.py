# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Completion`: from the head's outputs for one request to the text that its reader sees.

Rules: no part of a character and no part of a possible stop string is shown; a stop string ends the text for its
reader here, and the caller then tells the head. Without a tokenizer there are token ids and no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from metrale_ray.protocol.front import Output
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.outputs import CompletionOutput
from metrale_ray.serve.text import IncrementalDetokenizer, StopStrings, Tokenizer

# Tokens of the prompt that the text's beginning may depend on; a character takes at most a few.
CONTEXT_TOKENS = 8


class Completion:
    """One answer as it grows."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.stopped_by_string = False
        self._params = params
        self._output = CompletionOutput()
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            # Some tokenizers write a word's leading space only where something comes before it.
            self._detokenizer = IncrementalDetokenizer(tokenizer, context=prompt_token_ids[-CONTEXT_TOKENS:])
        self._stops = StopStrings(params.stop)

    def push(self, output: Output) -> CompletionOutput:
        """Take one output of the head and give the answer so far."""
        answer = self._output
        answer.token_ids.extend(output.token_ids)
        answer.delta = self._new_text(output)
        answer.text += answer.delta
        if not self.stopped_by_string and output.finish_reason is not None:
            answer.finish_reason = output.finish_reason
            if output.stop_token_id in self._params.stop_token_ids:  # the model's own end is no reason to name
                answer.stop_reason = output.stop_token_id
        if output.error is not None:
            answer.error_code, answer.error = output.error
        return answer

    def snapshot(self) -> CompletionOutput:
        """A copy of the answer so far, which later tokens do not change."""
        answer = self._output
        return CompletionOutput(
            answer.index,
            answer.text,
            list(answer.token_ids),
            answer.finish_reason,
            answer.stop_reason,
            answer.delta,
            answer.error,
            answer.error_code,
        )

    def _new_text(self, output: Output) -> str:
        if self._detokenizer is None:
            return ""
        token_ids = output.token_ids
        if output.stop_token_id is not None and token_ids and token_ids[-1] == output.stop_token_id:
            token_ids = token_ids[:-1]  # what ends the text is not part of it
        raw = self._detokenizer.push(token_ids)
        if output.finish_reason is not None:
            raw += self._detokenizer.flush()
        shown, found = self._stops.push(raw)
        if found is not None:
            self._end_at(found)
        elif output.finish_reason is not None:
            shown += self._stops.flush()
        return shown

    def _end_at(self, stop: str) -> None:
        self.stopped_by_string = True
        self._output.finish_reason = "stop"
        self._output.stop_reason = stop
