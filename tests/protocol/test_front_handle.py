# SPDX-License-Identifier: MIT OR Apache-2.0
"""One request's handle: order, waking, the last output, and the death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from metrale_ray.errors import EngineDead, SessionError
from metrale_ray.protocol.front.handle import RequestHandle
from metrale_ray.protocol.front.messages import Abort, Finish, Output

WAIT_S = 20.0


def a_handle(num_sequences: int = 1) -> tuple[RequestHandle, list[Abort | Finish]]:
    sent: list[Abort | Finish] = []
    return RequestHandle(7, sent.append, num_sequences), sent


def output(token_id: int) -> Output:
    return Output(7, 0, (token_id,))


LAST = Output(7, 0, (), "length")


def test_outputs_are_read_in_order_and_nothing_after_the_last() -> None:
    handle, _ = a_handle()
    for each in (output(1), output(2), LAST):
        handle.put(each)
    assert [handle.get(0), handle.get(0), handle.get(0)] == [output(1), output(2), LAST]
    for _ in range(2):
        with pytest.raises(SessionError, match="request 7 has ended"):
            handle.get()


def test_a_request_of_several_sequences_is_read_until_each_has_ended() -> None:
    handle, _ = a_handle(3)
    outputs = [Output(7, 1, (), "stop"), Output(7, 0, (4,)), Output(7, 0, (), "error", None, ("c", "m"))]
    for each in outputs:
        assert not handle.ends_with(each)
        handle.put(each)
    handle.put(Output(7, 1, (9,)))  # it has ended
    handle.put(Output(7, 3, (9,)))  # there is none
    last = Output(7, 2, (), "length")
    assert handle.ends_with(last)
    handle.put(last)
    assert [handle.get(0) for _ in range(4)] == [*outputs, last]
    with pytest.raises(SessionError, match="request 7 has ended"):
        handle.get()


def test_what_is_there_is_taken_without_waiting_and_tells_of_no_death() -> None:
    handle, _ = a_handle()
    assert handle.ready() == []
    handle.put(output(1))
    handle.put(output(2))
    handle.die(EngineDead("gone"))
    assert handle.ready() == [output(1), output(2)]
    assert handle.ready() == []
    with pytest.raises(EngineDead, match="gone"):
        handle.get()


def test_a_refusal_is_the_end_of_all_sequences() -> None:
    handle, sent = a_handle(3)
    refusal = Output(7, 0, (), "error", None, ("c", "m"), is_refusal=True)
    assert handle.ends_with(refusal)
    handle.put(refusal)
    handle.put(Output(7, 1, (9,)))
    assert handle.get(0) == refusal
    handle.abort()
    handle.finish(2)
    assert sent == []
    with pytest.raises(SessionError, match="request 7 has ended"):
        handle.get()


def test_a_sequence_that_has_ended_is_not_finished_again_and_the_others_may_be() -> None:
    handle, sent = a_handle(2)
    handle.put(Output(7, 1, (), "length"))
    handle.finish(1)
    handle.finish(5)
    handle.finish(0)
    handle.abort()
    assert sent == [Finish(7, 0), Abort(7)]


def test_outputs_received_before_the_death_are_read_before_it_is_raised() -> None:
    handle, _ = a_handle()
    handle.put(output(1))
    handle.die(EngineDead("rank 1 has gone", rank=1))
    assert handle.get() == output(1)
    for _ in range(2):
        with pytest.raises(EngineDead, match="rank 1 has gone") as caught:
            handle.get()
        assert caught.value.rank == 1


def test_a_wait_ends_after_its_timeout() -> None:
    handle, _ = a_handle()
    with pytest.raises(TimeoutError, match=r"request 7 gave no output within 0\.01 s"):
        handle.get(timeout_s=0.01)


@pytest.mark.parametrize("wake", [lambda h: h.put(output(1)), lambda h: h.die(EngineDead("gone"))], ids=["put", "die"])
def test_a_waiting_thread_is_woken(wake: Callable[[RequestHandle], None]) -> None:
    handle, _ = a_handle()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(handle.get, WAIT_S)
        wake(handle)
        error = waiting.exception(WAIT_S)
    assert error is None or isinstance(error, EngineDead)
    assert error is not None or waiting.result() == output(1)


def test_tasks_of_an_event_loop_are_woken_from_another_thread() -> None:
    handle, _ = a_handle()

    async def read() -> list[Output]:
        waiting = [asyncio.create_task(handle.aget()) for _ in range(3)]
        await asyncio.sleep(0)  # all of them wait now
        thread = threading.Thread(target=lambda: [handle.put(output(n)) for n in range(3)])
        thread.start()
        read = [await asyncio.wait_for(task, WAIT_S) for task in waiting]
        thread.join(WAIT_S)
        return read

    assert sorted(asyncio.run(read()), key=repr) == [output(n) for n in range(3)]


def test_the_death_wakes_tasks_and_threads_alike() -> None:
    handle, _ = a_handle()

    async def read() -> None:
        task = asyncio.create_task(handle.aget())
        thread = asyncio.create_task(asyncio.to_thread(handle.get, WAIT_S))
        await asyncio.sleep(0)
        handle.die(EngineDead("gone"))
        for waiting in (task, thread):
            with pytest.raises(EngineDead, match="gone"):
                await waiting

    asyncio.run(read())


def test_a_cancelled_wait_loses_no_output() -> None:
    handle, _ = a_handle()

    async def read() -> Output:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.aget(), 0.001)
        handle.put(output(1))
        return await handle.aget()

    assert asyncio.run(read()) == output(1)


def test_a_waiter_whose_loop_was_closed_does_not_stop_the_others() -> None:
    handle, _ = a_handle()
    loop = asyncio.new_event_loop()
    waiting = handle.aget()
    task = loop.create_task(waiting)
    loop.call_soon(loop.stop)
    loop.run_forever()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is left pending on purpose
    loop.close()
    handle.put(output(1))
    assert handle.get(0) == output(1)


def test_abort_and_finish_are_sent_while_the_request_lives_and_not_afterwards() -> None:
    handle, sent = a_handle()
    handle.abort()
    handle.finish()
    assert sent == [Abort(7), Finish(7)]
    handle.put(LAST)
    handle.abort()
    assert len(sent) == 2
    dead, sent = a_handle()
    dead.die(EngineDead("gone"))
    dead.finish()
    dead.abort()
    assert sent == []
