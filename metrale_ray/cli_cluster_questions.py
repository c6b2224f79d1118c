# SPDX-License-Identifier: MIT OR Apache-2.0
"""What `metrale-ray cluster yaml` asks for where a flag is missing, and what it takes where nobody can be asked.

An answer is checked at once and asked for again; the end of the answers is an error.
"""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from metrale_ray.cli_cluster_flags import PROVIDERS, flag_of, hosts
from metrale_ray.deploying import values
from metrale_ray.errors import UserError

DEFAULT_SSH_KEY = "~/.ssh/id_ed25519"
NO_KEY = "none"
UNSET = ""  # an answer that leaves a setting as it is


@dataclass(frozen=True)
class Question:
    """What is asked for one setting. `default` None: there has to be an answer. `check` takes a text and the flag."""

    setting: str
    text: str
    default: str | None
    check: Callable[[str, str], Any]

    def read(self, text: str) -> Any:
        """The value that `text` means. Raises UserError."""
        return self.check(text, flag_of(self.setting))


def complete(settings: Mapping[str, Any], answer: Callable[[Question], Any]) -> dict[str, Any]:
    """`settings` with what they lack, each from `answer`."""
    found = dict(settings)
    for question in _questions(found):
        if question.setting not in found:
            value = answer(question)
            found |= {} if value == UNSET else {question.setting: value}
    return found


def asker(questions: TextIO, answers: TextIO) -> Callable[[Question], Any]:
    """Asks a person."""

    def ask(question: Question) -> Any:
        while True:
            default = f" [{question.default}]" if question.default else ""
            print(f"{question.text}{default}: ", end="", file=questions, flush=True)
            line = answers.readline()
            if not line:
                raise UserError(f"the answers ended before {flag_of(question.setting)} was given")
            try:
                return question.read(line.strip() or question.default or UNSET)
            except UserError as error:
                print(error.message, file=questions)

    return ask


def take_default(question: Question) -> Any:
    """The default. Raises UserError where there is none."""
    if question.default is None:
        raise UserError(f"{flag_of(question.setting)} is missing: {question.text}; give it, or answer on a terminal")
    return question.read(question.default)


def provider(text: str, flag: str) -> str:
    """One of the places where a cluster can run."""
    if text not in PROVIDERS:
        raise values.wrong(text, flag, f"one of {', '.join(PROVIDERS)}")
    return text


def ssh_key(text: str, flag: str) -> str:
    """A path, or none."""
    return text if text == NO_KEY else values.path(text, flag)


def _questions(found: Mapping[str, Any]) -> list[Question]:
    """What `found` should have; more once the provider is known."""
    match found.get("provider"):
        case None:
            return [Question("provider", f"where: {', '.join(PROVIDERS)}", PROVIDERS[0], provider)]
        case "local":
            return [*LOCAL_QUESTIONS, Question("ssh_user", "user on them", getpass.getuser(), values.ssh_user), MODEL]
        case "aws":
            return [Question("image", "image, such as ami-0123456789abcdef0", None, values.aws_image), MODEL]
        case "gcp":
            return [Question("project", "the project's id", None, values.project), MODEL]
        case _:
            return []


def _worker_ips(text: str, flag: str) -> tuple[str, ...] | str:
    try:
        names = hosts(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{flag}: {error}") from error
    return tuple(values.host(name, flag) for name in names) or UNSET


def _model(text: str, flag: str) -> str:
    return values.model(text, flag) if text else UNSET


LOCAL_QUESTIONS = (
    Question("head_ip", "address of the first machine", None, values.address),
    Question("worker_ips", "the other machines, with commas between them", UNSET, _worker_ips),
    Question("ssh_key", "private key for them; none: ssh's own", DEFAULT_SSH_KEY, ssh_key),
)
MODEL = Question("model", "path or hub id of the checkpoint", UNSET, _model)
