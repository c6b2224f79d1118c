# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is done on a node before Ray starts, carried out by a shell in a home of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from metrale_ray.deploying.node_setup import NodeSetup
from metrale_ray.errors import UserError
from tests.deploying.node_home import Home

VERSION = "0.1.0"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "a home")


def setup(**options: Any) -> NodeSetup:
    return NodeSetup(version=VERSION, **options)


def run(home: Home, wanted: NodeSetup) -> list[subprocess.CompletedProcess[str]]:
    """All steps, until one fails."""
    done = []
    for step in wanted.steps():
        done.append(home.run(step.command))
        if done[-1].returncode:
            break
    return done


def has_package(home: Home, venv: str = "metrale-ray-venv", version: str = VERSION) -> None:
    home.fake(f"{venv}/bin/metrale-ray", f"echo metrale-ray {version}")
    home.fake(f"{venv}/bin/python")
    home.fake(f"{venv}/bin/ray")


def test_a_node_that_has_everything_is_left_as_it_is(home: Home) -> None:
    has_package(home)
    (home.folder / ".bashrc").write_text("alias a=b\n")
    for _ in range(2):
        assert {done.returncode for done in run(home, setup())} == {0}
        assert home.calls() == ["metrale-ray --version"]
    lines = (home.folder / ".bashrc").read_text().splitlines()
    assert lines[0] == "alias a=b"
    assert len(lines) == 2


def test_only_the_user_reads_the_token(home: Home) -> None:
    has_package(home)
    (home.folder / ".ray" / "auth_token").chmod(0o644)
    run(home, setup())
    assert (home.folder / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert (home.folder / ".ray").stat().st_mode & 0o777 == 0o700


def test_the_package_is_installed_where_it_lacks(home: Home) -> None:
    home.fake("programs/python3", '[ "$2" = pip ] || { mkdir -p "$3/bin"; ln -s "$(realpath "$0")" "$3/bin/python"; }')
    done = run(home, setup(venv="~/my venv"))
    assert [step.returncode for step in done] == [0] * len(done)
    make, install = home.calls()
    assert make == f"python3 -m venv {home.folder}/my venv"
    assert install.startswith("python -m pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu")
    assert install.endswith(f"metrale-ray[serve,data]=={VERSION}")


def test_another_version_is_replaced(home: Home) -> None:
    has_package(home, version="0.0.9")
    run(home, setup())
    assert [call.split()[0] for call in home.calls()] == ["metrale-ray", "python"]


def test_a_wheel_is_installed_each_time_with_the_constraints(home: Home) -> None:
    has_package(home)
    wheel = "/dist/metrale_ray-0.1.0-py3-none-any.whl"
    wanted = setup(package=wheel, constraints="/src/constraints.txt")
    assert wanted.files == {
        "~/.metrale-ray/metrale_ray-0.1.0-py3-none-any.whl": wheel,
        "~/.metrale-ray/constraints.txt": "/src/constraints.txt",
    }
    run(home, wanted)
    first, second = home.calls()
    copied = f"{home.folder}/.metrale-ray"
    assert first.endswith(f" -c {copied}/constraints.txt {copied}/metrale_ray-0.1.0-py3-none-any.whl[serve,data]")
    assert "--force-reinstall --no-deps" in second
    assert second.endswith(f"{copied}/metrale_ray-0.1.0-py3-none-any.whl")


@pytest.mark.parametrize("found", [None, "0.0.9"])
def test_without_a_package_a_node_that_lacks_it_is_named(home: Home, found: str | None) -> None:
    if found is not None:
        has_package(home, version=found)
    home.fake("programs/hostname", "echo node-7")
    last = run(home, setup(package="none"))[-1]
    assert last.returncode == 1
    assert f"error: node node-7 needs metrale-ray {VERSION} in ~/metrale-ray-venv; found: " in last.stderr
    assert (found or "No such file") in last.stderr


def test_programs_and_the_token_are_found_by_later_commands(home: Home) -> None:
    has_package(home, "old")
    has_package(home, "my venv")
    run(home, setup(venv="~/old"))
    run(home, setup(venv="~/my venv"))
    found = home.run('command -v ray; echo "$RAY_AUTH_MODE"')
    assert found.stdout.splitlines() == [f"{home.folder}/my venv/bin/ray", "token"]
    assert (home.folder / ".bashrc").read_text().count("export PATH") == 1


def test_a_bashrc_that_is_a_link_stays_one(home: Home) -> None:
    has_package(home)
    (home.folder / "dotfiles").write_text("alias a=b\n")
    (home.folder / ".bashrc").symlink_to("dotfiles")
    has_package(home, "old")
    for venv in ("~/old", "~/metrale-ray-venv"):
        assert run(home, setup(venv=venv))[-1].returncode == 0
    assert (home.folder / ".bashrc").is_symlink()
    assert (home.folder / "dotfiles").read_text().startswith("alias a=b\n")


def test_a_checkpoint_that_is_not_there_is_told_with_the_node(home: Home) -> None:
    has_package(home)
    home.fake("programs/hostname", "echo node-7")
    model = home.folder / "a model"
    last = run(home, setup(model=str(model)))[-1]
    assert last.returncode == 1
    assert last.stderr == f"error: node node-7 has no checkpoint at {model}\n"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert run(home, setup(model=str(model)))[-1].returncode == 0
    assert run(home, setup(model="~/a model"))[-1].returncode == 0


def test_a_checkpoint_of_the_hub_is_fetched(home: Home) -> None:
    has_package(home)
    home.fake("metrale-ray-venv/bin/hf")
    run(home, setup(model="organisation/name"))
    assert home.calls()[-1] == "hf download organisation/name"


def test_a_node_for_gpus_without_a_driver_fails_before_anything_is_installed(home: Home) -> None:
    home.fake("programs/nvidia-smi", "exit 9")
    assert run(home, setup(gpu=True))[-1].returncode == 9
    assert home.calls() == ["nvidia-smi -L"]


def test_torch_for_gpus_comes_from_the_usual_index(home: Home) -> None:
    home.fake("programs/nvidia-smi")
    home.fake("metrale-ray-venv/bin/python")
    run(home, setup(gpu=True))
    assert home.calls()[-1] == f"python -m pip install --quiet metrale-ray[serve,data]=={VERSION}"


def test_packages_of_the_system_are_installed_where_they_lack(home: Home) -> None:
    has_package(home)
    home.fake("programs/sudo")
    home.fake("programs/dpkg", "exit 1")
    run(home, setup(system_packages=("python3-venv",)))
    assert [call for call in home.calls() if call.startswith("sudo")][-1].endswith("install -q -y python3-venv")
    home.fake("programs/dpkg")
    run(home, setup(system_packages=("python3-venv",)))
    assert not [call for call in home.calls() if call.startswith("sudo")]


@pytest.mark.parametrize(
    ("option", "value"),
    [("venv", "relative"), ("python", "bash"), ("package", "-r x"), ("constraints", "x"), ("model", "name")],
)
def test_a_wrong_option_is_refused_by_its_flag(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{option} is '{value}'"):
        setup(**{option: value})
