# SPDX-License-Identifier: MIT OR Apache-2.0
"""How `metrale-ray generate` writes its answers: as text, or as one line of strict JSON for each prompt.

Rules: each answer is written out as soon as it is given, and a failed one is also told on standard error. Several
answers to one prompt have a line before each that says which it is. JSON has no NaN and no infinity.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from metrale_ray.serve.outputs import CompletionOutput, Logprob, RequestOutput


class AnswerWriter:
    """Writes answers in the order in which they are given. `has_text`: the checkpoint has a tokenizer."""

    def __init__(self, answers: TextIO, *, as_json: bool, has_text: bool) -> None:
        self.num_failed = 0
        self._answers = answers
        self._as_json = as_json
        self._has_text = has_text
        self._number = 0

    def write(self, result: RequestOutput) -> None:
        """Write the next prompt's answers."""
        lines = [json_line(self._number, result)] if self._as_json else self._plain(result)
        for line in lines:
            self._answers.write(line + "\n")
        self._answers.flush()
        self.num_failed += tell_failed(self._number, result)
        self._number += 1

    def _plain(self, result: RequestOutput) -> list[str]:
        lines = []
        for answer in result.outputs:
            if len(result.outputs) > 1:
                lines.append(f"--- prompt {self._number}, answer {answer.index} ---")
            lines.append(answer.text if self._has_text else ",".join(map(str, answer.token_ids)))
        return lines


def tell_failed(number: int, result: RequestOutput) -> int:
    """Say on standard error which answers to the prompt failed, and give their number."""
    failed = [answer for answer in result.outputs if answer.finish_reason == "error"]
    for answer in failed:
        which = f", answer {answer.index}" if len(result.outputs) > 1 else ""
        print(f"error: prompt {number}{which}: {answer.error}", file=sys.stderr)
    return len(failed)


def json_line(index: int, result: RequestOutput) -> str:
    """One prompt's answers. The fields beside "outputs" are those of the first."""
    first = result.outputs[0]
    line = {
        "index": index,
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "error": first.error,
        "usage": {
            "prompt_tokens": len(result.prompt_token_ids),
            "completion_tokens": sum(len(answer.token_ids) for answer in result.outputs),
        },
        **_scores(first),
    }
    if result.prompt_logprobs is not None:
        line["prompt_logprobs"] = _places(result.prompt_logprobs)
    line["outputs"] = [_answer(answer) for answer in result.outputs]
    return json.dumps(line, allow_nan=False)


def _answer(answer: CompletionOutput) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "error": answer.error,
        **_scores(answer),
    }


def _scores(answer: CompletionOutput) -> dict[str, Any]:
    if answer.logprobs is None:
        return {}
    return {"logprobs": _places(answer.logprobs), "cumulative_logprob": answer.cumulative_logprob}


def _places(entries: Sequence[dict[int, Logprob] | None]) -> list[list[dict[str, Any]] | None]:
    """For each place the token that is there, then the most likely ones; null where nothing is known."""
    return [None if entry is None else [_candidate(*item) for item in entry.items()] for entry in entries]


def _candidate(token_id: int, scored: Logprob) -> dict[str, Any]:
    return {"token_id": token_id, "token": scored.decoded_token, "logprob": scored.logprob, "rank": scored.rank}
