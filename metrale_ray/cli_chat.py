# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray chat`: a conversation in the terminal, or over a pipe.

Rules. Answers go to standard output as they grow, everything else to standard error. Ctrl-C stops the answer that
grows and keeps the conversation; what was said until then stays in it. A request that fails is shown and forgotten,
and the conversation goes on; an engine that has ended ends it. From a pipe each line is one question, nothing prompts
for it, and Ctrl-C ends the command. Control characters in an answer never reach a terminal.

Leaves out: what is remembered (`conversation`) and the engine's settings (`cli`).
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO, cast

from metrale_ray.conversation import Conversation, Message, max_prompt_tokens
from metrale_ray.errors import RequestError, UserError
from metrale_ray.sampling.params import SamplingParams
from metrale_ray.termination import was_terminated

if TYPE_CHECKING:
    from metrale_ray.llm import LLM
    from metrale_ray.serve.outputs import RequestOutput

ANSWERED, SOME_FAILED = 0, 1
PROMPT = "> "
HELP = (
    "/reset starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer; a line that begins with a space "
    "is never a command"
)
# Long enough for an explanation; a model that never ends its answer stops there.
DEFAULTS: dict[str, Any] = {"max_tokens": 1024}
# Refusals that a shorter history can turn into an answer.
TOO_LONG = ("context_length_exceeded", "kv_cache_exceeded")
# All control characters but tab and line feed.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class Answer:
    """What came of one question. `is_stopped`: by Ctrl-C."""

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    is_stopped: bool = False


class Questions:
    """Lines from `stream`: with a prompt and line editing when a person types them, as they are from a pipe."""

    def __init__(self, stream: TextIO, answers: TextIO) -> None:
        self.is_terminal = stream.isatty()
        self._stream = stream
        self._answers = answers
        # Python edits lines only when both ends are the process's own terminal.
        self._edits = self.is_terminal and answers.isatty() and stream is sys.stdin
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what is not text becomes a question all the same
        if self._edits:
            with contextlib.suppress(ImportError):  # Python may be built without it: then lines are not edited
                import readline  # noqa: F401  gives input() its editing and history

    def read(self) -> str | None:
        """The next line without its end, None when there are no more."""
        if self._edits:
            with contextlib.redirect_stdout(self._answers):
                try:
                    return input(PROMPT)
                except EOFError:
                    print()
                    return None
        if self.is_terminal:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = self._stream.readline()
        return line.removesuffix("\n") if line else None


def converse(llm: LLM, params: SamplingParams, system: str | None, questions: TextIO, answers: TextIO) -> int:
    """Answer question after question and give the exit code. Raises UserError for a model that cannot chat."""
    tokenizer = llm.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        lacking = "tokenizer files" if tokenizer is None else "chat template"
        raise UserError(f"this checkpoint has no {lacking}, so it cannot chat; use `metrale-ray generate`")
    room = max_prompt_tokens(llm.max_model_len, params.max_tokens)
    conversation = Conversation(system, lambda messages: len(tokenizer.chat(messages)), room)
    return _Chat(llm, params, conversation, Questions(questions, answers), answers).run()


class _Chat:
    def __init__(
        self, llm: LLM, params: SamplingParams, conversation: Conversation, questions: Questions, answers: TextIO
    ) -> None:
        self._llm = llm
        self._params = params
        self._conversation = conversation
        self._questions = questions
        self._answers = answers
        self._exit_code = ANSWERED

    def run(self) -> int:
        if self._questions.is_terminal:
            _say(HELP)
        while (line := self._read()) is not None:
            match line.rstrip():
                case "/exit":
                    break
                case "/reset":
                    self._conversation.reset()
                    _say("a new conversation")
                case "/help":
                    _say(HELP)
                case command if self._questions.is_terminal and re.fullmatch(r"/\w+", command):
                    _say(f"no command {command}; {HELP}")
                case question if question:
                    self._handle(question.strip())
        return self._exit_code

    def _read(self) -> str | None:
        while True:
            try:
                return self._questions.read()
            except KeyboardInterrupt:
                if was_terminated() or not self._questions.is_terminal:
                    raise
                print(file=sys.stderr)
                _say("/exit or Ctrl-D ends")

    def _handle(self, question: str) -> None:
        """One question to its end: the answer is kept, or the question forgotten with the reason shown."""
        try:
            num_forgotten = self._conversation.ask(question)
            self._tell_forgotten(num_forgotten)
            answer = self._stream(self._conversation.messages)
            while answer.error_code in TOO_LONG and self._conversation.forget_oldest():
                self._tell_forgotten(1)
                answer = self._stream(self._conversation.messages)
        except RequestError as error:
            answer = Answer(finish_reason="error", error=error.message)
        except KeyboardInterrupt:  # outside of the stream, such as while the question becomes tokens
            if was_terminated() or not self._questions.is_terminal:
                raise
            answer = Answer(is_stopped=True)
        self._settle(answer)

    def _stream(self, messages: list[Message]) -> Answer:
        """Write an answer as it grows. Leaving the stream early aborts the request."""
        answer = Answer()
        stream = cast("Generator[RequestOutput, None, None]", self._llm.stream_chat(messages, self._params))
        try:
            with contextlib.closing(stream):
                for item in stream:
                    self._take(answer, item)
        except KeyboardInterrupt:
            if was_terminated() or not self._questions.is_terminal:
                raise
            answer.is_stopped = True
        if answer.text:
            self._write("\n")
        return answer

    def _take(self, answer: Answer, item: RequestOutput) -> None:
        part = item.outputs[0]
        answer.text += part.delta
        answer.finish_reason, answer.error, answer.error_code = part.finish_reason, part.error, part.error_code
        self._write(part.delta)

    def _settle(self, answer: Answer) -> None:
        if answer.finish_reason == "error":
            self._conversation.take_back()
            self._exit_code = SOME_FAILED
            print(f"error: {answer.error}; the question is forgotten", file=sys.stderr)
        elif answer.is_stopped and not answer.text:
            self._conversation.take_back()
            print(file=sys.stderr)
            _say("stopped; the question is forgotten")
        else:
            self._conversation.answer(answer.text)
            self._tell_end(answer)

    def _tell_end(self, answer: Answer) -> None:
        if answer.is_stopped:
            _say("stopped")
        elif not answer.text and not self._questions.is_terminal:
            self._write("\n")  # each line of a pipe has its answer, even an empty one
        elif answer.finish_reason == "length" and self._questions.is_terminal:
            _say("cut off at the most tokens that one answer may have (--max-tokens)")

    def _tell_forgotten(self, num_turns: int) -> None:
        if num_turns:
            which = "turn is" if num_turns == 1 else f"{num_turns} turns are"
            _say(f"the context is full: the oldest {which} no longer known")

    def _write(self, text: str) -> None:
        self._answers.write(CONTROL.sub("\ufffd", text) if self._answers.isatty() else text)
        self._answers.flush()


def _say(text: str) -> None:
    print(f"({text})", file=sys.stderr, flush=True)
