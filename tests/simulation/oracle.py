# SPDX-License-Identifier: MIT OR Apache-2.0
"""The oracle: what each entry of the catalogue must answer.

It is what an engine of one rank gives each entry alone, without faults, fronts and a network, with room for all of it.
An answer that may have fewer tokens is a part of that one. The answers are kept in a file beside the model, so that
other processes need not find them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from metrale_ray.grammar.grammars import Grammars
from metrale_ray.sampling.logprobs import TokenLogprobs
from metrale_ray.sampling.token_params import TokenParams
from tests.harness import Answer, Driver, run_engine
from tests.simulation.catalogue import MAX_TOKENS, Entry, catalogue
from tests.simulation.tiny_model import END, VOCAB_SIZE

FILE = "answers.json"

NUM_IDS = 40
"""More requests than one life of an engine has: an entry without a seed has an answer for each id that it may get."""


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

    def answer(self, entry: int, index: int, max_tokens: int, found: tuple[int, ...] = ()) -> Expected:
        """What sequence `index` of an entry must answer when it may have `max_tokens` tokens.

        Of an entry without a seed it is the answer that begins with `found`, if there is one. Which seed a request had
        is the ledger's to check.
        """
        answers = self._answers[entry][index :: ENTRIES[entry].n]
        expected = next((each for each in answers if each.token_ids[: len(found)] == found), answers[0])
        return expected.within(max_tokens)


def derived_seed(engine_seed: int, request_id: int) -> int:
    """What a request without a seed gets; `request_id` is its first sequence's."""
    return int.from_bytes(hashlib.blake2b(b"%d:%d" % (engine_seed, request_id), digest_size=8).digest(), "little")


ENTRIES = catalogue()


def _find(folder: Path, entries: Sequence[Entry]) -> list[list[Expected]]:
    grammars = Grammars(folder, VOCAB_SIZE, [END])
    numbers: list[list[int]] = [[] for _ in entries]

    def script(driver: Driver) -> None:
        for entry, of_entry in zip(entries, numbers, strict=True):
            for params in _seeded(entry):
                constraint = None if params.grammar is None else grammars.compile(params.grammar)
                of_entry.append(driver.submit(entry.prompt, params, constraint=constraint))
                driver.run()  # alone

    outcome = run_engine(folder, script, max_batch_size=4, block_size=16)
    return [
        [_expected(outcome.answers[number + index]) for number in of_entry for index in range(entry.n)]
        for of_entry, entry in zip(numbers, entries, strict=True)
    ]


def _seeded(entry: Entry) -> list[TokenParams]:
    """Its parameters, with each seed that they may get."""
    params = entry.params(MAX_TOKENS)
    if entry.has_own_seed:
        return [params]
    return [replace(params, seed=derived_seed(0, number)) for number in range(NUM_IDS)]


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
