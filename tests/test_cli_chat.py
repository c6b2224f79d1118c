# SPDX-License-Identifier: MIT OR Apache-2.0
"""A conversation: over a pipe, in a terminal, interrupted, refused, and with an engine that ends."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from metrale_ray.cli import OpenLLM, main
from metrale_ray.config import EngineConfig
from metrale_ray.errors import EngineDead, RequestError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.serve.outputs import CompletionOutput, RequestOutput

TOP = Path(__file__).resolve().parent.parent
ANSWER_S = 30.0


class FakeTokenizer:
    """A token for each character of each message."""

    has_chat_template = True

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        if any(message["content"] == "refuse me" for message in messages):
            raise RequestError("the model's chat template refuses these messages", param="messages")
        return [ord(character) for message in messages for character in message["content"]]


class FakeLLM:
    """Answers each question with its letters in capitals, one at a time; some questions go wrong."""

    def __init__(self, max_model_len: int = 1000) -> None:
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.max_model_len = max_model_len
        self.longest = max_model_len  # the head refuses longer prompts
        self.config: EngineConfig | None = None
        self.params: SamplingParams | None = None
        self.seen: list[list[str]] = []
        self.aborted = 0
        self.closed = False

    def open(self, config: EngineConfig) -> FakeLLM:
        self.config = config
        return self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.params = params
        self.seen.append([message["content"] for message in messages])
        question = messages[-1]["content"]
        if sum(map(len, self.seen[-1])) > self.longest:
            yield output(error="the prompt is too long", error_code="context_length_exceeded")
            return
        if question == "fail":
            yield output("half", error="expert 3 failed")
            return
        if question == "die":
            raise EngineDead("rank 1 has gone", rank=1)
        try:
            for letter in question.upper():
                if letter == "^":
                    raise KeyboardInterrupt
                yield output(letter)
            yield output("", "length" if question == "long" else "stop")
        except BaseException:
            self.aborted += 1
            raise


def output(delta: str = "", finish_reason: str | None = None, **error: str) -> RequestOutput:
    reason = "error" if error else finish_reason
    return RequestOutput("0", None, [1], [CompletionOutput(delta=delta, finish_reason=reason, **error)], bool(reason))


class Terminal(io.StringIO):
    """Lines that a person types; ^C among them is an interrupt."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:
        line = super().readline(size)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


def run(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, stdin: io.StringIO, *argv: str) -> int:
    for name in ("RAY_ADDRESS", "METRALE_LOG_LEVEL", "METRALE_EP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", stdin)
    arguments = list(argv) if argv and argv[0] == "chat" else ["chat", "--model", "m", *argv]
    return main(arguments, open_llm=cast(OpenLLM, llm.open), build_checkpoint=lambda: "/demo")


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


# Over a pipe


def test_each_line_of_a_pipe_is_a_question_and_nothing_prompts(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, io.StringIO("one\n\ntwo words\r\nlast"), "--system", "sys") == 0
    out, err = capsys.readouterr()
    assert out == "ONE\nTWO WORDS\nLAST\n"
    assert err == ""
    assert llm.seen == [
        ["sys", "one"],
        ["sys", "one", "ONE", "two words"],
        ["sys", "one", "ONE", "two words", "TWO WORDS", "last"],
    ]
    assert llm.closed


def test_commands_work_over_a_pipe_too(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, io.StringIO("a\n/reset\nb\n/unknown\n/exit\nc\n")) == 0
    out, err = capsys.readouterr()
    assert out == "A\nB\n/UNKNOWN\n"
    assert err == "(a new conversation)\n"
    assert llm.seen == [["a"], ["b"], ["b", "B", "/unknown"]]


def test_a_request_that_fails_is_shown_and_forgotten_and_the_rest_is_answered(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, io.StringIO("a\nfail\nrefuse me\nb\n")) == 1
    out, err = capsys.readouterr()
    assert out == "A\nhalf\nB\n"
    assert err.splitlines() == [
        "error: expert 3 failed; the question is forgotten",
        "error: the model's chat template refuses these messages; the question is forgotten",
    ]
    assert llm.seen[-1] == ["a", "A", "b"]


def test_an_engine_that_ends_ends_the_conversation_with_4(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, io.StringIO("a\ndie\nb\n")) == 4
    out, err = capsys.readouterr()
    assert out == "A\n"
    assert err.splitlines()[-1] == "error: rank 1 has gone"
    assert llm.closed


def test_an_interrupt_ends_a_pipe(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, llm, io.StringIO("ab^\nc\n")) == 130
    assert (len(llm.seen), llm.aborted, llm.closed) == (1, 1, True)


# A full context


def test_the_oldest_turns_are_forgotten_with_a_notice_when_the_context_is_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(max_model_len=16)  # of which the answer has 4
    assert run(monkeypatch, llm, io.StringIO("aa\nbb\ncc\ndddd\n"), "--system", "s") == 0
    assert llm.seen[2:] == [["s", "aa", "AA", "bb", "BB", "cc"], ["s", "cc", "CC", "dddd"]]
    assert capsys.readouterr().err == "(the context is full: the oldest 2 turns are no longer known)\n"


def test_a_refusal_for_the_length_is_asked_again_with_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM()
    llm.longest = 6  # the cache is smaller than the context
    assert run(monkeypatch, llm, io.StringIO("aa\nbbb\nccccccc\n")) == 1
    assert llm.seen == [["aa"], ["aa", "AA", "bbb"], ["bbb"], ["bbb", "BBB", "ccccccc"], ["ccccccc"]]
    out, err = capsys.readouterr()
    assert out == "AA\nBBB\n"
    assert err.count("the oldest 1 turn are no longer known") == 0
    assert err.count("the oldest turn is no longer known") == 2
    assert err.splitlines()[-1] == "error: the prompt is too long; the question is forgotten"


# In a terminal


def test_a_terminal_is_prompted_on_stderr_where_stdout_is_a_file(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, Terminal("a\n/help\n/exot\n /exit\nlong\n")) == 0
    out, err = capsys.readouterr()
    assert out == "A\n/EXIT\nLONG\n"
    assert err.count("> ") == 6
    assert err.count("/reset starts a new conversation") == 3  # at the start, for /help, for an unknown command
    assert "no command /exot" in err
    assert "cut off" in err


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, Terminal("ab^cd\n^never\n^C\nlast\n")) == 0
    out, err = capsys.readouterr()
    assert out == "AB\nLAST\n"
    assert "(stopped)" in err
    assert "(stopped; the question is forgotten)" in err
    assert "(/exit or Ctrl-D ends)" in err
    assert llm.seen == [["ab^cd"], ["ab^cd", "AB", "^never"], ["ab^cd", "AB", "last"]]
    assert llm.aborted == 2


# Settings


def test_flags_reach_the_engine_and_the_sampler(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--ep-size", "2", "--temperature", "0.5", "--max-tokens", "7", "--top-k", "3"]
    assert run(monkeypatch, llm, io.StringIO("a\n"), *flags) == 0
    assert llm.config == EngineConfig(model="m", ep_size=2)
    assert llm.params == SamplingParams(temperature=0.5, max_tokens=7, top_k=3)


@pytest.mark.parametrize("argv", [["chat"], ["chat", "--model", "demo"]])
def test_without_a_model_it_is_the_demos(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, llm, io.StringIO("a\n"), *argv) == 0
    assert llm.config == EngineConfig(model="/demo", ep_size=2)
    assert llm.params == SamplingParams(temperature=0.0, max_tokens=1024)


def test_a_folder_that_is_called_demo_is_a_model_like_any_other(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, llm, io.StringIO("a\n"), "chat", "--model", "demo") == 0
    assert llm.config == EngineConfig(model="demo")


def test_more_than_one_answer_is_refused(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, llm, io.StringIO("a\n"), "--n", "2") == 2
    assert "unrecognized arguments: --n 2" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", ["tokenizer files", "chat template"])
def test_a_model_that_cannot_chat_is_refused_with_what_to_use(
    llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    if lacking == "tokenizer files":
        llm.tokenizer = None
    else:
        monkeypatch.setattr(FakeTokenizer, "has_chat_template", False)
    assert run(monkeypatch, llm, io.StringIO("a\n")) == 2
    assert f"error: this checkpoint has no {lacking}, so it cannot chat" in capsys.readouterr().err
    assert llm.closed


# As a process with a terminal of its own

IN_A_TERMINAL = """
import sys, threading
from tests.test_cli_chat import FakeLLM, output
from metrale_ray.cli import main
class Slow(FakeLLM):
    def stream_chat(self, messages, params):
        yield from super().stream_chat(messages, params)
        if messages[-1]["content"] == "forever":
            never = threading.Event()
            threading.Timer(0.1, print, ["WAITING"], {"file": sys.stderr, "flush": True}).start()
            never.wait()
sys.exit(main(["chat", "--model", "m"], open_llm=Slow().open))
"""


class TerminalRun:
    """A process whose ends are all one terminal."""

    def __init__(self, code: str) -> None:
        self.end, inner = pty.openpty()
        command = [sys.executable, "-c", code]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, cwd=TOP, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` has been shown since the last call."""
        deadline = time.monotonic() + ANSWER_S
        while text not in self.shown:
            ready, _, _ = select.select([self.end], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come after {self.shown!r}"
            self.shown += os.read(self.end, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


def test_in_a_terminal_lines_are_edited_and_an_interrupt_stops_an_answer_alone() -> None:
    run = TerminalRun(IN_A_TERMINAL)
    try:
        run.wait_for("> ")
        run.type("hexx\x7f\x7fllo\n")
        run.wait_for("HELLO")
        run.wait_for("> ")
        run.type("forever\n")
        run.wait_for("WAITING")
        run.process.send_signal(signal.SIGINT)
        run.wait_for("(stopped)")
        run.wait_for("> ")
        run.type("\x1b[A\x1b[A\n")  # two lines back in the history
        run.wait_for("HELLO")
        run.wait_for("> ")
        run.type("\x04")
        assert run.process.wait(ANSWER_S) == 0
    finally:
        run.close()
