# SPDX-License-Identifier: MIT OR Apache-2.0
"""`generate`: answers for the rows of a Ray Data dataset, by an engine that runs on the same Ray.

    with LLM(model="path/to/checkpoint", ep_size=2, name="mine", num_cpus_per_rank=1) as llm:
        answers = generate(ray.data.read_json("prompts.jsonl"), llm, params=SamplingParams(max_tokens=64))
        answers.write_parquet("answers")

Rules. The dataset's map actors attach to the one engine as fronts, so there is no copy of the model, and several
datasets, drivers and services share its batch. Rows keep their order and their other columns. A row that cannot be
answered has an error in its own row; the end of the engine ends the whole execution. A full queue is no error: what it
refuses is asked again.

What it leaves out: reading, writing and all else that Ray Data does. Its packages come with the extra `data`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from metrale_ray.attached import attach
from metrale_ray.cluster.names import head_of
from metrale_ray.cluster.unreserved import most_unreserved_cpus
from metrale_ray.driver import Driver
from metrale_ray.errors import ConfigError, UserError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.outputs import CompletionOutput

if TYPE_CHECKING:
    import pyarrow
    from ray.data import Dataset

BATCHES_AT_ONCE = 4
"""Of one map actor: while the last rows of one batch are answered, the next ones fill the engine."""

BUSY_CODE = "queue_full"
RETRY_S = 0.5
"""How long after the engine's queue was full a row is asked again."""

TASK_CPUS = 1.0
"""What one of Ray Data's own tasks asks for, such as one that reads a file."""

RESULT_COLUMNS = ("finish_reason", "num_prompt_tokens", "num_output_tokens", "error", "error_code")


def generate(
    dataset: Dataset,
    llm: Driver | str,
    *,
    prompt_column: str = "prompt",
    output_column: str = "text",
    params: SamplingParams | None = None,
    concurrency: int = 1,
    batch_size: int = 64,
    chat: bool = False,
    model: str | None = None,
    check_cpus: bool = True,
) -> Dataset:
    """The dataset with an answer to each row; lazy, as all of Ray Data. Execute it while the engine runs.

    `llm`: an `LLM`, an `AttachedLLM`, or the name of an engine on this Ray. `prompt_column` holds texts, or lists or
    arrays of token ids; with `chat`, questions as texts or lists of messages with "role" and "content". `params` are
    for all rows. `concurrency`: map actors, each a front of the engine that takes no CPU; one is enough for most
    models. `batch_size`: rows that one of an actor's calls takes. `model`: where the checkpoint is on nodes that do not
    have it where the engine has it.

    Added columns: `output_column` (the text), finish_reason, num_prompt_tokens, num_output_tokens, error and
    error_code, which are null where all went well.

    Raises UserError: Ray Data or the engine is not there, a column is missing or taken, a value is wrong, or, with
    `check_cpus`, no node has a CPU left outside of placement groups, so that Ray Data's own tasks would wait for ever.
    Give False where the dataset needs none, as one of items in memory whose rows are taken by this process.
    """
    data = _ray_data()
    _check_settings(params, concurrency, batch_size)
    name = llm if isinstance(llm, str) else _name_of(llm)
    _check_ray(name)
    if check_cpus:
        _check_cpus(name)
    columns = Columns(prompt_column, output_column)
    known = dataset.columns(fetch_if_missing=False)
    if known is not None:
        columns.check(known)
    dataset.context.execution_options.preserve_order = True
    return dataset.map_batches(
        RowAnswers,
        fn_constructor_args=(name, columns, params or SamplingParams(), concurrency, chat, model),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(size=concurrency, max_concurrent_calls_per_actor=BATCHES_AT_ONCE),
        num_cpus=0,
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the prompts are, and where the texts go."""

    prompt: str
    output: str

    def check(self, known: Sequence[str]) -> None:
        """Raises UserError when the prompts are not there, or a column is taken already."""
        if self.prompt not in known:
            raise UserError(
                f"there is no column {self.prompt!r}; the dataset has {', '.join(map(repr, known))}. Name the one with "
                "the prompts by prompt_column."
            )
        taken = [column for column in (self.output, *RESULT_COLUMNS) if column in known]
        if taken:
            raise UserError(
                f"the dataset has a column {taken[0]!r} already; rename it (rename_columns)"
                + (", or name another by output_column" if taken[0] == self.output else "")
            )


class RowAnswers:
    """What a map actor calls for each batch: a front of the engine `name`, which it finds when it starts."""

    def __init__(
        self, name: str, columns: Columns, params: SamplingParams, num_actors: int, chat: bool, model: str | None
    ) -> None:
        self._columns = columns
        self._params = params
        self._chat = chat
        self._llm = attach(name, model=model)
        # Half of the engine's queue, for all actors together: others have room too.
        self._room = asyncio.Semaphore(max(1, self._llm.config.max_queue_len // 2 // num_actors))

    async def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """The batch with its answers. Raises EngineDead, and UserError for columns that are not as they must be."""
        self._columns.check(batch.column_names)
        prompts = batch.column(self._columns.prompt).to_pylist()
        rows = [asyncio.ensure_future(self._row(prompt)) for prompt in prompts]
        try:
            return with_answers(batch, self._columns.output, await asyncio.gather(*rows))
        finally:
            for row in rows:
                row.cancel()

    async def _row(self, value: Any) -> RowAnswer:
        try:
            prompt = self._llm.chat_ids(messages_of(value)) if self._chat else prompt_of(value)
            request = self._llm.request(prompt, self._params)
        except UserError as error:
            return RowAnswer("", "error", 0, 0, error.message, error.code)
        while True:
            async with self._room:
                result = await self._llm.answer(request)
            if result.outputs[0].error_code != BUSY_CODE:
                return row_answer(len(result.prompt_token_ids), result.outputs[0])
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """What one row gets; the fields are columns, the text's under a name of the caller's."""

    text: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None
    error_code: str | None


def row_answer(num_prompt_tokens: int, output: CompletionOutput) -> RowAnswer:
    """The columns of one answer."""
    return RowAnswer(
        output.text, output.finish_reason, num_prompt_tokens, len(output.token_ids), output.error, output.error_code
    )


def with_answers(batch: pyarrow.Table, output_column: str, answers: Sequence[RowAnswer]) -> pyarrow.Table:
    """The table with the answers' columns, whose types are the same however few rows have an error."""
    import pyarrow

    for column in ("text", *RESULT_COLUMNS):
        kind = pyarrow.int64() if column.startswith("num_") else pyarrow.string()
        values = pyarrow.array([getattr(answer, column) for answer in answers], kind)
        batch = batch.append_column(output_column if column == "text" else column, values)
    return batch


def prompt_of(value: Any) -> str | list[int]:
    """A row's prompt. Raises UserError for what is neither a text nor a list of integers, or an array of them."""
    if isinstance(value, np.ndarray):  # as Ray Data gives back lists of numbers that came from a user's function
        value = value.tolist()
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        prompt: str | list[int] = value
        return prompt
    raise UserError(f"the prompt is {_shown(value)}; it must be a text or a list of token ids")


def messages_of(value: Any) -> list[dict[str, Any]]:
    """A row's conversation: a question, or messages without the fields that only other rows' messages have.

    Raises UserError for anything else.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        return [{name: part for name, part in message.items() if part is not None} for message in value]
    raise UserError(f'the messages are {_shown(value)}; they must be a text or a list of {{"role", "content"}}')


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    kinds = sorted({type(item).__name__ for item in value}) if isinstance(value, list) else []
    return f"of type {type(value).__name__}" + (f" of {' and '.join(kinds)}" if kinds else "")


def _ray_data() -> Any:
    try:
        from ray import data
    except ImportError as error:
        raise UserError(
            f"Ray Data cannot be used here: {error}. Install its packages with: pip install 'metrale-ray[data]'"
        ) from error
    return data


def _check_settings(params: object, concurrency: object, batch_size: object) -> None:
    for name, value in (("concurrency", concurrency), ("batch_size", batch_size)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")
    if params is None:
        return
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is of type {type(params).__name__}; it must be one SamplingParams, for all rows")
    if params.n != 1:
        raise ConfigError(f"params.n is {params.n}; it must be 1, as a row has one answer. Repeat the rows instead.")


def _name_of(llm: object) -> str:
    name = getattr(llm, "name", None)
    if not isinstance(llm, Driver) or not isinstance(name, str):
        raise ConfigError(f"llm is of type {type(llm).__name__}; it must be an LLM, an AttachedLLM or an engine's name")
    return name


def _check_ray(name: str) -> None:
    if not ray.is_initialized():
        raise UserError("this process has joined no Ray, on which the engine could be; start the LLM or ray.init first")
    head_of(name)


def _check_cpus(name: str) -> None:
    free = most_unreserved_cpus()
    if free < TASK_CPUS:
        raise UserError(
            f"no node has a CPU left for Ray Data's own tasks, which read and write: the most is {free:g} CPU outside "
            f"of what is reserved for engine {name!r} and others, and a task needs {TASK_CPUS:g}. Start the engine "
            "with fewer cores for each rank (num_cpus_per_rank, as a flag --num-cpus-per-rank; below 1 shares a core), "
            "add a node, or give check_cpus=False if the dataset needs no such task."
        )
