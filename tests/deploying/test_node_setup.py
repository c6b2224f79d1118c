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
PIP = "python -m pip install --quiet --no-input --disable-pip-version-check"


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
    assert install == f"{PIP} metrale-ray[serve,data]=={VERSION}"


def test_an_environment_that_was_made_by_half_is_made_whole(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/python", '[ "$3" = install ]')  # as where python3-venv is missing: without pip
    home.fake("programs/python3")
    run(home, setup())
    assert [call.split(" -m ")[1].split()[0] for call in home.calls()] == ["pip", "venv", "pip"]


def test_a_node_without_python_says_so(home: Home) -> None:
    last = run(home, setup(python="python3.99"))[-1]
    assert last.returncode != 0
    assert "python3.99: command not found" in last.stderr


def test_a_node_without_pgrep_is_named(home: Home) -> None:
    home.fake("programs/hostname", "echo node-7")
    (command,) = [step.command for step in setup().steps() if "pgrep" in step.command]
    assert home.run(command).returncode == 0
    done = home.run(f"PATH='{home.programs}'; {command}")
    assert done.returncode == 1
    assert "error: node node-7 has no pgrep; install procps\n" in done.stderr


def test_torch_alone_comes_from_an_index_of_its_own(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/python")
    run(home, setup(torch_index="https://index.example.org/whl/cpu", constraints="/c"))
    limits = f"-c {home.folder}/.metrale-ray/constraints.txt"
    assert home.calls()[1:] == [
        f"{PIP} --index-url https://index.example.org/whl/cpu --no-deps {limits} torch",
        f"{PIP} {limits} metrale-ray[serve,data]=={VERSION}",
    ]


def test_nodes_that_share_a_home_install_one_at_a_time(home: Home) -> None:
    home.fake("metrale-ray-venv/bin/python", "! flock -n ~/.metrale-ray/setup.lock true || echo free >> ~/calls")
    run(home, setup())
    assert home.calls()[-1] == f"{PIP} metrale-ray[serve,data]=={VERSION}"


def test_what_is_asked_for_otherwise_is_installed_again_once(home: Home) -> None:
    has_package(home)
    (home.folder / ".bashrc").write_text("set -o noclobber\n")
    other = setup(package="metrale-ray[serve,data] @ git+https://example.org/x@1")
    for wanted, num_installed in ((setup(), 0), (other, 1), (other, 0), (setup(package="metrale-ray==0.1.0"), 1)):
        assert run(home, wanted)[-1].returncode == 0
        assert len([call for call in home.calls() if call.startswith(PIP)]) == num_installed


def test_another_version_is_replaced(home: Home) -> None:
    has_package(home, version="0.0.9")
    run(home, setup())
    assert home.calls()[-1] == f"{PIP} metrale-ray[serve,data]=={VERSION}"


def test_a_wheel_is_installed_with_the_constraints_whenever_either_has_changed(home: Home) -> None:
    has_package(home)
    wheel = "/dist/metrale_ray-0.1.0-py3-none-any.whl"
    wanted = setup(package=wheel, constraints="/src/my limits")
    assert wanted.files == {
        "~/.metrale-ray/metrale_ray-0.1.0-py3-none-any.whl": wheel,
        "~/.metrale-ray/constraints.txt": "/src/my limits",
    }
    copied = home.folder / ".metrale-ray"
    copied.mkdir()
    for name in ("metrale_ray-0.1.0-py3-none-any.whl", "constraints.txt"):
        (copied / name).write_text(f"a {name}")
        run(home, setup(package=wheel, constraints="/src/my limits"))
    first, second = [call for call in home.calls() if call.startswith(PIP)][-2:]
    run(home, wanted)
    assert home.calls() == ["metrale-ray --version"]
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


def test_what_a_bashrc_ends_with_stays_whole(home: Home) -> None:
    (home.folder / ".bashrc").write_text("alias a='b'")  # no end of the line
    for venv in ("old", "metrale-ray-venv"):
        has_package(home, venv)
        assert run(home, setup(venv=f"~/{venv}"))[-1].returncode == 0
    assert (home.folder / ".bashrc").read_text().splitlines()[0] == "alias a='b'"
    assert home.run("command -v ray").stdout == f"{home.folder}/metrale-ray-venv/bin/ray\n"


def test_a_bashrc_that_ends_early_is_told_and_can_be_mended_as_told(home: Home) -> None:
    has_package(home)
    home.fake("programs/hostname", "echo node-7")
    bashrc = home.folder / ".bashrc"
    bashrc.write_text("echo hello\n[ -n x ] && return\n")
    last = run(home, setup())[-1]
    assert last.returncode == 1
    assert "error: ~/.bashrc of node node-7 ends early" in last.stderr
    *before, line = bashrc.read_text().splitlines(keepends=True)
    bashrc.write_text("".join([line, *before]))
    assert run(home, setup())[-1].returncode == 0
    assert bashrc.read_text() == "".join([line, *before])


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


def test_packages_of_the_system_are_installed_where_they_lack(home: Home) -> None:
    has_package(home)
    home.fake("programs/sudo")
    home.fake("programs/dpkg", "exit 1")
    run(home, setup(system_packages=("python3-venv",)))
    last = [call for call in home.calls() if call.startswith("sudo")][-1]
    assert last.startswith("sudo -n env DEBIAN_FRONTEND=noninteractive apt-get ")  # a password would be waited for
    assert last.endswith("install -q -y python3-venv")
    home.fake("programs/dpkg")
    run(home, setup(system_packages=("python3-venv",)))
    assert not [call for call in home.calls() if call.startswith("sudo")]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("venv", "relative"),
        ("python", "bash"),
        ("package", "-r x"),
        ("constraints", "x"),
        ("model", "name"),
    ],
)
def test_a_wrong_option_is_refused_by_its_flag(option: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{option} is '{value}'"):
        setup(**{option: value})


@pytest.mark.parametrize(
    "options",
    [{"torch_index": "https://index.example.org/cpu"}, {"constraints": "/c"}],
    ids=lambda options: next(iter(options)),
)
def test_what_is_for_pip_is_refused_where_pip_installs_nothing(options: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"is for what pip installs, which --package none forbids"):
        setup(package="none", **options)


def test_an_index_is_a_url_without_a_password() -> None:
    with pytest.raises(UserError, match=r"--torch-index is 'https://me:secret@a.b/'; give a URL"):
        setup(torch_index="https://me:secret@a.b/")
