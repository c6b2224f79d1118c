# SPDX-License-Identifier: MIT OR Apache-2.0
"""What must hold of a run of the simulation when it has ended: `violations(...)` lists what does not.

- Each sequence of each request got exactly one end, unless its front went or its session broke.
- Its tokens are the oracle's, to their end; with an abort, a stop of its front's, a deadline or an error of its own,
  they are the first of the oracle's.
- Only what is allowed was refused, for the reason that it has; and what cannot be served was.
- A life ends as its faults allow, and without a violent fault it does not fail. What ends is told to everybody.
- After a life that ended well nothing is held anywhere.

What is checked at each command is in `ledger`; frames of other epochs are looked for in `watch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import Output
from tests.simulation.faults import FrameFault, Partition, ProcessFault
from tests.simulation.oracle import Expected, Oracle
from tests.simulation.schedule import (
    FINE,
    SHORT_STOP_S,
    EngineFault,
    Fault,
    blamed_ranks,
    ends_of,
    is_violent,
    must_end,
)
from tests.simulation.workload import Ask, Life, Workload

TOLERANCE = 1e-3
"""Of log probabilities: sums over other rows and ranks differ in the last bits."""


@dataclass(slots=True)
class Got:
    """What the front of one request saw: every output for it, and how its wait ended.

    `outputs` are all that reached the front's client, those too that it lets go; `read` those that its reader got.
    `error` is what the reader got in the end where that was no output. `is_over`: the reader came to an end at all.
    `session`: in which of its front's sessions it was asked for, from 0.
    """

    ask: Ask
    outputs: list[Output] = field(default_factory=list)
    read: list[Output] = field(default_factory=list)
    session: int = 0
    error: BaseException | None = None
    is_sent: bool = False
    is_over: bool = False


@dataclass(slots=True)
class LifeResult:
    """How one life went. `end`: "fine", "killed", or the code of what ended the engine; `message` and `rank` are its
    words and whom it blames."""

    number: int
    end: str
    message: str
    got: list[Got]
    fired: tuple[Fault, ...] = ()
    complaints: list[str] = field(default_factory=list)
    num_preemptions: int = 0
    rank: int | None = None


def violations(workload: Workload, oracle: Oracle, results: Sequence[LifeResult]) -> list[str]:
    """One line for each thing that is wrong; none when all is well."""
    found: list[str] = []
    for life, result in zip(workload.lives, results, strict=True):
        lines = [*result.complaints, *_end(result, workload.ep_size)]
        for got in result.got:
            where = f"request {result.got.index(got)} ({got.ask.of.name}) of front {got.ask.front}"
            lines += [f"{where}: {line}" for line in _answer(got, workload, life, oracle, result)]
        found += [f"life {result.number}: {line}" for line in lines]
    return found


# A life's end ------------------------------------------------------------------------------------------------------


def _end(result: LifeResult, ep_size: int) -> Iterator[str]:
    allowed = FINE.union(*(ends_of(fault) for fault in result.fired))
    if result.end not in allowed:
        yield f"it ended with {result.end} ({result.message}); its faults allow {sorted(allowed)}"
    blamed = [blamed_ranks(fault) for fault in result.fired if is_violent(fault)]
    if result.rank is not None and None not in blamed and result.rank not in frozenset().union(*filter(None, blamed)):
        yield f"it blames rank {result.rank} ({result.message}); its faults are of {blamed}"
    for fault in result.fired:
        if must_end(fault, ep_size) and result.end == "fine":
            yield f"it went on, and should have ended by {fault}"


# An answer ---------------------------------------------------------------------------------------------------------


def _answer(got: Got, workload: Workload, life: Life, oracle: Oracle, result: LifeResult) -> Iterator[str]:
    if not got.is_sent:
        return
    may_break = result.end != "fine" or _front_may_break(got, life, result.fired)
    refusals = [output for output in got.outputs if output.is_refusal]
    if refusals:
        yield from _refusal(got, refusals, workload, result)
        return
    impossible = refusal_of(got.ask, workload)
    for index in range(got.ask.of.n):
        outputs = [output for output in got.outputs if output.index == index]
        max_tokens = _most_tokens(got.ask, workload)
        found = tuple(token for output in outputs for token in output.token_ids)
        expected = oracle.answer(got.ask.entry, index, max(max_tokens, 0), found)
        for line in _sequence(got, index, outputs, expected, result, may_break):
            yield f"sequence {index}: {line}"
        if impossible and any(output.token_ids for output in outputs):
            yield f"sequence {index}: it has tokens, and should have been refused with {impossible}"
    if got.read != got.outputs[: len(got.read)] or (got.is_over and len(got.read) < len(got.outputs)):
        yield f"its reader got {len(got.read)} outputs, {got.read}, of those that came, {got.outputs}"
    if not got.is_over:
        if not may_break:
            yield "its reader never came to an end"
    elif got.error is not None and not (isinstance(got.error, EngineDead) and may_break):
        yield f"its reader got {got.error!r}"


def _most_tokens(ask: Ask, workload: Workload) -> int:
    """How many tokens it may have; the longest is no longer than the oracle's answers where it names no limit."""
    if ask.max_tokens is None:
        return workload.longest - len(ask.of.prompt)
    return min(ask.max_tokens, workload.max_model_len - len(ask.of.prompt))


def _sequence(
    got: Got, index: int, outputs: Sequence[Output], expected: Expected, result: LifeResult, may_break: bool
) -> Iterator[str]:
    tokens = tuple(token for output in outputs for token in output.token_ids)
    ends = [output for output in outputs if output.finish_reason is not None]
    if len(ends) > 1:
        yield f"it got {len(ends)} ends: {[end.finish_reason for end in ends]}"
    if tokens != expected.token_ids[: len(tokens)]:
        yield f"it got {tokens} instead of {expected.token_ids}"
    if ends and outputs[-1] is not ends[0]:
        yield "it got something after its end"
    yield from _logprobs(outputs, expected, len(tokens))
    if not ends:
        if not may_break:
            yield "it got no end"
        return
    yield from _ending(got, index, ends[0], tokens, expected, result)


def _ending(
    got: Got, index: int, end: Output, tokens: tuple[int, ...], expected: Expected, result: LifeResult
) -> Iterator[str]:
    ask, reason = got.ask, end.finish_reason
    is_whole = reason == expected.finish_reason and tokens == expected.token_ids
    is_stopped = reason == "stop" and ask.then == "finish" and ask.index == index
    if reason == "error":
        yield from _error(ask, end.error[0] if end.error else "", result)
    elif reason == "abort":
        if ask.then != "abort":
            yield "it was aborted, and nobody asked for that"
    elif not is_whole and not is_stopped:
        yield f"it ended by {reason} after {tokens}; it must end by {expected.finish_reason} after {expected.token_ids}"


def _error(ask: Ask, code: str, result: LifeResult) -> Iterator[str]:
    of_faults = {
        {"fail": "command_failed", "poison": "slot_poisoned"}.get(fault.kind, "")
        for fault in result.fired
        if isinstance(fault, EngineFault) and fault.first_token in (None, ask.of.prompt[0])
    }
    allowed = of_faults | ({"deadline_exceeded"} if ask.timeout_s is not None else set())
    if code not in allowed:
        yield f"it got the error {code}; allowed are {sorted(allowed)}"


def _logprobs(outputs: Sequence[Output], expected: Expected, num_tokens: int) -> Iterator[str]:
    values = [each.logprob for output in outputs for each in output.logprobs]
    of_prompt = [each.logprob for output in outputs for each in output.prompt_logprobs]
    if not _close(values, expected.logprobs[:num_tokens]):
        yield f"its log probabilities are {values}, not {expected.logprobs[:num_tokens]}"
    whole = expected.prompt_logprobs if num_tokens else expected.prompt_logprobs[: len(of_prompt)]
    if not _close(of_prompt, whole):
        yield f"its prompt's log probabilities are {of_prompt}, not {whole}"


def _close(found: Sequence[float], expected: Sequence[float]) -> bool:
    return len(found) == len(expected) and all(abs(a - b) <= TOLERANCE for a, b in zip(found, expected, strict=True))


# A refusal ---------------------------------------------------------------------------------------------------------


def refusal_of(ask: Ask, workload: Workload) -> str | None:
    """The code with which a request is refused that these settings can never serve."""
    num_prompt = len(ask.of.prompt)
    if num_prompt + 1 > workload.max_model_len:
        return "context_length_exceeded"
    if num_prompt + _most_tokens(ask, workload) - 1 > workload.num_blocks * workload.block_size:
        return "kv_cache_exceeded"
    return "invalid_request" if ask.of.n > workload.max_queue_len else None


def _refusal(got: Got, refusals: Sequence[Output], workload: Workload, result: LifeResult) -> Iterator[str]:
    if len(got.outputs) > 1:
        yield f"it was refused and got {len(got.outputs)} outputs"
    code = refusals[0].error[0] if refusals[0].error else ""
    asked = sum(each.ask.of.n for each in result.got)
    allowed = {refusal_of(got.ask, workload)} | ({"queue_full"} if asked > workload.max_queue_len else set())
    if "grammar" in got.ask.of.fields and _is_head_held_up(result.fired):
        allowed |= {"invalid_grammar", "queue_full"}  # compiling took too long
    if code not in allowed:
        yield f"it was refused with {code}; allowed are {sorted(map(str, allowed))}"


# Which fronts may lose their sessions --------------------------------------------------------------------------------


def _front_may_break(got: Got, life: Life, fired: Sequence[Fault]) -> bool:
    """Whether the front left the session, or something happened to it or to its way to the head that ends one."""
    name = f"front {got.ask.front}"
    leaves = [leave for leave in life.leaves if leave.front == got.ask.front]
    if any(leave.how != "reopen" or got.session == 0 for leave in leaves) or _is_head_held_up(fired):
        return True
    for fault in fired:
        match fault:
            case FrameFault():
                if name in (fault.sender, fault.receiver) and (fault.kind != "delay" or fault.amount >= SHORT_STOP_S):
                    return True
            case Partition():
                if name in (fault.a, fault.b) and fault.to_s - fault.from_s >= SHORT_STOP_S:
                    return True
            case ProcessFault():
                if fault.process == name and not _is_short(fault):
                    return True
    return False


def _is_head_held_up(fired: Sequence[Fault]) -> bool:
    return any(isinstance(fault, ProcessFault) and fault.process == "head" and not _is_short(fault) for fault in fired)


def _is_short(fault: ProcessFault) -> bool:
    return fault.kind == "stop" and fault.for_s is not None and fault.for_s < SHORT_STOP_S
