# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray cluster yaml`: what it writes, asks, refuses and advises."""

from __future__ import annotations

import io
import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from metrale_ray.cli import main
from metrale_ray.cli_cluster import render
from metrale_ray.cli_cluster_flags import GROUPS, TAKES
from metrale_ray.deploying.kubernetes import KubernetesOptions, render_raycluster, render_rayservice

IMAGE = "ami-0123456789abcdef0"
LOCAL = ("--head-ip", "10.0.0.10", "--worker-ips", "10.0.0.11,node-12", "--ssh-user", "me")


class Terminal(io.StringIO):
    """A person who types some lines."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key and a token, and nobody to ask."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    return folder


def write(*argv: str) -> int:
    return main(["cluster", "yaml", *argv])


def test_without_a_file_the_yaml_is_the_answer_and_the_rest_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert write(*LOCAL) == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)
    assert config["provider"]["worker_ips"] == ["10.0.0.11", "node-12"]
    assert config["auth"] == {"ssh_user": "me", "ssh_private_key": "~/.ssh/id_ed25519"}
    assert "  ray up FILE -y " in err


@pytest.mark.parametrize(
    "argv",
    [
        LOCAL,
        (*LOCAL, "--gpu", "--venv", "~/a b", "--package", "metrale-ray @ https://a.b/c#d", "--model", "/m o"),
        (*LOCAL, "--ranks-per-node", "2", "--ep-size", "5", "--ssh-key", "none"),
        ("--provider", "aws", "--image", IMAGE, "--ranks", "4", "--ssh-key", "/k", "--key-name", "my key"),
        ("--provider", "gcp", "--project", "my-project", "--disk-gb", "300"),
        ("--provider", "kubernetes", "--kind", "raycluster", "--ranks", "4", "--data-claim", "data"),
        ("--provider", "kubernetes", "--gpu", "--model", "/models/m"),
    ],
)
def test_the_first_line_is_the_command_that_writes_the_same_again(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(*argv) == 0
    first = capsys.readouterr().out
    words = shlex.split(first.partition("\n")[0].removeprefix("# "))
    assert words[0] == "metrale-ray"
    assert main(words[1:]) == 0
    assert capsys.readouterr().out == first


def test_a_file_is_written_once_and_again_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a cluster.yaml"
    assert write(*LOCAL, "-o", str(path)) == 0
    first = path.read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert f"wrote {path}" in err
    assert f"ray up '{path}' -y" in err
    assert write(*LOCAL, "--name", "other", "--output", str(path)) == 2
    assert "is there already; --force writes over it" in capsys.readouterr().err
    assert path.read_text() == first
    assert write(*LOCAL, "--name", "other", "-o", str(path), "--force") == 0
    assert yaml.safe_load(path.read_text())["cluster_name"] == "other"


def test_a_file_in_a_folder_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none" / "x.yaml", tmp_path):
        assert write(*LOCAL, "-o", str(path), "--force") == 2
        assert "name a file in a folder that is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--head-ip is missing: address of the first machine; give it, or answer on a terminal"),
        (("--provider", "aws"), "--image is missing"),
        (("--provider", "gcp", "--yes"), "--project is missing"),
        (("--provider", "azure"), "--provider is 'azure'; give one of local, aws, gcp, kubernetes"),
        (("--provider", "aws", "--image", IMAGE, "--head-ip", "10.0.0.1"), "--head-ip is not for --provider aws"),
        (("--provider", "kubernetes", "--ssh-user", "me"), "--ssh-user is not for --provider kubernetes"),
        (("--provider", "kubernetes", "--kind", "pod"), "--kind is 'pod'; give rayservice or raycluster"),
        (("--provider", "kubernetes", "--memory", "64Gi\n- evil"), "--memory is '64Gi\\n- evil'; give one line"),
        (("--provider", "kubernetes", "--memory", "lots"), "memory is 'lots'"),
        (("--head-ip", "10.0.0.10", "--worker-ips", "10.0.0.11,,"), "--worker-ips"),
        (("--head-ip", "10.0.0.10", "--worker-ips", "10.0.0.300"), "--worker-ips is '10.0.0.300'"),
        (("--head-ip", "10.0.0.10\n"), "--head-ip is '10.0.0.10\\n'"),
        (("--head-ip", "10.0.0.10", "--ep-size", "2"), "--ep-size 2 needs 2 machines"),
        (("--head-ip", "10.0.0.10", "--ep-size", "two"), "--ep-size"),
        (("--head-ip", "10.0.0.10", "--nam", "x"), "--nam"),
    ],
)
def test_what_is_missing_or_wrong_is_named_and_nothing_is_written(
    argv: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    assert write(*argv, "-o", str(path)) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_on_a_terminal_what_is_missing_is_asked_for_until_the_answer_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["local", "head", "", "10.0.0.10", "10.0.0.11,,", "10.0.0.11, 10.0.0.12", "", "root", "m", "/models/m"]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(typed) + "\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert write("--name", "mine") == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)
    assert config["cluster_name"] == "mine"
    assert config["provider"] == {"type": "local", "head_ip": "10.0.0.10", "worker_ips": ["10.0.0.11", "10.0.0.12"]}
    assert config["auth"] == {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    assert any("/models/m/config.json" in command for command in config["setup_commands"])
    assert "where: local, aws, gcp, kubernetes [local]: " in err
    assert "--head-ip is 'head'; give an IPv4 address" in err
    assert "--worker-ips: '10.0.0.11,,' must be hosts with single commas" in err
    assert "--model is 'm'; give a path" in err


def test_answers_that_end_too_early_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("aws\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert write() == 2
    assert "the answers ended before --image was given" in capsys.readouterr().err


def test_with_yes_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("gcp\n"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert write("--yes", "--head-ip", "10.0.0.10", "--ssh-user", "me") == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["provider"] == {"type": "local", "head_ip": "10.0.0.10", "worker_ips": []}
    assert "where: " not in err


def test_a_token_that_is_missing_is_made_first(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(*LOCAL) == 0
    err = capsys.readouterr().err
    assert err.index("(umask 077; ray get-auth-token --generate > /dev/null)") < err.index("ray up FILE")
    assert write(*LOCAL, "--token-file", "~/tokens/mine") == 0
    assert f"> {home}/tokens/mine)" in capsys.readouterr().err


def test_the_command_that_makes_a_token_makes_one_that_only_the_user_reads(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(*LOCAL, "--token-file", "~/token")
    (command,) = [line.partition("  #")[0] for line in capsys.readouterr().err.splitlines() if "umask" in line]
    assert os.system(command) == 0
    assert (home / "token").stat().st_mode & 0o777 == 0o600
    assert len((home / "token").read_text()) == 64


def test_a_token_that_others_may_read_and_a_key_that_is_missing_are_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = home / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    assert write(*LOCAL) == 0
    out, err = capsys.readouterr()
    assert f"warning: others on this machine may read Ray's token; chmod 600 {token}" in err
    assert "warning: --ssh-key ~/.ssh/id_ed25519 is not on this machine" in err
    assert "umask" not in err
    assert "secret" not in out + err
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id_ed25519").touch()
    token.chmod(0o600)
    assert write(*LOCAL) == 0
    assert "warning" not in capsys.readouterr().err


def test_what_comes_next_is_told_with_the_address_and_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    write(*LOCAL, "--model", "/models/m")
    err = capsys.readouterr().err
    assert "ray exec FILE 'metrale-ray cluster wait'" in err
    assert "ray exec FILE 'metrale-ray doctor --address 10.0.0.10:6379 --model /models/m'" in err
    write("--provider", "gcp", "--project", "my-project")
    assert "doctor --address auto'" in capsys.readouterr().err


def test_kubernetes_is_given_what_the_flags_say() -> None:
    options = KubernetesOptions(ranks=4, ranks_per_pod=2, gpu=True, image="a/b:1")
    settings = {"provider": "kubernetes", "ep_size": 4, "ranks_per_pod": 2, "gpu": True, "image": "a/b:1"}
    assert render(settings).partition("\n")[2] == render_rayservice(options)
    assert render({**settings, "kind": "raycluster"}).partition("\n")[2] == render_raycluster(options)


def test_every_option_of_kubernetes_but_rays_version_has_a_flag() -> None:
    known = {"ranks" if flag.setting == "ep_size" else flag.setting for flag in TAKES["kubernetes"]}
    assert known - {"provider", "kind"} == set(KubernetesOptions.__dataclass_fields__) - {"ray_version"}


def test_every_flag_is_of_some_provider() -> None:
    taken = {flag.setting for flags in TAKES.values() for flag in flags}
    assert {flag.setting for title, flags in GROUPS.items() if title != "output" for flag in flags} == taken
