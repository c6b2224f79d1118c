# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Batch`: the requests of a file, answered into another file, as often interrupted as it may be.

    with open_batch(Path("in.jsonl"), Path("out.jsonl"), BatchOptions()) as batch, LLM("path/to/checkpoint") as llm:
        print(batch.run(llm))

Rules. Both files are read to their ends before an engine is needed. What OUTPUT answers is not asked again. Each line
of INPUT gets one line, in the order in which answers come. However large the files, a few requests at a time are held,
and some thirty bytes for each line. A run that ends early has written whole answers only, and the same call goes on.

Leaves out: where the engine comes from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from metrale_ray.batch.answering import OK, Answering, Reply
from metrale_ray.batch.contents import Contents, read_contents
from metrale_ray.batch.engine import BatchEngine
from metrale_ray.batch.input_file import InputFile
from metrale_ray.batch.line import BadLine, BatchRequest
from metrale_ray.batch.options import BatchOptions
from metrale_ray.batch.output_file import OutputFile
from metrale_ray.batch.record import answer_line, error_line
from metrale_ray.batch.shown import show
from metrale_ray.batch.tally import BatchSummary, Tally
from metrale_ray.errors import EngineDead, UserError
from metrale_ray.serve.loading import served_model, template_of
from metrale_ray.serve.loop_thread import LoopThread
from metrale_ray.serve.openai.pace import Pace
from metrale_ray.serve.openai.written import written
from metrale_ray.serve.structured import GrammarChecks

CLOSED = "this batch was ended"
PASSED_IN_ONE_TURN = 200
"""Lines that need no engine, between two turns of the loop: some milliseconds."""


@contextmanager
def open_batch(input_path: Path, output_path: Path, options: BatchOptions) -> Iterator[Batch]:
    """Both files, looked at; OUTPUT is locked until the end. Raises UserError."""
    with contextlib.ExitStack() as steps:
        given = InputFile(input_path, options.limits)
        steps.callback(given.close)
        output = OutputFile(output_path)
        steps.callback(output.close)
        _check_apart(input_path, output.path)
        contents = read_contents(given, output, retry_errors=options.retry_errors)
        yield Batch(contents, output, output_path, options)


class Batch:
    """What `open_batch` gives; `run` it once."""

    def __init__(self, contents: Contents, output: OutputFile, output_path: Path, options: BatchOptions) -> None:
        self._contents = contents
        self._output = output
        self._output_path = output_path
        self._options = options
        self.tally = Tally(contents.num_lines)
        self.tally.num_before, self.tally.num_errors = contents.num_answered, contents.num_errors
        self._turn = asyncio.Lock()  # of whoever reads INPUT
        self._pace = Pace(PASSED_IN_ONE_TURN)

    @property
    def needs_engine(self) -> bool:
        """Whether there is anything to ask."""
        return self._contents.num_to_ask > 0

    @property
    def notes(self) -> list[str]:
        """What whoever runs it should know before it begins, a line each."""
        return self._contents.notes()

    @property
    def how_to_go_on(self) -> str:
        """What is told when it ends early."""
        done = f"{self.tally.num_done} of {self.tally.num_requests} requests are answered in {self._output_path}"
        return f"{done}; the same command goes on from there"

    def run(self, engine: BatchEngine | None) -> BatchSummary:
        """Answer what is not answered. `engine`: None where none is needed.

        Raises EngineDead, UserError when a file cannot be read or written any more, ConfigError and CheckpointError
        for a chat template that cannot be used.
        """
        loop = LoopThread("batch-loop", CLOSED)
        loop.start()
        try:
            loop.wait(self._run(engine))
        except EngineDead as error:
            raise EngineDead(f"{error.message}; {self.how_to_go_on}", rank=error.rank) from error
        finally:
            loop.close()
            self._output.sync()
        return self.tally.summary()

    async def _run(self, engine: BatchEngine | None) -> None:
        with contextlib.ExitStack() as steps:
            answering = None if engine is None else self._prepare(engine, steps)
            lines = self._contents.open_lines()
            steps.callback(lines.close)
            self.tally.begin()
            shown = asyncio.ensure_future(show(self.tally))
            count = self._concurrency(engine)
            workers = [asyncio.ensure_future(self._work(lines, answering)) for _ in range(count)]
            try:
                await asyncio.gather(*workers)
            finally:
                for task in (*workers, shown):
                    task.cancel()
                await asyncio.gather(*workers, shown, return_exceptions=True)

    def _concurrency(self, engine: BatchEngine | None) -> int:
        """Twice what a step takes, so that the engine has others at once when some end."""
        if self._options.concurrency is not None:
            return self._options.concurrency
        return 1 if engine is None else 2 * engine.config.max_batch_size

    def _prepare(self, engine: BatchEngine, steps: contextlib.ExitStack) -> Answering:
        """What a service makes of a model."""
        model, limits = self._options.of_model(str(engine.model_path)), self._options.limits
        template = template_of(model, engine.tokenizer, limits)
        steps.callback(template.close)  # its processes start with the first conversation
        grammars = GrammarChecks(limits)
        steps.callback(grammars.close)
        served = served_model(
            engine.model_path, model, engine.tokenizer, template, engine.backend(), engine.max_model_len, grammars
        )
        return Answering(served, self._options.settings, self.tally)

    async def _work(self, lines: Iterator[BatchRequest | BadLine | None], answering: Answering | None) -> None:
        """One request after the other."""
        while (line := await self._next(lines)) is not None:
            if isinstance(line, BadLine):
                self._note(error_line(line), None)
                continue
            assert answering is not None  # a batch that asks nothing has no such lines
            await self._write(line, await answering.answer(line))

    async def _next(self, lines: Iterator[BatchRequest | BadLine | None]) -> BatchRequest | BadLine | None:
        """The next line that has no answer; None at the end."""
        async with self._turn:
            for line in lines:
                await self._pace.did(1)
                if line is not None:
                    return line
        return None

    async def _write(self, request: BatchRequest, reply: Reply) -> None:
        body = await written(reply.body, Pace())
        usage = reply.body["usage"] if reply.status == OK else None
        self._note(answer_line(request.custom_id, reply.status, reply.request_id, body), usage)
        if self._output.is_due:
            await asyncio.to_thread(self._output.sync)

    def _note(self, line: bytes, usage: dict[str, int] | None) -> None:
        self._output.append(line)
        self.tally.answered(usage)


def _check_apart(input_path: Path, output_path: Path) -> None:
    if output_path.samefile(input_path):
        raise UserError(f"INPUT and OUTPUT are the same file, {input_path}; give another OUTPUT")
