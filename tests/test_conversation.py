# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a conversation remembers, and what it forgets when the context is full."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.conversation import Conversation, Message, max_prompt_tokens
from metrale_ray.errors import RequestError


def count(messages: Sequence[Message]) -> int:
    """A token for each character."""
    return sum(len(message["content"]) for message in messages)


def contents(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


def test_messages_are_in_the_order_in_which_they_were_said() -> None:
    talk = Conversation("be brief", count, 100)
    assert talk.ask("one") == 0
    talk.answer("two")
    talk.ask("three")
    assert [(m["role"], m["content"]) for m in talk.messages] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
    ]


def test_without_a_system_message_there_is_none() -> None:
    talk = Conversation(None, count, 100)
    talk.ask("one")
    assert talk.messages == [{"role": "user", "content": "one"}]


def test_the_oldest_turns_are_forgotten_first_and_the_system_message_never() -> None:
    talk = Conversation("sys", count, 13)
    for question, answer in (("aa", "AA"), ("bb", "BB"), ("cc", "")):
        talk.ask(question)
        talk.answer(answer)
    assert talk.ask("ddd") == 1
    assert contents(talk) == ["sys", "bb", "BB", "cc", "", "ddd"]


def test_a_question_that_is_too_long_by_itself_is_kept_for_the_engine_to_refuse() -> None:
    talk = Conversation("sys", count, 5)
    talk.ask("a")
    talk.answer("b")
    assert talk.ask("0123456789") == 1
    assert contents(talk) == ["sys", "0123456789"]
    assert not talk.forget_oldest()


def test_a_question_that_is_taken_back_leaves_no_trace() -> None:
    talk = Conversation(None, count, 100)
    talk.ask("a")
    talk.take_back()
    talk.answer("to nothing")
    assert talk.messages == []


def test_a_question_that_cannot_be_counted_is_taken_back() -> None:
    def refuse(messages: Sequence[Message]) -> int:
        raise RequestError("the template refuses these messages")

    talk = Conversation(None, refuse, 100)
    with pytest.raises(RequestError):
        talk.ask("a")
    assert talk.messages == []


def test_reset_keeps_only_the_system_message() -> None:
    talk = Conversation("sys", count, 100)
    talk.ask("a")
    talk.answer("b")
    talk.ask("c")
    talk.reset()
    assert contents(talk) == ["sys"]
    assert talk.num_turns == 0


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=12), st.integers(1, 60))
def test_what_is_remembered_fits_or_is_the_question_alone(turns: list[tuple[str, str]], limit: int) -> None:
    talk = Conversation("system", count, limit)
    said: list[str] = []
    for question, answer in turns:
        before = talk.num_turns
        num_forgotten = talk.ask(question)
        assert talk.num_turns == before - num_forgotten
        assert count(talk.messages) <= limit or talk.num_turns == 0
        talk.answer(answer)
        said += [question, answer]
    kept = 2 * talk.num_turns
    assert contents(talk) == ["system", *said[len(said) - kept :]]


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "expected"),
    [(1000, 100, 900), (1000, 900, 750), (1000, None, 750), (4, 1, 3), (1, 1024, 1), (2, None, 2)],
)
def test_room_for_an_answer_is_kept_but_no_more_than_a_quarter(
    max_model_len: int, max_tokens: int | None, expected: int
) -> None:
    assert max_prompt_tokens(max_model_len, max_tokens) == expected
