# SPDX-License-Identifier: MIT OR Apache-2.0
"""Every command of ours and of Ray's that deploy/, README and docs/ show or run is one that the real parsers take."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.scripts.scripts import cli as ray_cli
from ray.serve.scripts import cli as serve_cli

from metrale_ray.cli_parser import make_parser
from metrale_ray.errors import UserError
from tests.deploying.compose import load
from tests.deploying.dockerfile import instructions
from tests.deploying.shell import commands

TOP = Path(__file__).parents[2]
DEPLOY = TOP / "deploy"
CLIS: dict[str, click.Group] = {"ray": ray_cli, "serve": serve_cli}
NAMES = ("metrale-ray", *CLIS)
OF_DEPLOY = [path for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml", ".sh") or path.name == "Dockerfile"]
FILES = sorted([*OF_DEPLOY, TOP / "README.md", *(TOP / "docs").glob("*.md")])
MENTIONED = 2  # words: `ray up` in a sentence is a name, `ray up cluster.yaml` a command
PLACEHOLDER = "..."


def of_shell(text: str) -> Iterator[list[str]]:
    """Commands in `text`, which may also be no shell's at all, as values of YAML are."""
    if re.search(rf"\b({'|'.join(NAMES)})\s", text):
        for words in commands(text):
            if (name := words[0].rpartition("/")[2]) in NAMES:
                yield [name, *words[1:]]


def of_comments(text: str) -> Iterator[list[str]]:
    """Commands in comments: the first line's, and those further in than other comments, up to two spaces."""
    first, _, rest = text.partition("\n")
    lines = [first.removeprefix("# "), *re.findall(r"^\s*# {2,}(\S.*)$", rest, re.MULTILINE)]
    for line in lines:
        yield from of_shell(re.split(r"\s{2,}", line)[0])


def of_markdown(text: str) -> Iterator[list[str]]:
    """Commands in blocks, and those between single backquotes."""
    for block in re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from of_shell(block)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", prose):
        for words in of_shell(" ".join(code.split())):
            if len(words) > MENTIONED:
                yield words


def of_value(value: Any) -> Iterator[list[str]]:
    """Commands in a value of YAML: texts of a shell, and lists of words."""
    if isinstance(value, str):
        yield from of_shell(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from of_value(each)
    elif isinstance(value, list) and value and value[0] in NAMES:
        yield [str(word) for word in value]
    elif isinstance(value, list):
        for each in value:
            yield from of_value(each)


def of_compose(path: Path) -> Iterator[list[str]]:
    """Commands of the services, behind the entrypoint of each: the image's, unless it has its own."""
    services = load(path, {"MODEL_DIR": "/models/m"})["services"]
    for service in services.values():
        words = [*service.get("entrypoint", ["metrale-ray"]), *service["command"]]
        words = words[words.index("--") + 1 :] if "--" in words[:2] else words
        yield from of_shell(words[-1]) if words[:2] == ["bash", "-c"] else [words]


def of_file(path: Path) -> list[list[str]]:
    """Every command in a file under deploy/."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(of_markdown(text))
    if path.name == "compose.yaml":
        return [*of_comments(text), *of_compose(path)]
    if path.suffix == ".yaml":
        return [*of_comments(text), *(found for each in yaml.safe_load_all(text) for found in of_value(each))]
    if path.suffix == ".sh":
        return list(of_comments(text))
    entrypoints = [each.words for each in instructions(text) if each.name in ("ENTRYPOINT", "CMD")]
    return [
        *of_comments(text),
        [word for words in entrypoints for word in words if word not in ("/usr/bin/tini", "--")],
    ]


def check(words: list[str]) -> None:
    """Raises UserError or click.ClickException for words that the command does not take."""
    name, *rest = [word for word in words if word != PLACEHOLDER]
    if name == "metrale-ray":
        with contextlib.suppress(SystemExit):  # of --help and --version; a mistake is a UserError
            make_parser().parse_args(rest)
        return
    found = click_parameters(CLIS[name], name, rest)
    for each in of_shell(str(found.get("cmd", ""))):  # of ray exec, which runs it on the head
        check(each)


def click_parameters(group: click.Group, name: str, words: list[str]) -> dict[str, Any]:
    """What a command of Ray's would be called with."""
    context = group.make_context(name, list(words))
    command: click.Command = group
    while isinstance(command, click.Group):
        called, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        context, command = found.make_context(called, rest, parent=context), found
    return dict(context.params)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(TOP).as_posix())
def test_the_commands_of_a_file_are_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEPLOY)
    for words in of_file(path):
        try:
            check(words)
        except (UserError, click.ClickException) as error:
            pytest.fail(f"{' '.join(words)}: {error}")


def test_commands_are_found_in_files_of_each_kind() -> None:
    found = {path.relative_to(DEPLOY).as_posix(): [words[:2] for words in of_file(path)] for path in OF_DEPLOY}
    assert ["metrale-ray", "--help"] in found["Dockerfile"]
    assert {("metrale-ray", "serve"), ("ray", "start"), ("serve", "deploy")} <= {*map(tuple, found["compose.yaml"])}
    assert {("metrale-ray", "cluster"), ("ray", "start"), ("ray", "stop")} <= {
        *map(tuple, found["ray-up/on-premise.yaml"])
    }
    assert ["metrale-ray", "cluster"] in found["kubernetes/rayservice.yaml"]
    assert ["serve", "deploy"] in found["serve.yaml"]
    assert {("ray", "exec"), ("ray", "job"), ("serve", "shutdown")} <= {*map(tuple, found["README.md"])}


@pytest.mark.parametrize(
    "words",
    [
        ["metrale-ray", "serve", "m", "--ep-sise", "2"],
        ["ray", "start", "--haed"],
        ["ray", "strat"],
        ["ray", "exec", "c.yaml", "metrale-ray doctor --tmeout-s 1"],
        ["serve", "deploy", "a.yaml", "--adress", "x"],
        ["ray", "job", "submit", "--wroking-dir", ".", "--", "python", "x.py"],
    ],
)
def test_a_planted_mistake_is_found(words: list[str]) -> None:
    with pytest.raises((UserError, click.ClickException)):
        check(words)


def test_commands_of_every_form_are_found() -> None:
    assert list(of_markdown("text `ray x`\n```\nray up a.yaml # b\nX=1 serve status\n```\n```json\nray y\n```\n")) == [
        ["ray", "up", "a.yaml"],
        ["serve", "status"],
    ]
    assert list(of_markdown("by `ray up`, as `ray up\n  b.yaml` or `(X=1 ray stop --force > y)`")) == [
        ["ray", "up", "b.yaml"],
        ["ray", "stop", "--force"],
    ]
    assert list(of_value({"a": ["ray", "stop"], "b": [{"c": "cd x && /opt/bin/ray stop"}], "d": "serve me not"})) == [
        ["ray", "stop"],
        ["ray", "stop"],
        ["serve", "me", "not"],
    ]
    assert list(of_comments("# ray stop\n# serve what\n#   serve status    until it runs\n")) == [
        ["ray", "stop"],
        ["serve", "status"],
    ]
