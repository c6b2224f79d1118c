# SPDX-License-Identifier: MIT OR Apache-2.0
"""The oracle: what each entry of the catalogue must answer.

It is what an engine of one rank gives each entry alone, without faults, fronts and a network, with room for all of it.
An answer that may have fewer tokens is a part of that one. The answers are kept in a file beside the model, so that
other processes need not find them again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from metrale_ray.grammar.grammars import Grammars
from metrale_ray.sampling.logprobs import TokenLogprobs
from tests.harness import Answer, Driver, run_engine
from tests.simulation.catalogue import MAX_TOKENS, Entry, catalogue
from tests.simulation.tiny_model import END, VOCAB_SIZE

FILE = "answers.json"


@dataclass(frozen=True, slots=True)
class Expected:
    """What one sequence must answer: its tokens, how it ends, and what is told of its tokens and its prompt."""

    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()

    def within(self, max_tokens: int) -> Expected:
        """The same answer where only so many tokens are allowed."""
        if len(self.token_ids) <= max_tokens:
            return self
        return Expected(self.token_ids[:max_tokens], "length", self.logprobs[:max_tokens], self.prompt_logprobs)


class Oracle:
    """The answers for the model in `folder`, by index in the catalogue and by sequence."""

    def __init__(self, folder: Path) -> None:
        file = folder / FILE
        if not file.exists():
            answers = _find(folder, catalogue())
            file.write_text(json.dumps([[asdict(each) for each in of_entry] for of_entry in answers]))
        self._answers = [[_read(each) for each in of_entry] for of_entry in json.loads(file.read_text())]

    def answer(self, entry: int, index: int, max_tokens: int) -> Expected:
        """What sequence `index` of an entry must answer when it may have `max_tokens` tokens."""
        return self._answers[entry][index].within(max_tokens)


def _find(folder: Path, entries: Sequence[Entry]) -> list[list[Expected]]:
    grammars = Grammars(folder, VOCAB_SIZE, [END])
    numbers: list[int] = []

    def script(driver: Driver) -> None:
        for entry in entries:
            params = entry.params(MAX_TOKENS)
            constraint = None if params.grammar is None else grammars.compile(params.grammar)
            numbers.append(driver.submit(entry.prompt, params, constraint=constraint))
            driver.run()  # alone

    outcome = run_engine(folder, script, max_batch_size=4, block_size=16)
    return [
        [_expected(outcome.answers[number + index]) for index in range(entry.n)]
        for number, entry in zip(numbers, entries, strict=True)
    ]


def _expected(answer: Answer) -> Expected:
    if answer.finish_reason not in ("stop", "length"):
        raise AssertionError(f"an entry of the catalogue has no answer: {answer}")
    return Expected(
        tuple(answer.token_ids), answer.finish_reason, _values(answer.logprobs), _values(answer.prompt_logprobs)
    )


def _values(logprobs: Sequence[TokenLogprobs]) -> tuple[float, ...]:
    return tuple(each.logprob for each in logprobs)


def _read(kept: dict[str, object]) -> Expected:
    return Expected(**{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()})  # type: ignore[arg-type]
