# SPDX-License-Identifier: MIT OR Apache-2.0
"""What fronts said and the engine has not heard: order, ends that do not wait, and bounds."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray.errors import RequestError, SessionError
from metrale_ray.inbox import Ending, Gone, Inbox
from metrale_ray.protocol.front import Abort, Finish, FrontId, Submit
from metrale_ray.sampling.token_params import TokenParams

ONE, TWO = FrontId(1), FrontId(2)


def a_submit(number: int, num_tokens: int = 1, n: int = 1) -> Submit:
    return Submit(number, (1,) * num_tokens, TokenParams(n=n))


def an_inbox(*numbers: int, max_requests: int = 100, max_prompt_tokens: int = 100) -> Inbox:
    inbox = Inbox(max_requests, max_prompt_tokens)
    for number in numbers:
        inbox.submit(ONE, a_submit(number), 0.0)
    return inbox


def numbers_of(inbox: Inbox) -> list[int]:
    found = []
    while (arrived := inbox.take_request()) is not None:
        found.append(arrived.submit.request_id)
    return found


def test_requests_are_taken_in_the_order_in_which_they_came_with_their_time() -> None:
    inbox = an_inbox()
    for number, front in ((3, ONE), (1, TWO), (2, ONE)):
        inbox.submit(front, a_submit(number), number + 0.5)
    assert len(inbox) == 3
    taken = [inbox.take_request() for _ in range(4)]
    assert [each and (each.front, each.submit.request_id, each.at_s) for each in taken] == [
        (ONE, 3, 3.5),
        (TWO, 1, 1.5),
        (ONE, 2, 2.5),
        None,
    ]


def test_an_abort_of_what_waits_here_takes_it_out_and_tells_which_it_was() -> None:
    inbox = an_inbox(1, 2, 3)
    inbox.end(ONE, Abort(2))
    inbox.end(TWO, Abort(3))  # another front's number
    first, second = inbox.take_ending(), inbox.take_ending()
    assert isinstance(first, Ending)
    assert first.arrived is not None
    assert first.arrived.submit == a_submit(2)
    assert second == Ending(TWO, Abort(3), None)
    assert inbox.take_ending() is None
    assert numbers_of(inbox) == [1, 3]


def test_a_finish_stays_with_its_request_while_that_waits_and_never_comes_before_it() -> None:
    inbox = an_inbox()
    inbox.submit(ONE, a_submit(1, n=3), 0.0)
    for index in (2, 2, 3, 2**32 - 1):  # the last two are of no sequence of it
        inbox.end(ONE, Finish(1, index))
    assert inbox.take_ending() is None
    arrived = inbox.take_request()
    assert arrived is not None
    assert arrived.finished == {2}
    inbox.end(ONE, Finish(1, 0))
    assert inbox.take_ending() == Ending(ONE, Finish(1, 0))


def test_a_front_that_goes_takes_its_requests_with_it_and_no_others() -> None:
    inbox = an_inbox(1, 2)
    inbox.submit(TWO, a_submit(1), 0.0)
    assert (inbox.num_sequences, inbox.num_dropped) == (3, 0)
    inbox.gone(ONE)
    assert (inbox.num_sequences, inbox.num_dropped) == (1, 2)
    assert inbox.take_ending() == Gone(ONE)
    arrived = inbox.take_request()
    assert arrived is not None
    assert arrived.front == TWO
    assert len(inbox) == 0


def test_a_number_that_waits_here_is_not_taken_again() -> None:
    inbox = an_inbox(1)
    inbox.submit(TWO, a_submit(1), 0.0)
    with pytest.raises(SessionError, match="it sent request 1 again"):
        inbox.submit(ONE, a_submit(1), 0.0)
    assert numbers_of(inbox) == [1, 1]
    inbox.submit(ONE, a_submit(1), 0.0)


def test_too_many_requests_are_refused_with_number_limit_and_remedy() -> None:
    inbox = an_inbox(1, 2, max_requests=2)
    with pytest.raises(
        RequestError, match=r"2 requests wait .* 2 may; try again later, or raise max_queue_len"
    ) as caught:
        inbox.submit(ONE, a_submit(3), 0.0)
    assert caught.value.code == "queue_full"
    inbox.end(ONE, Abort(1))
    inbox.submit(ONE, a_submit(3), 0.0)


def test_too_many_prompt_tokens_are_refused_with_number_limit_and_remedy() -> None:
    inbox = an_inbox(max_prompt_tokens=100)
    inbox.submit(ONE, a_submit(1, 60), 0.0)
    with pytest.raises(RequestError, match="60 prompt tokens wait and 41 more would; at most 100 may wait") as caught:
        inbox.submit(ONE, a_submit(2, 41), 0.0)
    assert caught.value.code == "queue_full"
    inbox.submit(ONE, a_submit(2, 40), 0.0)
    inbox.take_request()
    inbox.gone(ONE)
    inbox.submit(ONE, a_submit(3, 500), 0.0)  # alone it is no longer than the model lets it be


@given(st.lists(st.tuples(st.sampled_from(["submit", "abort", "gone", "take"]), st.integers(1, 4)), max_size=60))
def test_each_request_leaves_once_whatever_is_said_and_nothing_stays_counted(said: list[tuple[str, int]]) -> None:
    inbox, here = an_inbox(max_prompt_tokens=10**6), set()
    for what, number in said:
        if what == "submit" and number not in here:
            inbox.submit(ONE, a_submit(number, number), 0.0)
            here.add(number)
        elif what == "abort":
            inbox.end(ONE, Abort(number))
            ending = inbox.take_ending()
            assert isinstance(ending, Ending)
            assert (ending.arrived is not None) == (number in here)
            here.discard(number)
        elif what == "gone":
            inbox.gone(ONE)
            assert inbox.take_ending() == Gone(ONE)
            here.clear()
        elif what == "take" and (arrived := inbox.take_request()) is not None:
            here.remove(arrived.submit.request_id)
        assert len(inbox) == len(here)
        assert (inbox._num_prompt_tokens, inbox.num_sequences) == (sum(here), len(here))


@pytest.mark.parametrize("what", ["submit", "end", "gone", "wake"])
def test_whatever_comes_ends_the_wait(what: str) -> None:
    inbox = an_inbox()
    acts = {
        "submit": lambda: inbox.submit(ONE, a_submit(1), 0.0),
        "end": lambda: inbox.end(ONE, Abort(1)),
        "gone": lambda: inbox.gone(ONE),
        "wake": inbox.wake,
    }
    waiting = threading.Thread(target=inbox.wait, args=(60.0,))
    waiting.start()
    acts[what]()
    waiting.join(30.0)
    assert not waiting.is_alive()


def test_a_wait_for_nothing_ends_when_its_time_is_up() -> None:
    an_inbox().wait(0.01)
