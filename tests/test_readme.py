# SPDX-License-Identifier: MIT OR Apache-2.0
"""What README shows is run as it stands there, with a tiny checkpoint where it says path/to/checkpoint."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrale_ray import demo
from metrale_ray.cli_parser import make_parser
from tests.fixtures.tiny import write_tiny
from tests.fixtures.tokenizer import write_tokenizer
from tests.processes import OwnRay, until

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 200.0
HERE_ALREADY = ("doctor", "inspect")  # need no engine
WRITES = {"cluster yaml": "cluster.yaml", "batch": "done.jsonl"}  # a file, and nothing to standard output


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines that begin with our command, without their comments."""
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("metrale-ray ")]
    return [re.sub(r"\s+#.*$", "", line) for line in lines]


NEEDS_A_SERVICE = ("serve", "bench")
LOCAL = [command for command in commands() if "HOST" not in command and shlex.split(command)[1] not in NEEDS_A_SERVICE]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the examples name, and a demo model that is there already."""
    folder = tmp_path_factory.mktemp("readme")
    for checkpoint in (folder / "path" / "to" / "checkpoint", folder / "cache" / demo.NAME):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_tokenizer(write_tiny(checkpoint, "mixtral", max_position_embeddings=128))  # short answers
    shutil.copytree(Path(__file__).parents[1] / "examples", folder / "examples")
    (folder / "engine.yaml").write_text("model: path/to/checkpoint\nep-size: 2\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "one two"}\n{"prompt_token_ids": [1, 2, 3]}\n')
    return folder


@pytest.fixture(scope="module")
def environment(place: Path) -> Iterator[dict[str, str]]:
    """One Ray for all of them: they start faster."""
    with OwnRay(place, num_cpus=4) as ray:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        yield {
            **os.environ,
            **ray.entry,
            "RAY_ADDRESS": ray.address,
            "PATH": path,
            "METRALE_CACHE_DIR": str(place / "cache"),
        }


def run(argv: list[str], place: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, input="hello\n", cwd=place, env=environment, text=True, capture_output=True, timeout=TIMEOUT_S
    )


@pytest.mark.ray
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_python_example_runs(place: Path, environment: dict[str, str], number: int) -> None:
    done = run([sys.executable, "-c", blocks("python")[number]], place, environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.ray
@pytest.mark.parametrize("command", LOCAL)
def test_a_command_runs(place: Path, environment: dict[str, str], command: str) -> None:
    if shlex.split(command)[1] in HERE_ALREADY:
        environment = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    done = run(["bash", "-c", command], place, environment)
    assert done.returncode == 0, done.stderr
    written = WRITES.get(" ".join(shlex.split(command)[1:3]), WRITES.get(shlex.split(command)[1]))
    if ">" in command:
        assert (place / "answers.jsonl").read_text().count("\n") == 2
    elif written is not None:
        assert (place / written).stat().st_size > 0
    else:
        assert done.stdout.strip()


@pytest.mark.ray
def test_the_service_answers_what_is_asked_of_it(place: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (command, *_) = [command for command in commands() if command.startswith("metrale-ray serve ")]
    (curl,) = [block.replace("8000", port) for block in blocks("") if block.startswith("curl ")]
    (bench,) = [command.replace("8000", port) for command in commands() if command.startswith("metrale-ray bench ")]
    (place / "serve.out").touch()
    with (place / "serve.out").open("w") as output, (place / "serve.err").open("w") as errors:
        argv = [*shlex.split(command), "--port", port]
        service = subprocess.Popen(argv, cwd=place, env=environment, stdout=output, stderr=errors)
        try:
            is_up = until(
                lambda: "serving" in (place / "serve.out").read_text() or service.poll() is not None, TIMEOUT_S
            )
            assert is_up, (place / "serve.err").read_text()
            asked = run(["bash", "-c", f"{curl.strip()} --silent --show-error"], place, environment)
            assert json.loads(asked.stdout)["object"] == "chat.completion", asked.stdout
            measured = run(["bash", "-c", bench], place, environment)
            assert measured.returncode == 0, measured.stdout + measured.stderr
            service.send_signal(signal.SIGTERM)
            assert service.wait(TIMEOUT_S) == 0
        finally:
            service.kill()
            service.wait()


def test_every_command_has_flags_that_exist() -> None:
    assert len(commands()) > len(LOCAL) >= 6
    for command in commands():
        make_parser().parse_args(shlex.split(command.partition(" > ")[0])[1:])
