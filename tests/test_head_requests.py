# SPDX-License-Identifier: MIT OR Apache-2.0
"""Requests of fronts at the head: several sequences, their ends one by one, deadlines, refusals, and fronts that go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.errors import EngineDead
from metrale_ray.protocol.front import FrontClient, Output, RequestHandle, Submit
from metrale_ray.protocol.front.frames import MAX_OUTPUT_LOGPROBS, encode
from metrale_ray.sampling.token_params import TokenParams
from metrale_ray.scheduler.limits import MAX_PROMPT_LOGITS
from tests.fixtures.succ import write_succ
from tests.fixtures.tiny import VOCAB_SIZE
from tests.test_head import GREEDY, LONG, TIMEOUT_S, Process, running, tokens_of, until

FOUR = TokenParams(n=4, temperature=0, max_tokens=3000, ignore_eos=True, prompt_logprobs=0, presence_penalty=-0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_succ(tmp_path_factory.mktemp("succ"))


def chain(start: int, length: int) -> list[int]:
    return [(start + step) % VOCAB_SIZE for step in range(1, length + 1)]


def all_of(handle: RequestHandle, n: int) -> list[list[Output]]:
    """The outputs of each of `n` sequences, to the end of all."""
    found: list[list[Output]] = [[] for _ in range(n)]
    read_until(handle, found, lambda: None not in ends(found))
    return found


def read_until(handle: RequestHandle, found: list[list[Output]], is_enough: Callable[[], bool]) -> None:
    while not is_enough():
        output = handle.get(TIMEOUT_S)
        found[output.index].append(output)


def ends(found: list[list[Output]]) -> list[str | None]:
    return [outputs[-1].finish_reason if outputs else None for outputs in found]


def is_at_rest(process: Process) -> bool:
    stats, head = process.call(process.head.stats()), process.head
    is_free = (stats["running"], stats["waiting"], stats["free_blocks"]) == (0, 0, stats["total_blocks"])
    assert head._engine is not None
    return is_free and not (len(head._desk.clients) or head._engine._live)


def assert_nothing_left(process: Process, client: FrontClient) -> None:
    """The request comes after all that the client has said, so what is left then was left behind."""
    assert tokens_of(client.submit([7], GREEDY)) == chain(7, 8)
    until(lambda: is_at_rest(process))


def test_each_sequence_of_a_request_comes_with_its_own_number_and_its_own_end(model: Path) -> None:
    with running(model) as (process, client):
        params = TokenParams(n=3, temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        found = all_of(client.submit([3, 4, 5], params), 3)
        for outputs in found:
            assert [token_id for output in outputs for token_id in output.token_ids] == chain(5, 5)
            assert [len(output.logprobs) for output in outputs] == [len(output.token_ids) for output in outputs]
            assert all(
                each.token_id == token_id and each.rank == 1 and each.top_ids[0] == token_id
                for output in outputs
                for token_id, each in zip(output.token_ids, output.logprobs, strict=True)
            )
        prompts = [[each.token_id for output in outputs for each in output.prompt_logprobs] for outputs in found]
        assert prompts == [[4, 5], [], []]
        assert ends(found) == ["length"] * 3
        assert_nothing_left(process, client)


def test_one_sequence_is_finished_and_the_others_go_on_until_all_are_aborted(model: Path) -> None:
    with running(model) as (process, client):
        handle = client.submit([5], FOUR)
        handle.get(TIMEOUT_S)
        handle.finish(2)
        seen: list[list[Output]] = [[] for _ in range(4)]
        read_until(handle, seen, lambda: "stop" in ends(seen))
        assert ends(seen) == [None, None, "stop", None]
        handle.abort()
        read_until(handle, seen, lambda: None not in ends(seen))
        assert ends(seen) == ["abort", "abort", "stop", "abort"]
        assert_nothing_left(process, client)


def test_what_a_step_gives_a_prompt_fits_into_one_output() -> None:
    assert MAX_PROMPT_LOGITS <= MAX_OUTPUT_LOGPROBS


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_past_its_timeout_ends_with_its_tokens_so_far(model: Path, waits: bool) -> None:
    with running(model, max_batch_size=1 if waits else 4) as (process, client):
        others = client.submit([200], LONG)
        others.get(TIMEOUT_S)
        handle = client.submit([5], FOUR, timeout_s=0.2)
        found = all_of(handle, 4)
        for outputs in found:
            error = outputs[-1].error
            assert error is not None
            assert error[0] == "deadline_exceeded"
            assert not outputs[-1].is_refusal
            tokens = [token_id for output in outputs for token_id in output.token_ids]
            assert tokens == chain(5, len(tokens))
            assert not (tokens and waits)
        others.abort()
        assert_nothing_left(process, client)
        assert process.call(process.head.stats())["expired_requests"] == 4


@pytest.mark.parametrize(
    ("prompt", "params", "code", "text"),
    [
        ([1] * 4001, TokenParams(n=3), "context_length_exceeded", "the prompt has 4001 tokens"),
        ([1, VOCAB_SIZE], TokenParams(n=3), "invalid_request", "prompt_token_ids holds 320"),
        ([1], TokenParams(n=3, logit_bias={VOCAB_SIZE: 1}), "invalid_request", "logit_bias holds 320"),
        ([1], TokenParams(n=9), "invalid_request", "n is 9; at most 8"),
        ([], TokenParams(n=2), "empty_prompt", "the prompt has 0 tokens"),
    ],
    ids=["too-long", "prompt", "bias", "queue", "empty"],
)
def test_a_request_is_refused_whole_and_once(
    model: Path, prompt: list[int], params: TokenParams, code: str, text: str
) -> None:
    with running(model, ep_size=1, max_queue_len=8) as (process, client):
        handle = client.submit(prompt, params)
        refused = handle.get(TIMEOUT_S)
        assert refused.is_refusal
        assert refused.error is not None
        assert refused.error[0] == code
        assert text in refused.error[1]
        assert not client._handles
        assert_nothing_left(process, client)


def test_a_front_that_uses_a_number_twice_is_dropped_and_told_so_while_others_go_on(model: Path) -> None:
    with running(model, ep_size=1) as (process, client), process.front() as faulty:
        mine = client.submit([9], LONG)
        handle = faulty.submit([5], LONG)
        handle.get(TIMEOUT_S)
        faulty._connection.send(encode(Submit(handle.request_id, (9,), GREEDY)))
        with pytest.raises(EngineDead, match=f"it sent request {handle.request_id} again, which has not ended"):
            tokens_of(handle)
        until(lambda: process.call(process.head.stats())["running"] == 1)
        mine.abort()
        assert_nothing_left(process, client)


def at_once(client: FrontClient) -> None:
    client.submit([1, 2, 3], FOUR).abort()


def after_the_first_output(client: FrontClient) -> None:
    handle = client.submit([1, 2, 3], FOUR)
    handle.get(TIMEOUT_S)
    handle.abort()


def while_queued(client: FrontClient) -> None:
    running_one = client.submit([1], FOUR)
    running_one.get(TIMEOUT_S)
    queued = client.submit([2], FOUR)
    queued.abort()
    running_one.abort()


def within_the_prompt(client: FrontClient) -> None:
    handle = client.submit(list(range(300)), FOUR)
    assert handle.get(TIMEOUT_S).prompt_logprobs  # of the first chunk
    handle.abort()


def one_by_one(client: FrontClient) -> None:
    handle = client.submit([1, 2], FOUR)
    for index in (3, 1, 0, 2):
        handle.get(TIMEOUT_S)
        handle.finish(index)


PHASES: list[Callable[[FrontClient], None]] = [
    at_once,
    after_the_first_output,
    while_queued,
    within_the_prompt,
    one_by_one,
]


@pytest.mark.parametrize("leaves", [False, True], ids=["aborts", "leaves"])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_whatever_goes_away_in_whatever_phase_gives_everything_back(
    model: Path, phase: Callable[[FrontClient], Any], leaves: bool, scale: int
) -> None:
    settings = {"max_num_batched_tokens": 16, "max_batch_size": 4, "block_size": 4}
    with running(model, **settings) as (process, client):
        for _ in range(2 * scale):
            with process.front() as leaving:
                leaving.wait_opened(TIMEOUT_S)
                phase(leaving if leaves else client)
                if leaves:
                    leaving.submit([9], FOUR).get(TIMEOUT_S)
            assert_nothing_left(process, client)
