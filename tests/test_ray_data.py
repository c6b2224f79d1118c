# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers for rows: what a map actor does with its batches, by a real engine in this process, and every refusal."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from metrale_ray import ray_data
from metrale_ray.cluster import names
from metrale_ray.errors import ConfigError, EngineDead, UserError
from metrale_ray.ray_data import (
    RESULT_COLUMNS,
    Columns,
    RowAnswer,
    RowAnswers,
    generate,
    messages_of,
    prompt_of,
    with_answers,
)
from metrale_ray.sampling.params import SamplingParams
from tests.in_process import InProcessDriver
from tests.service_rig import write_model
from tests.test_head import Process

COUNT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
COLUMNS = Columns("prompt", "text")
MAX_QUEUE_LEN = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy output counts up: token t is followed by t + 1."""
    return write_model(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Process]:
    process = Process(model, 2, max_queue_len=MAX_QUEUE_LEN, max_batch_size=2, max_model_len=300)
    process.wait_ready()
    yield process
    process.close()


@pytest.fixture
def actor(engine: Process, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RowAnswers]]:
    """Makes what a map actor holds; each attaches as a driver of its own."""
    drivers: list[InProcessDriver] = []

    def attach(name: str, *, model: str | None) -> InProcessDriver:
        drivers.append(InProcessDriver(engine, Path(model or ""), name))
        return drivers[-1]

    def make(params: SamplingParams = COUNT, *, num_actors: int = 1, chat: bool = False) -> RowAnswers:
        return RowAnswers("mine", COLUMNS, params, num_actors, chat, str(model))

    monkeypatch.setattr(ray_data, "attach", attach)
    yield make
    for driver in drivers:
        driver.close()


def table(prompts: list[Any], kind: pyarrow.DataType | None = None) -> pyarrow.Table:
    return pyarrow.table({"id": range(len(prompts)), "prompt": pyarrow.array(prompts, kind)})


def answered(actor: RowAnswers, *batches: pyarrow.Table) -> list[dict[str, Any]]:
    """The rows of all batches, which are answered at the same time."""

    async def call() -> list[pyarrow.Table]:
        return await asyncio.gather(*map(actor, batches))

    return [row for batch in asyncio.run(call()) for row in batch.to_pylist()]


# Rows


def test_rows_keep_their_order_and_columns_and_get_an_answer_each(actor: Callable[..., RowAnswers]) -> None:
    prompts = [[first, first + 1] for first in range(1, 13)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    rows = answered(actor(params), table(prompts))
    assert [row["id"] for row in rows] == list(range(12))
    assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        assert (row["finish_reason"], row["num_prompt_tokens"], row["num_output_tokens"]) == ("length", 2, 20)
        assert (row["error"], row["error_code"]) == (None, None)
    whole = actor()._llm.generate(prompts[:3], params, progress=False)
    assert [row["text"] for row in rows[:3]] == [output.outputs[0].text for output in whole]


def test_texts_are_prompts_too(actor: Callable[..., RowAnswers]) -> None:
    llm = actor()
    (row,) = answered(llm, table(["abc"]))
    assert row["num_prompt_tokens"] == len(llm._llm.tokenizer.encode("abc"))  # type: ignore[union-attr]
    assert row["text"] == llm._llm.generate("abc", COUNT, progress=False)[0].outputs[0].text


def test_a_row_that_cannot_be_answered_has_its_error_and_the_others_go_on(actor: Callable[..., RowAnswers]) -> None:
    rows = answered(actor(), table([[7], [], None, [1] * 500, [999], [8]]))
    assert [row["error_code"] for row in rows] == [
        None,
        "user_error",
        "user_error",
        "context_length_exceeded",
        "invalid_request",
        None,
    ]
    assert [row["finish_reason"] for row in rows] == ["length", *["error"] * 4, "length"]
    for part, row in zip(("of type list", "is missing", "at most 299", "holds 999"), rows[1:5], strict=True):
        assert part in row["error"]
        assert row["num_output_tokens"] == 0


def test_questions_and_conversations_are_laid_out_by_the_chat_template(actor: Callable[..., RowAnswers]) -> None:
    chat = actor(chat=True)
    (from_text,) = answered(chat, table(["hello"]))
    conversations = [[{"role": "user", "content": "hello", "name": None}], [], [{"role": "user", "content": "bye"}]]
    rows = answered(chat, table(conversations))
    assert from_text["error"] is None
    assert (rows[0]["text"], rows[0]["num_prompt_tokens"]) == (from_text["text"], from_text["num_prompt_tokens"])
    assert "the messages are of type list" in rows[1]["error"]
    assert rows[2]["error"] is None


def test_batches_at_once_stay_below_half_of_the_queue_and_a_full_one_is_asked_again(
    actor: Callable[..., RowAnswers], engine: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_data, "RETRY_S", 0.0)
    alone = actor()
    assert alone._room._value == MAX_QUEUE_LEN // 2
    assert actor(num_actors=100)._room._value == 1
    # Together four times as many as the queue takes.
    actors = [actor() for _ in range(2)]
    for each in actors:
        each._room = asyncio.Semaphore(8)

    async def call() -> list[pyarrow.Table]:
        return await asyncio.gather(*(each(table([[7]] * 12)) for each in actors))

    rows = [row for batch in asyncio.run(call()) for row in batch.to_pylist()]
    assert [row["error"] for row in rows] == [None] * 24
    assert engine.head.figures()["rejected"]["queue_full"] > 0


def test_the_end_of_the_engine_ends_the_batch_with_its_reason(actor: Callable[..., RowAnswers]) -> None:
    ending = actor(SamplingParams(temperature=0, max_tokens=250, ignore_eos=True))
    driver: Any = ending._llm

    async def call() -> None:
        work = asyncio.ensure_future(ending(table([[1]] * 8)))
        while driver.stats()["running"] == 0:
            await asyncio.sleep(0)
        driver.engine.end(EngineDead("rank 1: a tooth of the gear broke", rank=1))
        await work

    with pytest.raises(EngineDead, match="a tooth of the gear broke"):
        asyncio.run(call())


def test_a_batch_without_the_column_is_refused_with_those_that_are_there(actor: Callable[..., RowAnswers]) -> None:
    with pytest.raises(UserError, match="no column 'prompt'; the dataset has 'question'"):
        answered(actor(), pyarrow.table({"question": ["a"]}))


# Parts


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (["a", "b"], "there is no column 'prompt'; the dataset has 'a', 'b'. Name the one with"),
        (["prompt", "text"], "has a column 'text' already; rename it .rename_columns., or name another by output_colu"),
        (["prompt", "error"], "has a column 'error' already; rename it .rename_columns.$"),
    ],
)
def test_columns_that_are_missing_or_taken_are_named(known: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        COLUMNS.check(known)
    COLUMNS.check(["x", "prompt"])


TEXT_OR_NONE = st.none() | st.text(st.characters(exclude_categories=("Cs",)))
ANSWERS = st.builds(
    RowAnswer,
    TEXT_OR_NONE.map(lambda text: text or ""),
    TEXT_OR_NONE,
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    TEXT_OR_NONE,
    TEXT_OR_NONE,
)


@given(st.lists(ANSWERS))
def test_every_batch_has_the_same_columns_of_the_same_types_whatever_its_answers(answers: list[RowAnswer]) -> None:
    batch = with_answers(pyarrow.table({"prompt": pyarrow.array([["x"]] * len(answers))}), "out", answers)
    assert batch.column_names == ["prompt", "out", *RESULT_COLUMNS]
    strings, numbers = [pyarrow.string()], [pyarrow.int64()]
    assert batch.schema.types[1:] == strings * 2 + numbers * 2 + strings * 2
    assert batch.column("out").to_pylist() == [answer.text for answer in answers]
    assert batch.column("error").to_pylist() == [answer.error for answer in answers]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


def refusal(call: Callable[[Any], Any], value: Any) -> str:
    """Why `value` is refused; "" where it is not."""
    try:
        call(value)
    except UserError as error:
        return error.message
    return ""


@given(JSON)
def test_whatever_a_row_holds_is_a_prompt_or_is_refused(value: Any) -> None:
    is_list = isinstance(value, list) and bool(value) and {type(item) for item in value} == {int}
    if isinstance(value, str) or is_list:
        assert prompt_of(value) == value
    else:
        assert refusal(prompt_of, value).startswith("the prompt is ")


def test_token_ids_in_an_array_are_a_prompt_and_other_numbers_are_none() -> None:
    assert prompt_of(np.array([3, 4], np.uint16)) == [3, 4]
    for value in (np.array([0.5]), np.array([[1]]), np.array([True]), np.array([], int), np.array(3)):
        assert refusal(prompt_of, value).startswith("the prompt is of type ")


@given(JSON)
def test_whatever_a_row_holds_is_a_conversation_or_is_refused(value: Any) -> None:
    is_list = isinstance(value, list) and bool(value) and {type(item) for item in value} == {dict}
    if isinstance(value, str) or is_list:
        assert all(None not in message.values() for message in messages_of(value))
    else:
        assert refusal(messages_of, value).startswith("the messages are ")


def test_what_map_actors_are_given_can_be_sent_to_them() -> None:
    params = SamplingParams(stop="x", max_tokens=3, structured_outputs={"choice": ["a", "b"]})
    assert pickle.loads(pickle.dumps((RowAnswers, COLUMNS, params))) == (RowAnswers, COLUMNS, params)


# The call


class PlayedDataset:
    """Keeps what `map_batches` was given."""

    def __init__(self, columns: list[str] | None) -> None:
        self._columns = columns
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))
        self.given: dict[str, Any] = {}

    def columns(self, *, fetch_if_missing: bool) -> list[str] | None:
        assert not fetch_if_missing  # it would execute the dataset
        return self._columns

    def map_batches(self, kind: type, **given: Any) -> PlayedDataset:
        self.given = {"kind": kind, **given}
        return self


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> PlayedDataset:
    """On a Ray with one engine, named "mine", and a CPU to spare."""

    def get_actor(name: str, namespace: str) -> object:
        if name != "mine/rank-0":
            raise ValueError(name)
        return object()

    monkeypatch.setattr(ray_data, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(names, "ray", SimpleNamespace(get_actor=get_actor))
    monkeypatch.setattr(names, "list_named_actors", lambda **_: [{"name": "mine/rank-0", "namespace": names.NAMESPACE}])
    monkeypatch.setattr(ray_data, "most_unreserved_cpus", lambda: 1.0)
    return PlayedDataset(["prompt"])


def test_map_actors_take_no_cpu_and_keep_the_order(dataset: PlayedDataset) -> None:
    result: Any = generate(dataset, "mine", concurrency=3, batch_size=5, params=COUNT, model="/m", chat=True)
    assert result.context.execution_options.preserve_order
    assert result.given["kind"] is RowAnswers
    assert result.given["fn_constructor_args"] == ("mine", COLUMNS, COUNT, 3, True, "/m")
    assert (result.given["num_cpus"], result.given["batch_size"]) == (0, 5)
    assert result.given["compute"].min_size == result.given["compute"].max_size == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"batch_size": "64"}, "batch_size is '64'"),
        ({"params": {"n": 1}}, "params is of type dict; it must be one SamplingParams"),
        ({"params": SamplingParams(n=2)}, "params.n is 2; it must be 1"),
        ({"llm": 5}, "llm is of type int; it must be an LLM, an AttachedLLM or an engine's name"),
        ({"llm": "yours"}, "no engine named 'yours' runs on this Ray; those that run are 'mine'"),
        ({"prompt_column": "question"}, "no column 'question'"),
        ({"output_column": "prompt"}, "a column 'prompt' already"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_executed(
    dataset: PlayedDataset, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(dataset, **{"llm": "mine", **changes})
    assert dataset.given == {}


def test_an_engine_that_has_taken_every_cpu_is_told_instead_of_a_wait_without_an_end(
    dataset: PlayedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_data, "most_unreserved_cpus", lambda: 0.5)
    message = r"the most is 0\.5 CPU outside of what is reserved for engine 'mine'.*as a flag --num-cpus-per-rank"
    with pytest.raises(UserError, match=message):
        generate(dataset, "mine")
    generate(dataset, "mine", check_cpus=False)
    assert dataset.given


def test_a_process_that_has_joined_no_ray_is_told_so(dataset: PlayedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UserError, match="this process has joined no Ray"):
        generate(dataset, "mine")


def test_missing_packages_are_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    monkeypatch.delattr(ray, "data", raising=False)
    with pytest.raises(UserError, match=r"pip install 'metrale-ray\[data\]'"):
        generate(PlayedDataset(None), "mine")


def test_a_driver_without_a_name_is_refused(dataset: PlayedDataset, engine: Process, model: Path) -> None:
    with InProcessDriver(engine, model) as driver:
        generate(dataset, driver)
        del driver.name
        with pytest.raises(ConfigError, match="it must be an LLM, an AttachedLLM or an engine's name"):
            generate(dataset, driver)
