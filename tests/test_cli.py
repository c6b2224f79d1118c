# SPDX-License-Identifier: MIT OR Apache-2.0
"""The command line: what it asks of the driver, what it writes where, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from metrale_ray import __version__
from metrale_ray.cli import OpenLLM, main
from metrale_ray.cli_flags import ENGINE_FLAGS, REQUEST_FLAGS, SAMPLING_FLAGS
from metrale_ray.config import EngineConfig
from metrale_ray.errors import (
    CheckpointError,
    ConfigError,
    Desync,
    EngineDead,
    HandshakeError,
    LinkLost,
    MetraleError,
    PlacementError,
    RequestError,
)
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.sampling.structured import StructuredOutputs
from metrale_ray.serve.outputs import CompletionOutput, Logprob, RequestOutput

TOP = Path(__file__).resolve().parent.parent
BASE = ["generate", "--model", "m"]
# Flags whose absence means that there is nothing of the kind.
NO_DEFAULT = ("model", "sampling_seed", "logit_bias", "stop_token_ids", "structured_outputs")


class FakeTokenizer:
    """A token id for each character; a conversation ends in 0."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [*self.encode("".join(f"{m['role']}:{m['content']}" for m in messages)), 0]


class FakeLLM:
    """A driver whose answer to each prompt is known, and which remembers what it was asked."""

    def __init__(self, failure: BaseException | None = None, tokenizer: FakeTokenizer | None = None) -> None:
        self.failure = failure
        self.tokenizer = tokenizer
        self.config: EngineConfig | None = None
        self.params: SamplingParams | None = None
        self.prompts: list[str | list[int]] = []
        self.options: dict[str, Any] = {}
        self.progress: bool | None = None
        self.failed: set[int] = set()  # indexes of prompts of which the first answer fails
        self.failing_prompt = 0  # the prompt instead of whose answer the failure comes
        self.closed = False

    def open(self, config: EngineConfig) -> FakeLLM:
        self.config = config
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def stats(self) -> dict[str, Any]:
        return {"ranks": [{"rank": r, "pid": 100 + r, "node": "n", "address": "10.0.0.1"} for r in (0, 1)]}

    def generate_each(
        self, prompts: list[str | list[int]], sampling_params: SamplingParams, *, progress: bool, **options: Any
    ) -> Iterator[RequestOutput]:
        print("a library prints this")
        self.prompts, self.params, self.options, self.progress = prompts, sampling_params, options, progress
        for number, prompt in enumerate(prompts):
            if self.failure is not None and number == self.failing_prompt:
                raise self.failure
            yield self._answer(number, prompt)

    def _answer(self, number: int, prompt: str | list[int]) -> RequestOutput:
        assert self.params is not None
        ids = FakeTokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        outputs = [self._output(number, index) for index in range(self.params.n)]
        scored: list[dict[int, Logprob] | None] | None = None
        if self.params.prompt_logprobs is not None:
            scored = [None, *({token_id: Logprob(-9999.0, 9, None)} for token_id in ids[1:])]
        return RequestOutput(str(number), None, ids, outputs, True, scored)

    def _output(self, number: int, index: int) -> CompletionOutput:
        if number in self.failed and index == 0:
            return CompletionOutput(text="half", token_ids=[7], finish_reason="error", error="expert 3 failed")
        text = f"answer {number}{'.' + str(index) if index else ''} é\u2028"
        answer = (
            CompletionOutput(index, text, [7, number], "stop", "x")
            if index
            else CompletionOutput(text=text, token_ids=[7, number], finish_reason="length")
        )
        if self.params is not None and self.params.logprobs is not None:
            answer.logprobs = [
                {7: Logprob(-0.5, 2, "a"), 8: Logprob(-0.25, 1, "\ud83d")},
                {number: Logprob(-1.0, 1, "")},
            ]
            answer.cumulative_logprob = -1.5
        return answer

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts, self.params = [messages[0]["content"]], params
        for n, delta in enumerate(("The ", "", "capital")):
            if self.failure is not None and n == 2:
                raise self.failure
            reason = ("error" if self.failed else "stop") if n == 2 else None
            answer = CompletionOutput(delta=delta, finish_reason=reason, error="cut" if reason == "error" else None)
            yield RequestOutput("0", None, [1], [answer], n == 2)


def run(llm: FakeLLM, *argv: str, build_checkpoint: Callable[[], object] = lambda: "/demo") -> int:
    return main(list(argv), open_llm=cast(OpenLLM, llm.open), build_checkpoint=build_checkpoint)


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "METRALE_LOG_LEVEL", "METRALE_EP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _log_level_as_before() -> Iterator[None]:
    logger = logging.getLogger("metrale_ray")
    before = logger.level
    yield
    logger.setLevel(before)


# What generate writes


def test_generate_writes_the_texts_in_order_and_nothing_else_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(tokenizer=FakeTokenizer())
    assert run(llm, *BASE, "--prompt", "one", "--prompt", "two") == 0
    out, err = capsys.readouterr()
    assert out == "answer 0 é\u2028\nanswer 1 é\u2028\n"
    assert "a library prints this" in err
    assert llm.prompts == ["one", "two"]
    assert llm.closed


def test_generate_with_json_writes_one_line_for_each_prompt(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llm, *BASE, "--prompt-token-ids", "5", "--prompt-token-ids", "1,2, 3", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [[answer["text"] for answer in line.pop("outputs")] for line in lines] == [
        ["answer 0 é\u2028"],
        ["answer 1 é\u2028"],
    ]
    assert lines == [
        {
            "index": n,
            "text": f"answer {n} é\u2028",
            "token_ids": [7, n],
            "finish_reason": "length",
            "error": None,
            "usage": {"prompt_tokens": count, "completion_tokens": 2},
        }
        for n, count in enumerate((1, 3))
    ]
    assert llm.prompts == [[5], [1, 2, 3]]


def test_a_failed_request_ends_with_1_and_the_others_are_answered(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.failed = {1}
    assert run(llm, *BASE, "--prompt", "a", "--prompt", "b", "--prompt", "c", "--json") == 1
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["finish_reason"] for line in lines] == ["length", "error", "length"]
    assert [line["error"] for line in lines] == [None, "expert 3 failed", None]
    assert "error: prompt 1: expert 3 failed" in err


def test_chat_puts_each_prompt_into_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(tokenizer=FakeTokenizer())
    assert run(llm, *BASE, "--chat", "--prompt", "hi", "--prompt", "yo") == 0
    assert llm.prompts == [[*map(ord, "user:hi"), 0], [*map(ord, "user:yo"), 0]]


def test_without_a_tokenizer_the_token_ids_are_written(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llm, *BASE, "--prompt-token-ids", "5") == 0
    assert capsys.readouterr().out.strip().replace(",", "").isdigit()


def test_chat_without_a_tokenizer_is_refused(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llm, *BASE, "--chat", "--prompt", "hi") == 2
    assert "error: --chat needs tokenizer files" in capsys.readouterr().err
    assert llm.closed


def test_each_answer_is_written_before_the_next_one_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(EngineDead("rank 1 has gone", rank=1), FakeTokenizer())
    llm.failing_prompt = 2
    assert run(llm, *BASE, "--prompt", "a", "--prompt", "b", "--prompt", "c", "--prompt", "d") == 4
    out, err = capsys.readouterr()
    assert out == "answer 0 é\u2028\nanswer 1 é\u2028\n"
    assert err.splitlines()[-1] == "error: rank 1 has gone"


def test_several_answers_to_a_prompt_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(tokenizer=FakeTokenizer())
    llm.failed = {1}
    assert run(llm, *BASE, "--prompt", "a", "--prompt", "b", "--n", "2") == 1
    out, err = capsys.readouterr()
    assert out.split("\n") == [
        "--- prompt 0, answer 0 ---",
        "answer 0 é\u2028",
        "--- prompt 0, answer 1 ---",
        "answer 0.1 é\u2028",
        "--- prompt 1, answer 0 ---",
        "half",
        "--- prompt 1, answer 1 ---",
        "answer 1.1 é\u2028",
        "",
    ]
    assert "error: prompt 1, answer 0: expert 3 failed" in err


def test_json_has_all_answers_beside_the_fields_of_the_first(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llm, *BASE, "--prompt-token-ids", "5", "--json", "--n", "2") == 0
    line = json.loads(capsys.readouterr().out)
    outputs = line.pop("outputs")
    assert line == {
        "index": 0,
        "text": "answer 0 é\u2028",
        "token_ids": [7, 0],
        "finish_reason": "length",
        "error": None,
        "usage": {"prompt_tokens": 1, "completion_tokens": 4},
    }
    assert [(one["index"], one["text"], one["finish_reason"], one["stop_reason"]) for one in outputs] == [
        (0, "answer 0 é\u2028", "length", None),
        (1, "answer 0.1 é\u2028", "stop", "x"),
    ]


def test_json_has_the_log_probabilities_that_were_asked_for(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--json", "--logprobs", "1", "--prompt-logprobs", "0")
    assert run(llm, *BASE, "--prompt-token-ids", "5,6", *flags) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert line["logprobs"] == [
        [
            {"token_id": 7, "token": "a", "logprob": -0.5, "rank": 2},
            {"token_id": 8, "token": "\ud83d", "logprob": -0.25, "rank": 1},
        ],
        [{"token_id": 0, "token": "", "logprob": -1.0, "rank": 1}],
    ]
    assert line["cumulative_logprob"] == -1.5
    assert line["prompt_logprobs"] == [None, [{"token_id": 6, "token": None, "logprob": -9999.0, "rank": 9}]]


def test_a_bar_is_shown_unless_the_answers_appear_on_the_terminal(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert run(llm, *BASE, "--prompt", "a") == 0
        assert llm.progress is not is_terminal


# Prompts


def test_prompts_of_a_file_may_be_texts_and_token_ids(llm: FakeLLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "a\u2028b"}\n\n{"prompt_token_ids": [0, 4294967295]}\r\n{"prompt": ""}', "utf-8")
    assert run(llm, *BASE, "--prompts-file", str(file)) == 0
    assert llm.prompts == ["a\u2028b", [0, 4294967295], ""]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n  \n", "is empty"),
        (b'{"prompt": "a"}\nhello\n', ":2 is not JSON"),
        (b"[" * 100_000, ":1 is not JSON"),
        (b'["a"]\n', ':1 must be {"prompt": "..."} or {"prompt_token_ids": [...]}'),
        (b'{"text": "a"}\n', ":1 must be"),
        (b'{"prompt": "a", "prompt_token_ids": [1]}\n', ":1 must be"),
        (b'{"prompt": 5}\n', ":1: \"prompt\" is '5'; it must be a text"),
        (b'{"prompt_token_ids": []}\n', "must be a list of token ids"),
        (b'{"prompt_token_ids": [1, true]}\n', "must be a list of token ids"),
        (b'{"prompt_token_ids": [1.0]}\n', "must be a list of token ids"),
        (b'{"prompt_token_ids": [-1]}\n', "must be a list of token ids"),
        (b'{"prompt_token_ids": [4294967296]}\n', "must be a list of token ids"),
        (b'{"prompt_token_ids": "1,2"}\n', "must be a list of token ids"),
        (b'{"prompt": "\xff"}\n', "is not UTF-8 text"),
    ],
)
def test_a_bad_prompts_file_is_refused_before_the_engine_starts(
    llm: FakeLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert run(llm, *BASE, "--prompts-file", str(file)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(file) in error
    assert message in error
    assert llm.config is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no prompt given; use one of --prompt, --prompt-token-ids, --prompts-file"),
        (["--prompt", "a", "--prompt-token-ids", "1"], "--prompt and --prompt-token-ids are given together"),
        (["--prompt", "a", "--prompts-file", "f"], "--prompt and --prompts-file are given together"),
        (["--prompts-file", "/no/such/file"], "cannot read the prompts file /no/such/file: No such file"),
        (["--chat", "--prompt-token-ids", "1"], "--chat needs prompts that are texts"),
        (["--prompt-token-ids", ""], "'' must be token ids with commas between them"),
        (["--prompt-token-ids", "1,,2"], "'1,,2' must be token ids"),
        (["--prompt-token-ids", "1,x"], "'1,x' must be token ids"),
        (["--prompt-token-ids=-1"], "'-1' must be token ids"),
        (["--prompt-token-ids", "4294967296"], "'4294967296' must be token ids"),
        (["--prompt-token-ids", "١"], "must be token ids"),
        (["--prompt", "a", "--stop-token-ids", "z"], "'z' must be token ids"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "a", "--n", "1000000"], "n is 1000000; allowed is an integer from 1 to 64"),
        (["--prompt", "a", "--logprobs", "21"], "logprobs is 21"),
        (["--prompt", "a", "--prompt-logprobs", "-1"], "prompt_logprobs is -1"),
        (["--prompt", "a", "--min-tokens", "17"], "min_tokens is 17"),
        (["--prompt", "a", "--logit-bias", "{"], "'{' is not JSON"),
        (["--prompt", "a", "--logit-bias", "[" * 99_999], "is not JSON"),
        (["--prompt", "a", "--logit-bias", "[5]"], "must be a JSON object"),
        (["--prompt", "a", "--logit-bias", '{"x": 1}'], "logit_bias has the token id 'x'"),
        (["--prompt", "a", "--logit-bias", '{"1": NaN}'], "logit_bias has for token 1 the bias nan"),
        (["--prompt", "a", "--bad-words", ""], "bad_words is ''"),
        (["--prompt", "a", "--allowed-token-ids", "1,-2"], "must be token ids"),
        (["--prompt", "a", "--priority", "2147483648"], "priority is 2147483648; allowed is an integer from"),
        (["--prompt", "a", "--timeout-s", "0"], "timeout_s is 0.0; allowed is a number above 0"),
        (["--prompt", "a", "--timeout-s", "inf"], "timeout_s is inf"),
        (["--prompt", "a", "--ep-size", "0"], "ep_size is 0; it must be an integer of at least 1"),
        (["--prompt", "a", "--ep-size", "two"], "argument --ep-size: invalid int value: 'two'"),
        (["--prompt", "a", "--kv-cache-memory", "lots"], "'lots'; it must be bytes, such as"),
        (["--prompt", "a", "--dtype", "int3"], "dtype is 'int3'; allowed are auto, float32"),
        (["--prompt", "a", "--ep-protocol", "v3"], "allowed are 'v1' and 'v2'"),
        (["--prompt", "a", "--config", "/no/such.yaml"], "cannot read the configuration file /no/such.yaml"),
        (["--prompt", "a", "--ep", "2"], "unrecognized arguments: --ep 2; see metrale-ray --help"),
        (["--prompt"], "argument --prompt: expected one argument; see metrale-ray generate --help"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_2(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert run(llm, *BASE, *argv) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert llm.config is None


def test_generate_without_a_model_is_refused(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(llm, "generate", "--prompt", "a") == 2
    assert "error: no model given: set `model`" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["gnerate"], ["--model", "m"]])
def test_a_missing_or_unknown_command_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_version_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"metrale-ray {__version__}\n"


# Settings


def test_every_setting_of_the_engine_has_a_flag_but_the_injected_faults() -> None:
    assert {flag.setting for flag in ENGINE_FLAGS} == {f.name for f in dataclasses.fields(EngineConfig)} - {"faults"}


def test_every_sampling_parameter_has_a_flag_but_what_the_tokenizer_says() -> None:
    names = {"sampling_seed": "seed", "keep_special_tokens": "skip_special_tokens"}
    flags = {names.get(flag.setting, flag.setting) for flag in SAMPLING_FLAGS}
    assert flags == {f.name for f in dataclasses.fields(SamplingParams)} - {"end_token_ids", "grammar"}


def test_the_help_of_generate_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0
    entries = {text.split()[0]: " ".join(text.split()) for text in capsys.readouterr().out.split("\n  --")[1:]}
    for flag in (*SAMPLING_FLAGS, *REQUEST_FLAGS, *ENGINE_FLAGS):
        has_none = flag.switch or flag.repeats or flag.setting in NO_DEFAULT
        assert has_none or "(default: " in entries[flag.names[0][2:].rstrip(",")], flag.names
    for name, value in (("max-tokens", "16"), ("top-p", "1.0"), ("ep-size", "1"), ("dtype", "auto"), ("priority", "0")):
        assert f"(default: {value})" in entries[name]
    assert entries["pin,"] == "pin, --no-pin keep each CPU rank's threads on CPUs of its own (default: on)"


def test_flags_set_every_setting_of_the_engine(llm: FakeLLM) -> None:
    flags = (
        "--model dir --revision main --ep-size 3 --max-batch-size 5 --max-model-len 64 --max-num-batched-tokens 9 "
        "--max-queue-len 11 --dtype float32 --device cpu --quantization int8 --kernels torch "
        "--attention-backend sdpa --ep-protocol v2 --kv-cache-memory 2GiB "
        "--block-size 8 --watermark 0.5 --seed 12 --address auto --placement SPREAD --num-cpus-per-rank 2 "
        "--num-gpus-per-rank 0.5 --no-pin "
        "--start-timeout-s 1 --placement-timeout-s 2 --step-timeout-s 3 --idle-ping-s 4.5 --log-level error "
        "--agreement-interval 3 --scrub --journal j --journal-redact --journal-max-size 2MiB --journal-max-age-s 60"
    )
    assert run(llm, "generate", "--prompt", "a", *flags.split()) == 0
    assert llm.config == EngineConfig(
        model="dir",
        revision="main",
        ep_size=3,
        max_batch_size=5,
        max_model_len=64,
        max_num_batched_tokens=9,
        max_queue_len=11,
        dtype="float32",
        device="cpu",
        quantization="int8",
        kernels="torch",
        attention_backend="sdpa",
        ep_protocol="v2",
        kv_cache_memory=2**31,
        block_size=8,
        watermark=0.5,
        seed=12,
        address="auto",
        placement="SPREAD",
        num_cpus_per_rank=2,
        num_gpus_per_rank=0.5,
        pin=False,
        start_timeout_s=1.0,
        placement_timeout_s=2.0,
        step_timeout_s=3.0,
        idle_ping_s=4.5,
        agreement_interval=3,
        scrub=True,
        journal="j",
        journal_redact=True,
        journal_max_size=2**21,
        journal_max_age_s=60.0,
        log_level="error",
    )


def test_what_is_not_given_is_left_to_the_defaults(llm: FakeLLM) -> None:
    assert run(llm, *BASE, "--prompt", "a") == 0
    assert llm.config == EngineConfig(model="m")
    assert llm.params == SamplingParams()


def test_flags_set_every_sampling_parameter(llm: FakeLLM) -> None:
    flags = (
        "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.25 --sampling-seed 8 --stop x --stop yy --ignore-eos "
        "--stop-token-ids 3,4 --n 2 --min-tokens 5 --min-p 0.125 --repetition-penalty 1.5 --presence-penalty -1 "
        "--frequency-penalty 0.5 --allowed-token-ids 5,6 --bad-words no --bad-words never --bad-token-ids 1,2 "
        "--bad-token-ids 3 --include-stop-str-in-output --keep-special-tokens --logprobs 3 --prompt-logprobs 0"
    )
    assert run(llm, *BASE, "--prompt", "a", *flags.split(), "--logit-bias", '{"5": -100, "6": 0.5}') == 0
    assert llm.params == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        seed=8,
        stop=["x", "yy"],
        ignore_eos=True,
        stop_token_ids=[3, 4],
        n=2,
        min_tokens=5,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        allowed_token_ids=[5, 6],
        bad_words=["no", "never"],
        bad_token_ids=[[1, 2], [3]],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=3,
        prompt_logprobs=0,
        logit_bias={5: -100, 6: 0.5},
    )
    assert llm.options == {}


def test_a_shape_of_the_output_is_passed_on_or_refused_by_name(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(llm, *BASE, "--prompt", "a", "--structured-outputs", '{"choice": ["yes", "no"]}') == 0
    assert llm.params == SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    assert run(llm, *BASE, "--prompt", "a", "--structured-outputs", '{"choices": []}') == 2
    assert "structured_outputs is 'choices'" in capsys.readouterr().err


def test_priority_and_time_limit_are_passed_on(llm: FakeLLM) -> None:
    assert run(llm, *BASE, "--prompt", "a", "--priority=-3", "--timeout-s", "2.5") == 0
    assert llm.options == {"priority": -3, "timeout_s": 2.5}


def test_the_batch_size_has_two_names(llm: FakeLLM) -> None:
    assert run(llm, *BASE, "--prompt", "a", "--max-num-seqs", "6") == 0
    assert llm.config is not None
    assert llm.config.max_batch_size == 6


def test_flags_win_over_the_file_and_the_file_over_the_environment(
    llm: FakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: from-file\nep-size: 2\nmax-num-seqs: 4\naddress: from-file\nkv_cache_memory: 1KiB\n")
    monkeypatch.setenv("RAY_ADDRESS", "from-environment")
    monkeypatch.setenv("METRALE_LOG_LEVEL", "error")
    assert run(llm, "generate", "--config", str(file), "--prompt", "a", "--ep-size", "3") == 0
    assert llm.config == EngineConfig(
        model="from-file", ep_size=3, max_batch_size=4, address="from-file", kv_cache_memory=1024, log_level="error"
    )


def test_the_address_comes_from_the_environment_where_nothing_else_gives_it(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://there:1")
    assert run(llm, *BASE, "--prompt", "a") == 0
    assert llm.config is not None
    assert llm.config.address == "ray://there:1"


def test_a_bad_log_level_in_the_environment_is_refused_by_its_name(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("METRALE_LOG_LEVEL", "loud")
    assert run(llm, *BASE, "--prompt", "a") == 2
    assert "error: METRALE_LOG_LEVEL is 'loud'; allowed are debug" in capsys.readouterr().err


def test_an_unknown_variable_is_told(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("METRALE_EP_PROTOCOLL", "v1")
    assert run(llm, *BASE, "--prompt", "a") == 0
    assert "METRALE_EP_PROTOCOLL; did you mean 'METRALE_EP_PROTOCOL'?" in caplog.text


# How it ends


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (ConfigError("why"), 2),
        (RequestError("why", param="prompt"), 2),
        (PlacementError("why"), 3),
        (HandshakeError("why"), 3),
        (CheckpointError("why"), 3),
        (EngineDead("why", rank=1), 4),
        (LinkLost("why"), 4),
        (Desync("why"), 4),
        (MetraleError("why"), 4),
    ],
)
def test_each_kind_of_failure_has_its_exit_code_and_one_line(
    failure: MetraleError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(failure)
    assert run(llm, *BASE, "--prompt", "a") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "error: why"
    assert "Traceback" not in err
    assert llm.closed


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLLM(HandshakeError("ranks differ:\n  torch: 1\n\n  build: 2\n")), *BASE, "--prompt", "a") == 3
    assert capsys.readouterr().err.splitlines()[-1] == "error: ranks differ: torch: 1; build: 2"


def test_an_error_that_nobody_foresaw_is_named_and_counts_as_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLLM(ZeroDivisionError("by zero")), *BASE, "--prompt", "a") == 4
    expected = "error: unexpected ZeroDivisionError: by zero; --log-level debug shows where"
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_debug_shows_where_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLLM(EngineDead("why")), *BASE, "--prompt", "a", "--log-level", "debug") == 4
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1] == "error: why"


def test_ctrl_c_closes_the_engine_and_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    llm = FakeLLM(KeyboardInterrupt())
    assert run(llm, *BASE, "--prompt", "a") == 130
    assert llm.closed
    assert "Traceback" not in capsys.readouterr().err


READER_GONE = """
import sys
from tests.test_cli import FakeLLM
from metrale_ray.cli import main
sys.stdin.readline()  # until the reader of our output has gone
sys.exit(main(["generate", "--model", "m", "--prompt", "a"], open_llm=FakeLLM().open))
"""


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    command = [sys.executable, "-c", READER_GONE]
    process = subprocess.Popen(
        command, cwd=TOP, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate("go\n", timeout=60)
    assert process.returncode == 141
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


# demo


def test_demo_streams_the_answer_and_tells_the_ranks_on_stderr(
    llm: FakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(llm, "demo") == 0
    out, err = capsys.readouterr()
    assert out == "The capital\n"
    assert "model /demo, 2 ranks, protocol v2" in err
    assert "rank 0: process 100 on 10.0.0.1" in err
    assert "rank 1: process 101 on 10.0.0.1" in err
    assert llm.prompts == ["What is the capital of France?"]
    assert llm.config == EngineConfig(model="/demo", ep_size=2)
    assert llm.params is not None
    assert llm.params.temperature == 0
    assert llm.closed


def test_demo_takes_another_question_and_number_of_ranks(llm: FakeLLM) -> None:
    assert run(llm, "demo", "--question", "Why?", "--ep-size", "1", "--ep-protocol", "v1") == 0
    assert llm.prompts == ["Why?"]
    assert llm.config == EngineConfig(model="/demo", ep_size=1, ep_protocol="v1")


def test_demo_whose_request_fails_ends_with_1(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.failed = {0}
    assert run(llm, "demo") == 1
    assert "error: prompt 0: cut" in capsys.readouterr().err


def test_demo_whose_engine_dies_keeps_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeLLM(EngineDead("rank 1 has gone", rank=1)), "demo") == 4
    out, err = capsys.readouterr()
    assert out == "The "
    assert err.splitlines()[-1] == "error: rank 1 has gone"


def test_demo_refuses_a_bad_flag_before_it_builds_anything(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    built: list[int] = []
    assert run(llm, "demo", "--ep-size", "0", build_checkpoint=lambda: built.append(1)) == 2
    assert built == []
    assert "ep_size is 0" in capsys.readouterr().err


def test_demo_whose_checkpoint_cannot_be_built_ends_with_3(llm: FakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> object:
        raise CheckpointError("no disk space")

    assert run(llm, "demo", build_checkpoint=build) == 3
    assert "error: no disk space" in capsys.readouterr().err
