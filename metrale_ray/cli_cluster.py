# SPDX-License-Identifier: MIT OR Apache-2.0
"""`metrale-ray cluster yaml`: a configuration for `ray up` or for Kubernetes, from flags and a few answers.

Rules. The first line of what is written is the command that writes it again. On a terminal, what is missing is asked
for; elsewhere, and with --yes, defaults are taken, and what has none is an error that names the flag. Nothing is
started, no secret is written, and a file that is there is kept unless --force is given. What to do next goes to
standard error.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import metrale_ray
from metrale_ray import cli_wait
from metrale_ray.cli_cluster_flags import KINDS, PROVIDERS, TAKES, flag_of
from metrale_ray.cli_cluster_questions import NO_KEY, asker, complete, provider, take_default
from metrale_ray.deploying import ray_up, values
from metrale_ray.deploying.kubernetes import KubernetesOptions, render_raycluster, render_rayservice
from metrale_ray.deploying.node_setup import TOKEN_PATH, NodeSetup
from metrale_ray.deploying.ports import DASHBOARD_PORT, GCS_PORT
from metrale_ray.errors import UserError

NOT_REPEATED = ("command", "cluster", "output", "force", "yes")
SETUP_SETTINGS = ("venv", "python", "package", "constraints", "torch_index", "model", "gpu")
KUBERNETES = PROVIDERS[-1]
THE_FILE = "FILE"  # what the advice says where the YAML went to standard output


def cluster(given: Mapping[str, Any], answers: TextIO) -> int:
    """One of the commands of `metrale-ray cluster`."""
    return cli_wait.wait(given, answers) if given["cluster"] == "wait" else cluster_yaml(given, answers)


def cluster_yaml(given: Mapping[str, Any], answers: TextIO) -> int:
    """Write the configuration that the flags, and what is asked, describe."""
    output = Path(given["output"]) if "output" in given else None
    if output is not None:
        _check_output(output, force="force" in given)
    settings = {name: value for name, value in given.items() if name not in NOT_REPEATED}
    is_asked = "yes" not in given and sys.stdin.isatty() and sys.stderr.isatty()
    answer = asker(sys.stderr, sys.stdin) if is_asked else take_default
    # The provider first: what else is needed depends on it.
    settings = complete(complete(settings, answer), answer)
    text = render(settings)
    if output is None:
        answers.write(text)
        answers.flush()
    else:
        output.write_text(text, encoding="utf-8")
        print(f"wrote {output}", file=sys.stderr)
    for line in advice(settings, str(output) if output is not None else THE_FILE):
        print(line, file=sys.stderr)
    return 0


def render(settings: Mapping[str, Any]) -> str:
    """The text for `settings`, which are complete. Its first line is the command that gives it."""
    place = provider(settings["provider"], "--provider")
    known = {flag.setting for flag in TAKES[place]}
    for name, value in settings.items():
        if name not in known:
            raise UserError(f"{flag_of(name)} is not for --provider {place}; leave it out")
        if not all(text.isprintable() for text in ([value] if isinstance(value, str) else [])):
            raise values.wrong(value, flag_of(name), "one line of printable letters")
    return f"# {_command(settings)}\n{_render(place, settings)}"


def advice(settings: Mapping[str, Any], file: str) -> list[str]:
    """What is still missing on this machine, and the commands that come next."""
    if settings["provider"] == KUBERNETES:
        return [
            "next:",
            f"  kubectl apply -f {shlex.quote(file)}",
            "  deploy/README.md says what it needs: KubeRay, a Secret, a claim",
        ]
    return [*_missing_files(settings), "next:", *(f"  {line}" for line in _next_commands(settings, shlex.quote(file)))]


def _render(place: str, settings: Mapping[str, Any]) -> str:
    options = {name: value for name, value in settings.items() if name != "provider"}
    match place:
        case "local":
            return ray_up.render_on_premise(_on_premise(options))
        case "aws":
            return ray_up.render_aws(ray_up.AwsOptions(**_with_setup(options, ray_up.UBUNTU_PACKAGES)))
        case "gcp":
            return ray_up.render_gcp(ray_up.GcpOptions(**_with_setup(options, ray_up.UBUNTU_PACKAGES)))
        case _:
            return _kubernetes(options)


def _on_premise(options: Mapping[str, Any]) -> ray_up.OnPremiseOptions:
    ranks = (1 + len(options.get("worker_ips", ()))) * options.get("ranks_per_node", 1)
    return ray_up.OnPremiseOptions(**{"ep_size": ranks, **_with_setup(options, ())})


def _with_setup(options: Mapping[str, Any], system_packages: tuple[str, ...]) -> dict[str, Any]:
    setup = {name: options[name] for name in SETUP_SETTINGS if name in options}
    rest = {name: value for name, value in options.items() if name not in SETUP_SETTINGS}
    if rest.get("ssh_key") == NO_KEY:
        del rest["ssh_key"]
    return {**rest, "setup": NodeSetup(version=metrale_ray.__version__, system_packages=system_packages, **setup)}


def _kubernetes(options: Mapping[str, Any]) -> str:
    kind = options.get("kind", KINDS[0])
    if kind not in KINDS:
        raise values.wrong(kind, "--kind", " or ".join(KINDS))
    rest = {"ranks" if name == "ep_size" else name: value for name, value in options.items() if name != "kind"}
    return (render_rayservice if kind == KINDS[0] else render_raycluster)(KubernetesOptions(**rest))


def _command(settings: Mapping[str, Any]) -> str:
    words = ["metrale-ray", "cluster", "yaml"]
    for flag in TAKES[settings["provider"]]:
        value = settings.get(flag.setting)
        if flag.switch:
            words += [flag.names[0]] if value else []
        elif value not in (None, ()):
            words += [flag.names[0], ",".join(value) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)


def _missing_files(settings: Mapping[str, Any]) -> list[str]:
    """What `ray up` would look for on this machine and not find, or find open to others."""
    lines = []
    for setting in ("ssh_key", "package", "constraints"):
        path = settings.get(setting, "")
        if path.startswith(("/", "~/")) and not Path(path).expanduser().exists():
            lines.append(f"warning: {flag_of(setting)} {path} is not on this machine; `ray up` needs it where it runs")
    token = Path(settings.get("token_file", TOKEN_PATH)).expanduser()
    if token.exists() and token.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        lines.append(f"warning: others on this machine may read Ray's token; chmod 600 {shlex.quote(str(token))}")
    return lines


def _next_commands(settings: Mapping[str, Any], file: str) -> list[str]:
    address = f"{settings['head_ip']}:{GCS_PORT}" if "head_ip" in settings else "auto"
    model = f" --model {shlex.quote(settings['model'])}" if "model" in settings else ""
    doctor = f"metrale-ray doctor --address {address}{model}"
    commands = [
        (f"ray up {file} -y", "starts the cluster"),
        (f"ray exec {file} 'metrale-ray cluster wait'", "until every machine is there, or a name and a reason"),
        (f"ray exec {file} {shlex.quote(doctor)}", "are the machines fit, and alike?"),
        (
            f"ray dashboard {file}",
            f"in another terminal: http://127.0.0.1:{DASHBOARD_PORT}, for jobs and `serve deploy`",
        ),
        (f"ray down {file} -y", "stops the cluster"),
    ]
    token = settings.get("token_file", TOKEN_PATH)
    if not Path(token).expanduser().exists():
        commands.insert(0, (_make_token(token), "makes Ray's token"))
    width = min(60, max(len(command) for command, _ in commands))
    return [f"{command:{width}}  # {comment}" for command, comment in commands]


def _make_token(path: str) -> str:
    if path == TOKEN_PATH:
        return "(umask 077; ray get-auth-token --generate > /dev/null)"
    make = "python3 -c 'import secrets; print(secrets.token_hex(32), end=\"\")'"
    return f"(umask 077; {make} > {shlex.quote(os.path.expanduser(path))})"


def _check_output(path: Path, *, force: bool) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--output is {path}, and its folder is not there; name a file in a folder that is")
    if path.exists() and not force:
        raise UserError(f"{path} is there already; --force writes over it")
