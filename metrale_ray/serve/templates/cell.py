# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Cell`: a process of its own for templates, which is ended when it takes too long and replaced when it is needed.

Rules. It does one piece of work at a time, in the order in which they came. Work that passes its time ends the process,
as there is no other way to stop it; the next work gets a new one. Work that nobody waits for any more is done to its
end, within its time: a new process would cost those in line more. A wait in line has a limit too. Whatever the process
sends, no more than what was agreed is read, and it is bytes. It inherits no environment (keys may be there) but where
Python finds its modules and what the time zone is.

Leaves out: what the work is (`renderer`, `cell_main`). Of one event loop at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any

from metrale_ray.serve.templates.outcome import LENGTH, Outcome

START_TIMEOUT_S = 30.0
"""It takes about 0.2 s; a machine that loads a model may be a hundred times slower."""

LINE_TIMEOUT_S = 10.0
"""Work of a usual size takes about 1 ms, so this is a line of thousands."""

MODULE = "metrale_ray.serve.templates.cell_main"


class CellBusy(Exception):
    """The line before this work did not move on in time."""


class CellSlow(Exception):
    """The work passed its time, and its process was ended."""


class CellEnded(Exception):
    """The process ended in the middle of this work, or sent what was not agreed."""


class CellMissing(Exception):
    """There is no process, and none can be started."""


class Cell:
    """One process, which may take `memory_bytes` of address space. It starts with the first work, or by `start`.

    `module` is what it runs: the templates' work, or another one that frames its answers alike.
    """

    def __init__(
        self,
        memory_bytes: int,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        line_timeout_s: float = LINE_TIMEOUT_S,
        module: str | None = None,
    ) -> None:
        self._module = module
        self._memory_bytes = memory_bytes
        self._start_timeout_s = start_timeout_s
        self._line_timeout_s = line_timeout_s
        self._line = asyncio.Lock()
        self._num_in_line = 0
        self._turn: asyncio.Task[tuple[Outcome, bytes]] | None = None  # kept, as a loop keeps no task alive
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ending: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that is there now."""
        return None if self._process is None else self._process.pid

    @property
    def num_in_line(self) -> int:
        """Pieces of work that are done or wait for their turn now."""
        return self._num_in_line + self._line.locked()

    async def start(self) -> None:
        """Have a process ready, so that the first work need not wait for it. Raises CellBusy, CellMissing."""
        await self._join_line()
        try:
            await self._started()
        finally:
            self._line.release()

    async def work(self, frame: bytes, timeout_s: float, max_answer_bytes: int) -> tuple[Outcome, bytes]:
        """What came of the work `frame`, and its bytes. `timeout_s` counts from when its turn has come.

        Raises CellBusy, CellSlow, CellEnded, CellMissing. Cancelling it leaves the line, or leaves the work to
        be done for nobody.
        """
        await self._join_line()
        self._turn = asyncio.ensure_future(self._take_turn(frame, timeout_s, max_answer_bytes))
        self._turn.add_done_callback(self._end_turn)
        return await asyncio.shield(self._turn)

    def close(self) -> None:
        """End the process now; what is waited for ends with CellEnded. Returns when it has gone. Idempotent."""
        self._is_closed = True
        if self._process is not None and self._line.locked():
            self._process.kill()  # whoever waits for it sees its end, and does the rest
            self._ending.append(self._process)
        else:
            self._end()
        for process in self._ending:
            process.wait()
        self._ending.clear()

    async def _take_turn(self, frame: bytes, timeout_s: float, max_answer_bytes: int) -> tuple[Outcome, bytes]:
        await self._started()
        return await self._ask(frame, timeout_s, max_answer_bytes)

    def _end_turn(self, turn: asyncio.Task[tuple[Outcome, bytes]]) -> None:
        """The next one's turn. What came of work that nobody waits for any more is dropped, an error too."""
        self._line.release()
        if not turn.cancelled():
            turn.exception()

    async def _join_line(self) -> None:
        self._num_in_line += 1
        try:
            async with asyncio.timeout(self._line_timeout_s):
                await self._line.acquire()
        except TimeoutError as error:
            raise CellBusy(f"its turn did not come within {self._line_timeout_s:g} s") from error
        finally:
            self._num_in_line -= 1

    async def _started(self) -> None:
        if self._is_closed:
            raise CellMissing("it is closed")
        if self._process is not None and self._process.poll() is None:
            return
        self._end()  # it may have been ended from outside since its last work
        try:
            self._spawn()
            await self._in_time(self._receive(1), self._start_timeout_s)
        except (OSError, CellSlow, CellEnded) as error:
            raise CellMissing(f"it does not start: {error}") from error

    def _spawn(self) -> None:
        mine, theirs = socket.socketpair()
        try:
            mine.setblocking(False)
            # -P: no module from the folder that it happens to start in. From this thread, as it ends with its parent.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module or MODULE, str(self._memory_bytes)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends it in its own time
            )
        except BaseException:
            mine.close()
            raise
        finally:
            theirs.close()
        self._channel = mine

    async def _ask(self, frame: bytes, timeout_s: float, max_answer_bytes: int) -> tuple[Outcome, bytes]:
        outcome, content = await self._in_time(self._exchange(frame, max_answer_bytes), timeout_s)
        if outcome is Outcome.NO_MEMORY:
            self._end()
        return outcome, content

    async def _in_time(
        self, step: Coroutine[Any, Any, tuple[Outcome, bytes]], timeout_s: float
    ) -> tuple[Outcome, bytes]:
        """What `step` gives. However else it ends, the process is in the middle of something, and goes."""
        is_done = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await step
            is_done = True
        except TimeoutError as error:
            raise CellSlow(f"it took more than {timeout_s:g} s") from error
        except (OSError, ValueError, EOFError) as error:
            raise CellEnded(f"it ended in the middle of its work ({error})") from error
        finally:
            if not is_done:
                self._end()
        return answer

    async def _exchange(self, frame: bytes, max_answer_bytes: int) -> tuple[Outcome, bytes]:
        loop, channel = asyncio.get_running_loop(), self._open_channel()
        await loop.sock_sendall(channel, LENGTH.pack(len(frame)))
        await loop.sock_sendall(channel, frame)
        return await self._receive(1 + max_answer_bytes)

    async def _receive(self, max_bytes: int) -> tuple[Outcome, bytes]:
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if not 1 <= length <= max_bytes:
            raise ValueError(f"it announced {length} bytes, of at most {max_bytes}")
        content = await self._exactly(length)
        return Outcome(content[0]), content[1:]

    async def _exactly(self, count: int) -> bytes:
        loop, channel = asyncio.get_running_loop(), self._open_channel()
        content = bytearray(count)
        rest = memoryview(content)
        while rest:
            got = await loop.sock_recv_into(channel, rest)
            if got == 0:
                raise EOFError("it closed its end")
            rest = rest[got:]
        return bytes(content)

    def _open_channel(self) -> socket.socket:
        if self._channel is None:
            raise EOFError("it is closed")
        return self._channel

    def _end(self) -> None:
        """Kill the process and forget it. One that does not go at once is waited for later."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._ending.append(self._process)
        self._channel = self._process = None
        self._ending = [process for process in self._ending if process.poll() is None]


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("TZ", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path))}
