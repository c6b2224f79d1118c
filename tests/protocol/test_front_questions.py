# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front asks how the engine is: each question gets one answer, soon, whatever else the session carries."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from metrale_ray.errors import EngineDead, SessionError
from metrale_ray.protocol.front import server as server_module
from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.front.frames import encode
from metrale_ray.protocol.front.messages import Ask, Output, Outputs, Told
from metrale_ray.protocol.front.questions import Questions, read_document
from metrale_ray.protocol.front.server import FrontId
from metrale_ray.sampling.token_params import TokenParams
from tests.protocol.front_rig import WAIT_S, Rig, front_client, raw_front, running


@contextmanager
def asking() -> Iterator[tuple[Rig, FrontClient]]:
    """A head whose figures are the number of times that they were told, and a front."""
    numbers = itertools.count(1)
    with (
        running(figures=lambda: json.dumps({"times": next(numbers)})) as rig,
        front_client(rig.server.address) as client,
    ):
        client.wait_opened(WAIT_S)
        yield rig, client


def test_a_question_is_answered_from_a_thread_and_from_a_loop() -> None:
    with asking() as (_, client):
        assert client.ask(WAIT_S) == {"times": 1}
        assert asyncio.run(client.aask(WAIT_S)) == {"times": 2}
        assert len(client._questions) == 0


def test_many_questions_at_once_are_answered_together_and_few_times() -> None:
    with asking() as (_, client):

        async def ask_all() -> list[dict[str, int]]:
            return await asyncio.gather(*(client.aask(WAIT_S) for _ in range(200)))

        with ThreadPoolExecutor(8) as pool:
            of_threads = [pool.submit(client.ask, WAIT_S) for _ in range(8)]
            of_tasks = asyncio.run(ask_all())
            answers = of_tasks + [each.result(WAIT_S) for each in of_threads]
        assert len(answers) == 208
        assert max(answer["times"] for answer in answers) <= 20
        assert len(client._questions) == 0


def test_a_front_is_told_at_most_a_few_times_a_second_and_the_last_question_is_always_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "TELL_INTERVAL_S", 0.05)
    with running(figures=lambda: "{}") as rig, raw_front(rig.server.address) as front:
        began_s = rig.call(rig.loop.time)
        for number in range(1, 501):
            front.say(Ask(number))
        told: list[int] = []
        while not told or told[-1] < 500:
            heard = front.hear()
            assert isinstance(heard, Told)
            told.append(heard.number)
        assert told == sorted(told)
        assert len(told) <= 2 + (rig.call(rig.loop.time) - began_s) / 0.05
        assert rig.gone.empty()


def test_figures_reach_a_front_that_has_no_credit_left_and_take_none() -> None:
    with running(figures=lambda: "{}", credit=2) as rig, raw_front(rig.server.address) as front:
        for number in range(1, 6):
            rig.post(FrontId(1), Output(number, 0, (), "abort"))
        front.say(Ask(1))
        heard = [front.hear() for _ in range(3)]
        assert [type(each) for each in heard] == [Outputs, Outputs, Told]
        assert rig.gone.empty()


def test_questions_and_tokens_do_not_disturb_one_another() -> None:
    with asking() as (rig, client):
        handle = client.submit([1], TokenParams())
        front_id, _ = rig.next_message()
        for number in range(5):
            rig.post(front_id, Output(handle.request_id, 0, (number,)))
        assert client.ask(WAIT_S) == {"times": 1}
        assert [handle.get(WAIT_S).token_ids for _ in range(5)] == [(number,) for number in range(5)]


def test_a_question_that_is_not_answered_in_time_is_let_go() -> None:
    with asking() as (_, client):
        with pytest.raises(TimeoutError, match="within 0 s"):
            client.ask(0)
        with pytest.raises(TimeoutError, match="within 0 s"):
            asyncio.run(client.aask(0))
        assert len(client._questions) == 0
        assert client.ask(WAIT_S)["times"] >= 1


def test_every_open_question_fails_when_the_session_ends() -> None:
    with asking() as (rig, client):
        number, answer = client._questions.add()  # one that the head never hears of
        rig.call(rig.server.post_dead, "rank 1 has gone", 1)
        error = answer.exception(WAIT_S)
        assert isinstance(error, EngineDead)
        assert (error.message, error.rank, number) == ("rank 1 has gone", 1, 1)
        with pytest.raises(EngineDead, match="rank 1 has gone"):
            client.ask(WAIT_S)
        with pytest.raises(EngineDead, match="rank 1 has gone"):
            asyncio.run(client.aask(WAIT_S))


def test_an_answer_is_for_its_question_and_all_before_it() -> None:
    questions = Questions()
    answers = [questions.add()[1] for _ in range(3)]
    questions.told(2, "{}")
    assert [answer.done() for answer in answers] == [True, True, False]
    questions.told(1, "{}")  # an answer to nothing that is open
    answers[2].cancel()
    questions.told(3, "{}")
    assert len(questions) == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "null", "[" * 100_000], ids=lambda text: text[:5])
def test_figures_that_are_no_object_are_the_sessions_error(text: str) -> None:
    with pytest.raises(SessionError, match="figures that are no JSON"):
        read_document(text)


def test_the_age_of_what_was_heard_is_small_while_the_head_speaks_and_grows_when_it_does_not() -> None:
    with running() as rig, front_client(rig.server.address, silence_s=1000.0) as client:
        client.ask(WAIT_S)
        young = client.heard_age_s
        assert 0 <= young < WAIT_S
        client._connection._heard_at_s -= 100.0
        assert client.heard_age_s >= 100.0
        client.ask(WAIT_S)
        assert client.heard_age_s < 100.0


def test_a_front_that_went_before_its_answer_is_no_error() -> None:
    with running(figures=lambda: "{}") as rig, raw_front(rig.server.address) as front:
        front.say(Ask(1))
        assert front.hear() == Told(1, "{}")
        front.say(Ask(2))
        front.say_bytes(encode(Ask(3))[:-1])  # dropped for it, while its answer waits
        assert rig.next_gone() == FrontId(1)
        assert rig.server.num_fronts == 0
