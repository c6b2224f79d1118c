# SPDX-License-Identifier: MIT OR Apache-2.0
"""A front's session from its own side: whoever waits is answered, whatever happens to the head."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from metrale_ray.errors import EngineDead, RequestError, SessionError
from metrale_ray.protocol.door import Door
from metrale_ray.protocol.fields import Fields
from metrale_ray.protocol.front import client as client_module
from metrale_ray.protocol.front import params_map
from metrale_ray.protocol.front.client import FrontClient
from metrale_ray.protocol.front.frames import MAX_PROMPT_TOKENS, encode
from metrale_ray.protocol.front.messages import Abort, Beat, Bye, Finish, Output, Outputs, Submit
from metrale_ray.protocol.front.params_map import PackedParams
from metrale_ray.protocol.front.server import FrontId
from metrale_ray.protocol.keys import listen_with
from metrale_ray.sampling.token_params import TokenParams
from tests.protocol.front_rig import FRONT_KEYS, HEAD_KEYS, OPENED, WAIT_S, front_client, raw_front, running

PARAMS = TokenParams(
    temperature=0.7, top_k=40, top_p=0.9, seed=2**64 - 1, max_tokens=7, ignore_eos=True, stop_token_ids=[2, 2**32 - 1]
)


@contextmanager
def connected(address: str, **settings: float) -> Iterator[FrontClient]:
    with front_client(address, **settings) as client:
        yield client
    assert not client._connection._thread.is_alive()


def test_a_session_opens_and_carries_a_request_there_and_back() -> None:
    with running() as rig, connected(rig.server.address) as client:
        assert client.wait_opened(WAIT_S) == OPENED
        handle = client.submit([1, 2, 2**32 - 1], PARAMS)
        front_id, message = rig.next_message()
        assert message == Submit(handle.request_id, (1, 2, 2**32 - 1), PARAMS)
        rig.post(front_id, Output(handle.request_id, 0, (4,)))
        rig.post(front_id, Output(handle.request_id, 0, (5,), "stop", 5))
        assert handle.get(WAIT_S) == Output(handle.request_id, 0, (4,))
        assert handle.get(WAIT_S) == Output(handle.request_id, 0, (5,), "stop", 5)
        assert client.death is None


def test_parameters_that_many_requests_share_are_packed_once_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[TokenParams] = []
    made: list[Fields] = []
    pack, make = params_map.params_to_map, params_map.read_params

    def counted_pack(params: TokenParams) -> dict[str, Any]:
        packed.append(params)
        return pack(params)

    def counted_make(fields: Fields) -> TokenParams:
        made.append(fields)
        return make(fields)

    monkeypatch.setattr(params_map, "params_to_map", counted_pack)
    monkeypatch.setattr(params_map, "read_params", counted_make)
    large = TokenParams(allowed_token_ids=range(10_000), grammar="g" * 10_000)
    shared = PackedParams(large)
    with running() as rig, connected(rig.server.address) as client:
        handles = [client.submit([number], shared) for number in range(20)]
        messages = [rig.next_message()[1] for _ in handles]
        assert messages == [Submit(handle.request_id, (number,), large) for number, handle in enumerate(handles)]
        assert (len(packed), len(made)) == (1, 1)
        client.submit([1], PARAMS)
        assert rig.next_message()[1] == Submit(21, (1,), PARAMS)
        assert (len(packed), len(made)) == (2, 2)


def test_a_session_runs_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    with running(host="::1") as rig, connected(rig.server.address) as client:
        assert rig.server.address.startswith("tcp://[::1]:")
        assert client.wait_opened(WAIT_S) == OPENED


def test_requests_of_many_threads_and_tasks_each_get_their_own_outputs() -> None:
    with running() as rig, connected(rig.server.address) as client:

        def ask(token_id: int) -> Output:
            return client.submit([token_id], TokenParams()).get(WAIT_S)

        async def ask_as_task(token_id: int) -> Output:
            return await client.submit([token_id], TokenParams()).aget()

        async def ask_all() -> list[Output]:
            return await asyncio.gather(*(ask_as_task(token_id) for token_id in range(100, 140)))

        def answer() -> None:
            for _ in range(80):
                front_id, submit = rig.next_message()
                rig.post(front_id, Output(submit.request_id, 0, submit.prompt_token_ids, "length"))

        with ThreadPoolExecutor(10) as pool:
            answering = pool.submit(answer)
            tasks = pool.submit(asyncio.run, ask_all())
            threads = list(pool.map(ask, range(40)))
            answering.result(WAIT_S)
            assert [o.token_ids for o in threads] == [(n,) for n in range(40)]
            assert [o.token_ids for o in tasks.result(WAIT_S)] == [(n,) for n in range(100, 140)]
        assert client._handles == {}


def test_a_front_that_keeps_reading_never_runs_out_of_credit() -> None:
    with running(credit=4) as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams())
        front_id, _ = rig.next_message()
        for number in range(20):
            rig.post(front_id, Output(handle.request_id, 0, (number,)))
            assert handle.get(WAIT_S).token_ids == (number,)
            client.submit([1], TokenParams())
            assert isinstance(rig.next_message()[1], Submit)  # so the Read sent before it has arrived
        assert rig.gone.empty()


def test_abort_and_finish_reach_the_head() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams())
        handle.finish()
        handle.abort()
        expected = [
            Submit(handle.request_id, (1,), TokenParams()),
            Finish(handle.request_id),
            Abort(handle.request_id),
        ]
        assert [rig.next_message()[1] for _ in range(3)] == expected


def test_closing_a_front_tells_the_head_and_answers_whoever_waits() -> None:
    with running() as rig:
        client = front_client(rig.server.address)
        handle = client.submit([1], TokenParams())
        rig.next_message()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(handle.get, WAIT_S)
            client.close()
            client.close()
            assert isinstance(waiting.exception(WAIT_S), EngineDead)
        assert rig.next_gone() == FrontId(1)
        with pytest.raises(EngineDead, match="this front was closed"):
            client.submit([1], TokenParams())


def test_outputs_received_before_the_engine_died_are_read_first() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams())
        front_id, _ = rig.next_message()
        rig.post(front_id, Output(handle.request_id, 0, (4,)))
        rig.call(rig.server.post_dead, "rank 1 has gone", 1)
        client._connection._thread.join(WAIT_S)
        assert handle.get(WAIT_S).token_ids == (4,)
        with pytest.raises(EngineDead, match="rank 1 has gone") as caught:
            handle.get(WAIT_S)
        assert caught.value.rank == 1


def test_whoever_knows_of_the_death_ends_every_wait_and_the_first_reason_stays() -> None:
    with running() as rig, connected(rig.server.address) as client:
        client.wait_opened(WAIT_S)
        handles = [client.submit([1], TokenParams()) for _ in range(3)]
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(handle.get, WAIT_S) for handle in handles]
            client.die("the actor of rank 2 has gone", 2)
            client.die("another reason", 3)
            for each in waiting:
                error = each.exception(WAIT_S)
                assert isinstance(error, EngineDead)
                assert (error.message, error.rank) == ("the actor of rank 2 has gone", 2)
        calls: list[Callable[[], object]] = [
            lambda: client.submit([1], TokenParams()),
            lambda: client.wait_opened(WAIT_S),
            handles[0].get,
        ]
        for call in calls:
            with pytest.raises(EngineDead, match="rank 2 has gone"):
                call()
        handles[0].abort()  # what it asks for has happened
        assert client.death is not None


@pytest.mark.parametrize(
    "bad", [[-1], [2**32], [True], [1.5], ["5"], [0] * (MAX_PROMPT_TOKENS + 1)], ids=lambda ids: repr(ids)[:20]
)
def test_token_ids_that_cannot_be_sent_are_a_request_error_and_the_session_goes_on(bad: list[int]) -> None:
    with running() as rig, connected(rig.server.address) as client:
        with pytest.raises(RequestError) as caught:
            client.submit(bad, TokenParams())
        assert caught.value.param == "prompt_token_ids"
        assert client._handles == {}
        client.submit([1], TokenParams())
        assert rig.next_message()[1].prompt_token_ids == (1,)


def test_priority_and_timeout_reach_the_head() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams(), priority=-(2**31), timeout_s=3)
        expected = Submit(handle.request_id, (1,), TokenParams(), -(2**31), 3.0)
        assert rig.next_message()[1] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("priority", value) for value in (2**31, -(2**31) - 1, 10**20, 1.0, "1", True, None)],
        *[("timeout_s", value) for value in (0, -1, math.nan, math.inf, 1e9, "5", True, 10**400)],
    ],
)
def test_a_priority_or_a_timeout_out_of_range_is_refused_by_name_and_the_session_goes_on(name: str, value: Any) -> None:
    with running() as rig, connected(rig.server.address) as client:
        with pytest.raises(RequestError, match=f"{name} is .*; allowed is .*; give ") as caught:
            client.submit([1], TokenParams(), **{name: value})
        assert caught.value.param == name
        client.submit([2], TokenParams())
        assert rig.next_message()[1].prompt_token_ids == (2,)


def test_a_request_of_several_sequences_ends_when_all_have_ended() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams(n=3))
        front_id, message = rig.next_message()
        assert message.params.n == 3
        ends = [Output(handle.request_id, index, (), "length") for index in (2, 0, 1)]
        rig.post(front_id, ends[0], ends[1], Output(handle.request_id, 1, (5,)))
        assert [handle.get(WAIT_S).index for _ in range(3)] == [2, 0, 1]
        assert client._handles
        rig.post(front_id, ends[2])
        assert handle.get(WAIT_S) == ends[2]
        assert not client._handles


def test_a_refusal_ends_a_request_of_several_sequences_at_once() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams(n=3))
        front_id, _ = rig.next_message()
        refusal = Output(handle.request_id, 0, (), "error", None, ("queue_full", "no room"), is_refusal=True)
        rig.post(front_id, refusal)
        assert handle.get(WAIT_S) == refusal
        assert not client._handles
        with pytest.raises(SessionError, match="has ended"):
            handle.get()


def test_the_number_of_open_requests_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_LIVE_REQUESTS", 1)
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams())
        with pytest.raises(RequestError, match="has 1 requests open") as caught:
            client.submit([1], TokenParams())
        assert caught.value.code == "too_many_requests"
        front_id, _ = rig.next_message()
        rig.post(front_id, Output(handle.request_id, 0, (), "abort"))
        assert handle.get(WAIT_S).finish_reason == "abort"
        client.submit([1], TokenParams())


def test_a_dropped_front_is_told_why() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams())
        rig.next_message()
        client._connection.send(b"not a message")
        with pytest.raises(EngineDead, match="the head dropped this front: bad frame"):
            handle.get(WAIT_S)
        assert rig.next_gone() == FrontId(1)


@contextmanager
def fake_head() -> Iterator[tuple[str, zmq.Socket[bytes]]]:
    context = zmq.Context()
    door = Door(context, lambda key: True)
    router = context.socket(zmq.ROUTER)
    listen_with(router, HEAD_KEYS)
    router.setsockopt(zmq.RCVTIMEO, round(WAIT_S * 1000))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield f"tcp://127.0.0.1:{port}", router
    finally:
        router.close(linger=0)
        door.end()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"\xc1"], "bad frame"),
        ([encode(Bye())], "no message that this side may send"),
        ([b"", b""], "one frame, not 2"),
        ([encode(Outputs(2, ()))], "frame 2 came after frame 0"),
    ],
)
def test_a_head_that_says_something_illegal_ends_the_session(parts: list[bytes], reason: str) -> None:
    with fake_head() as (address, router), connected(address) as client:
        identity = router.recv_multipart()[0]
        router.send_multipart([identity, *parts])
        with pytest.raises(EngineDead, match=reason):
            client.wait_opened(WAIT_S)


def test_an_output_for_a_request_that_has_ended_is_let_go() -> None:
    with running() as rig, connected(rig.server.address) as client:
        handle = client.submit([1], TokenParams())
        front_id, _ = rig.next_message()
        rig.post(front_id, Output(999, 0, (3,)), Output(handle.request_id, 0, (4,)))
        assert handle.get(WAIT_S).token_ids == (4,)


def test_a_head_that_is_not_there_is_noticed_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with connected(f"tcp://127.0.0.1:{port}", silence_s=1_000.0) as client, pytest.raises(EngineDead, match="was lost"):
        client.wait_opened(WAIT_S)


def test_an_address_that_is_none_ends_the_session_with_its_name() -> None:
    with connected("tcp://nonsense") as client, pytest.raises(EngineDead, match="tcp://nonsense failed"):
        client.wait_opened(WAIT_S)


def test_a_head_that_accepts_and_says_nothing_is_given_up() -> None:
    with fake_head() as (address, _), connected(address, beat_s=0.05, silence_s=0.2) as client:
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            client.wait_opened(0.01)
        with pytest.raises(EngineDead, match=r"nothing was heard .* for 0\.2 s"):
            client.wait_opened(WAIT_S)


def test_beats_keep_an_idle_session_open() -> None:
    beats = {"beat_s": 0.05, "silence_s": 1.0}
    with (
        running(**beats) as rig,
        connected(rig.server.address, **beats) as client,
        raw_front(rig.server.address) as watch,
    ):
        client.wait_opened(WAIT_S)
        for _ in range(30):  # of the head's beats: half as long again as silence may last
            assert watch.hear() == Beat()
            watch.say(Beat())
        assert client.death is None
        client.submit([1], TokenParams())
        assert isinstance(rig.next_message()[1], Submit)


HEAD = """
import asyncio
import sys
from metrale_ray.protocol.front import FrontServer, Opened, Output, Submit
from metrale_ray.protocol.keys import KeyPair

keys = KeyPair(*sys.argv[1:3])

async def main():
    def answer(front_id, message):
        if isinstance(message, Submit):
            server.post(front_id, [Output(message.request_id, 0, message.prompt_token_ids)])
    server = FrontServer("127.0.0.1", answer, lambda front_id: None, lambda: Opened(1, 2, 3), keys, beat_s=0.1)
    server.allow(sys.argv[3])
    await server.start()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def head_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    keys = (HEAD_KEYS.public, HEAD_KEYS.secret, FRONT_KEYS.public)
    head = subprocess.Popen([sys.executable, "-c", HEAD, *keys], stdout=subprocess.PIPE, text=True)
    try:
        assert head.stdout is not None
        yield head.stdout.readline().strip(), head
    finally:
        head.kill()
        head.wait(WAIT_S)
        head.stdout.close()


@pytest.mark.parametrize(("blow", "reason"), [(signal.SIGKILL, "was lost"), (signal.SIGSTOP, "heard|was lost")])
def test_a_head_that_is_killed_or_stopped_ends_every_wait(blow: signal.Signals, reason: str) -> None:
    with head_process() as (address, head), connected(address, beat_s=0.1, silence_s=2.0) as client:
        client.wait_opened(WAIT_S)
        handle = client.submit([4, 5], TokenParams())
        assert handle.get(WAIT_S).token_ids == (4, 5)
        unread = client.submit([6], TokenParams())
        seen = client.submit([7], TokenParams())
        assert seen.get(WAIT_S).token_ids == (7,)  # so the answer to the one before it has arrived too
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(handle.get, WAIT_S), pool.submit(asyncio.run, handle.aget())]
            os.kill(head.pid, blow)
            for each in waiting:
                assert isinstance(each.exception(WAIT_S), EngineDead)
        assert unread.get(0).token_ids == (6,)
        with pytest.raises(EngineDead, match=reason):
            unread.get(0)
        with pytest.raises(EngineDead, match=reason):
            client.submit([1], TokenParams())


def test_a_client_leaves_no_thread_and_no_file_behind() -> None:
    with running() as rig:
        for _ in range(3):
            with connected(rig.server.address) as client:
                client.wait_opened(WAIT_S)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with connected(rig.server.address) as client:
                client.wait_opened(WAIT_S)
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) <= files + 2  # the head may not have closed the last connection yet
