# SPDX-License-Identifier: MIT OR Apache-2.0
"""deploy/Dockerfile and .dockerignore: linted, and consistent with the package that they put into an image."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from metrale_ray.serve.http.settings import HttpSettings
from metrale_ray.serve.options import ServiceOptions
from tests.deploying.dockerfile import Instruction, ignore_patterns, instructions, is_ignored

TOP = Path(__file__).parents[2]
DOCKERFILE = TOP / "deploy" / "Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())
PATTERNS = ignore_patterns((TOP / ".dockerignore").read_text())
INSTRUCTIONS = instructions(DOCKERFILE.read_text())
LAST_STAGE = max(each.stage for each in INSTRUCTIONS)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def of_image(name: str) -> list[Instruction]:
    """The instructions of this name in the stage that is the image."""
    return [each for each in INSTRUCTIONS if each.name == name and each.stage == LAST_STAGE]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", path], text=True, capture_output=True, check=False, timeout=60)


def test_the_linter_finds_nothing() -> None:
    done = hadolint(DOCKERFILE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_finds_a_planted_mistake(tmp_path: Path) -> None:
    planted = tmp_path / "Dockerfile"
    planted.write_text(DOCKERFILE.read_text().replace("USER 1000:1000", "USER root"))
    assert "DL3002" in hadolint(planted).stdout


def test_whatever_is_copied_is_there_and_reaches_the_build() -> None:
    sources = [word for each in INSTRUCTIONS if each.name == "COPY" and not each.flags for word in each.words[:-1]]
    assert "metrale_ray" in sources
    for source in sources:
        assert (TOP / source).exists(), source
        assert not is_ignored(source, PATTERNS), source
    reaching = {path.name for path in TOP.iterdir() if not is_ignored(path.name, PATTERNS)}
    assert reaching == set(sources), "what reaches the build is what is copied"


def test_copies_between_stages_name_stages() -> None:
    names = {each.rest.rpartition(" AS ")[2]: each.stage for each in INSTRUCTIONS if each.name == "FROM"}
    for each in INSTRUCTIONS:
        if each.name == "COPY" and each.flags:
            assert names[each.flags["from"]] < each.stage


def test_the_whole_package_reaches_the_build_and_what_was_compiled_of_it_does_not() -> None:
    files = [path.relative_to(TOP).as_posix() for path in (TOP / "metrale_ray").rglob("*") if path.is_file()]
    for path in files:
        assert is_ignored(path, PATTERNS) == ("__pycache__" in path), path
    assert "metrale_ray/py.typed" in files


def test_the_package_holds_its_data() -> None:
    package = TOP / "metrale_ray"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            name = path.relative_to(TOP).as_posix()
            listed = [f"{owner.replace('.', '/')}/{each}" for owner, owned in patterns.items() for each in owned]
            assert any(fnmatch.fnmatch(name, each) for each in listed), f"{name} is in no package-data"


@pytest.mark.parametrize(
    "path", [".env", ".git/config", "id_rsa", "deploy/.env", "shared/x", ".venv/bin/python", "model/config.json"]
)
def test_nothing_else_reaches_the_build(path: str) -> None:
    assert is_ignored(path, PATTERNS)


@pytest.mark.parametrize(
    ("path", "patterns", "ignored"),
    [
        ("a/b", ["a"], True),
        ("a/b", ["*"], True),
        ("a/b", ["*", "!a"], False),
        ("a/b/c.pyc", ["*", "!a", "**/*.py[cod]"], True),
        ("c.pyc", ["**/*.py[cod]"], True),
        ("a/b.py", ["**/*.py[cod]"], False),
        ("a/b", ["b"], False),
        ("ab", ["a"], False),
    ],
)
def test_patterns_mean_what_they_mean_to_docker(path: str, patterns: list[str], ignored: bool) -> None:
    assert is_ignored(path, patterns) is ignored


def test_the_image_runs_the_command_as_a_user_that_kubernetes_knows_is_not_root() -> None:
    (user,) = of_image("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.rest)
    (entrypoint,) = of_image("ENTRYPOINT")
    assert entrypoint.words == ["/usr/bin/tini", "--", "metrale-ray"]
    assert "metrale-ray" in PROJECT["project"]["scripts"]


def test_the_image_is_probed_at_a_route_that_needs_no_key_on_the_usual_port() -> None:
    (check,) = of_image("HEALTHCHECK")
    url = check.rest.rpartition('"http://')[2].rstrip('"]')
    host, _, path = url.partition("/")
    options = ServiceOptions()
    assert host == f"{options.host}:{options.port}"
    assert f"/{path}" in HttpSettings().keyless_paths
    (port,) = of_image("EXPOSE")
    assert port.rest == str(options.port)


def test_what_kuberay_calls_is_installed_and_on_the_path_of_every_shell() -> None:
    run = " ".join(each.rest for each in of_image("RUN"))
    assert re.search(r"apt-get install [^&]* wget\b", run)
    assert "PATH=/opt/metrale-ray/bin:" in " ".join(each.rest for each in of_image("ENV"))
    assert "PATH=/opt/metrale-ray/bin:" in run.partition("/etc/profile.d/")[0], "a login shell sets PATH anew"


def test_the_image_holds_no_secret_and_reports_to_nobody() -> None:
    for each in INSTRUCTIONS:
        if each.name in ("ENV", "ARG"):
            assert not SECRET.search(each.rest), each.rest
    assert "RAY_USAGE_STATS_ENABLED=0" in of_image("ENV")[0].rest.split()


def test_what_is_installed_is_pinned() -> None:
    installs = [
        command
        for each in INSTRUCTIONS
        if each.name == "RUN"
        for command in each.rest.split(" && ")
        if "pip install" in command
    ]
    assert len(installs) == 3
    for command in installs:
        assert "--constraint constraints.txt" in command or "--no-index --no-deps" in command, command
    pins = (TOP / "constraints.txt").read_text()
    for name in ("torch", "ray", "transformers"):
        assert re.search(rf"^{name}==", pins, re.MULTILINE)


def test_the_extras_that_are_installed_exist() -> None:
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', DOCKERFILE.read_text())
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    assert "serve" in extras.split(",")


def test_the_default_python_is_one_that_the_package_takes() -> None:
    (argument,) = [each.rest for each in INSTRUCTIONS if each.name == "ARG" and each.stage == -1]
    (version,) = re.findall(r"^PYTHON_IMAGE=python:3\.(\d+)-slim", argument)
    (least,) = re.findall(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert int(version) >= int(least)


@pytest.mark.parametrize(("index", "flags"), [("", []), ("https://a.b/c", ["--index-url", "https://a.b/c"])])
def test_torch_alone_comes_from_its_own_index_where_one_is_given(index: str, flags: list[str]) -> None:
    (install,) = [each.rest for each in INSTRUCTIONS if each.name == "RUN" and each.rest.endswith(" torch")]
    script = f'pip() {{ printf "%s\\n" "$@"; }}; {install}'
    done = subprocess.run(["sh", "-c", script], env={"TORCH_INDEX": index}, text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["install", *flags, "--no-deps", "--constraint", "constraints.txt", "torch"]


def test_no_index_is_named() -> None:
    arguments = [each.rest for each in INSTRUCTIONS if each.name == "ARG" and "INDEX" in each.rest]
    assert arguments == ["TORCH_INDEX", "PIP_INDEX_URL"]
