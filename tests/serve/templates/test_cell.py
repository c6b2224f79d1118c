# SPDX-License-Identifier: MIT OR Apache-2.0
"""A cell does one thing at a time, is ended when it must be, is replaced, and has nothing of its parent's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from metrale_ray.serve.templates.cell import Cell, CellBusy, CellEnded, CellMissing, CellSlow
from metrale_ray.serve.templates.outcome import LENGTH, Outcome
from metrale_ray.serve.templates.work import framed
from tests.processes import is_running, until

MEMORY_BYTES = 300 * 2**20
ENDLESS = "{% for i in range(25000) %}{% for j in range(25000) %}{% endfor %}{% endfor %}"
LONG_S = 60.0  # what does not happen is not waited for
SOON_S = 0.2
pytestmark = pytest.mark.processes


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell(MEMORY_BYTES)
    yield made
    made.close()


async def laid_out(cell: Cell, template: str, timeout_s: float = LONG_S, most: int = 1000, **variables: Any) -> str:
    outcome, content = await cell.work(framed(template, variables, 10**6), timeout_s, most)
    assert outcome is Outcome.TEXT, content
    return content.decode()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_takes_long_is_ended_and_the_next_work_gets_a_new_process(
    cell: Cell, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work() -> None:
        assert await laid_out(cell, "a{{ x }}", x=1) == "a1"
        old = cell.pid
        assert (
            await laid_out(cell, "b{{ x }}", x=[1.5, None, {"ü": "\U0001f680"}]) == "b[1.5, None, {'ü': '\U0001f680'}]"
        )
        assert cell.pid == old is not None
        with pytest.raises(CellSlow, match=r"more than 0\.2 s"):
            await laid_out(cell, ENDLESS, SOON_S)
        assert cell.pid is None
        assert await laid_out(cell, "c") == "c"
        assert cell.pid not in (None, old)
        assert not is_running(old)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())


def test_work_that_nobody_waits_for_any_more_is_finished_within_its_time(cell: Cell) -> None:
    async def work(template: str, timeout_s: float, *, is_kept: bool) -> None:
        await cell.start()
        pid = cell.pid
        task = asyncio.ensure_future(laid_out(cell, template, timeout_s))
        behind = asyncio.ensure_future(laid_out(cell, "never"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert cell.num_in_line == 2
        behind.cancel()
        task.cancel()
        await asyncio.wait([behind, task])
        assert (behind.cancelled(), task.cancelled(), cell.pid) == (True, True, pid)
        assert cell.num_in_line == 1  # who left in front of its turn is not waited for
        assert await laid_out(cell, "next") == "next"
        assert (cell.pid == pid) is is_kept
        assert cell.num_in_line == 0

    async def both() -> None:
        await work("{% for i in range(20000) %}{% endfor %}", LONG_S, is_kept=True)
        await work(ENDLESS, SOON_S, is_kept=False)

    asyncio.run(both())


def test_a_loop_that_closes_ends_work_that_nobody_waits_for(cell: Cell) -> None:
    async def leave(num_turns: int) -> None:
        await cell.start()
        task = asyncio.ensure_future(laid_out(cell, ENDLESS))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()

    for num_turns in range(5):
        asyncio.run(leave(num_turns))
        assert cell.num_in_line == 0
        assert asyncio.run(laid_out(cell, "next")) == "next"


def test_work_is_done_one_by_one_in_the_order_of_its_coming(cell: Cell) -> None:
    async def work() -> list[int]:
        done: list[int] = []

        async def one(number: int) -> None:
            assert await laid_out(cell, "{{ number }}", number=number) == str(number)
            done.append(number)

        await asyncio.gather(*(one(number) for number in range(50)))
        return done

    assert asyncio.run(work()) == list(range(50))


def test_a_line_that_does_not_move_turns_away() -> None:
    cell = Cell(MEMORY_BYTES, line_timeout_s=SOON_S)

    async def work() -> None:
        await cell.start()
        slow = asyncio.ensure_future(laid_out(cell, ENDLESS))
        await asyncio.wait([slow], timeout=SOON_S)
        with pytest.raises(CellBusy, match=r"within 0\.2 s"):
            await laid_out(cell, "x")
        cell.close()
        with pytest.raises(CellEnded):
            await slow

    asyncio.run(work())


def test_memory_has_a_limit_and_the_next_work_gets_a_new_process(cell: Cell) -> None:
    async def work() -> None:
        await cell.start()
        old = cell.pid
        outcome, _ = await cell.work(framed("{{ 'x' * 10 ** 9 }}", {}, 10**6), LONG_S, 1000)
        assert outcome is Outcome.NO_MEMORY
        assert await laid_out(cell, "x") == "x"
        assert cell.pid != old

    asyncio.run(work())


def test_an_answer_longer_than_agreed_is_not_read(cell: Cell) -> None:
    async def work() -> None:
        with pytest.raises(CellEnded, match="announced 1001 bytes, of at most 501"):
            await laid_out(cell, "{{ 'x' * 1000 }}", most=500)
        assert cell.pid is None

    asyncio.run(work())


def test_a_process_that_was_killed_while_it_waited_is_replaced(cell: Cell) -> None:
    async def work() -> None:
        await cell.start()
        pid = cell.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert await laid_out(cell, "x") == "x"
        assert cell.pid != pid

    asyncio.run(work())


def test_a_process_that_is_killed_in_its_work_is_told_and_closing_ends_it() -> None:
    cell = Cell(MEMORY_BYTES)

    async def work() -> None:
        await cell.start()
        slow = asyncio.ensure_future(laid_out(cell, ENDLESS))
        await asyncio.wait([slow], timeout=SOON_S)
        pid = cell.pid
        assert pid is not None
        cell.close()
        assert not is_running(pid)
        with pytest.raises(CellEnded, match="in the middle of its work"):
            await slow
        with pytest.raises(CellMissing, match="it is closed"):
            await laid_out(cell, "x")

    asyncio.run(work())
    cell.close()


PARENT = f"""
import asyncio
from metrale_ray.serve.templates.cell import Cell
from metrale_ray.serve.templates.work import framed

async def main():
    cell = Cell({MEMORY_BYTES})
    await cell.start()
    work = asyncio.ensure_future(cell.work(framed({ENDLESS!r}, {{}}, 1000), {LONG_S}, 1000))
    await asyncio.sleep(0)
    print(cell.pid, flush=True)
    await work

asyncio.run(main())
"""


def test_it_ends_with_its_parent_in_the_middle_of_its_work() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not is_running(pid), LONG_S)


def test_it_has_no_environment_no_files_and_little_memory(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRALE_API_KEY", "a secret")
    asyncio.run(cell.start())
    process = Path(f"/proc/{cell.pid}")
    names = {entry.partition("=")[0] for entry in (process / "environ").read_text().split("\0")}
    assert names <= {"PYTHONPATH", "TZ", "LD_LIBRARY_PATH", ""}
    limits = {line[:25].strip(): line[25:].split()[:2] for line in (process / "limits").read_text().splitlines()}
    assert limits["Max address space"] == [str(MEMORY_BYTES)] * 2
    for name in ("Max open files", "Max file size", "Max core file size"):
        assert limits[name] == ["0", "0"]
    open_ones = {os.readlink(link) for link in (process / "fd").iterdir() if link.name != "2"}
    assert {name.partition(":")[0] for name in open_ones} == {"socket", "/dev/null"}
    resident_kb = int((process / "status").read_text().partition("VmRSS:")[2].split()[0])
    assert resident_kb < 60_000


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit(3)", "it does not start: it ended"),
        ("import socket; socket.socket(fileno=0).sendall(b'\\0\\0\\0\\1\\x63')", "99 is not a valid Outcome"),
        ("import socket; socket.socket(fileno=0).sendall(b'\\xff' * 9)", "announced 4294967295 bytes"),
        ("input()", "more than 0.5 s"),
    ],
)
def test_a_process_that_does_not_start_is_told(
    script: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "starts_badly.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("metrale_ray.serve.templates.cell.MODULE", "starts_badly")
    cell = Cell(MEMORY_BYTES, start_timeout_s=0.5 if script == "input()" else LONG_S)
    with pytest.raises(CellMissing, match=message):
        asyncio.run(cell.start())
    assert cell.pid is None
    cell.close()


def test_an_interpreter_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(CellMissing, match=r"it does not start: .*No such file"):
        asyncio.run(Cell(MEMORY_BYTES).start())


def test_a_frame_begins_with_its_length() -> None:
    assert LENGTH.pack(258) == b"\0\0\1\2"
