# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is done on each node before Ray starts there, as commands of a shell.

Rules. Each command may run again on a node where it ran before, and then changes nothing. One that fails says on
standard error what the node lacks. Ray's launcher reads ~/.bashrc before each command, so that is where PATH is set:
`ray down` and `ray exec` find `ray` nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from metrale_ray.deploying import values
from metrale_ray.deploying.templates import shell_path, shell_word

NODE_FOLDER = "~/.metrale-ray"
TOKEN_PATH = "~/.ray/auth_token"  # where Ray looks for it by itself
BASHRC_MARK = "# metrale-ray: PATH of Ray"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NO_PACKAGE = "none"


@dataclass(frozen=True)
class Step:
    """A command and the comment before it."""

    comment: str
    command: str


@dataclass(frozen=True)
class NodeSetup:
    """What every node has: `package` in `venv`, made by `python`, and `model`.

    `version` is the one that `package` must give; `package` "none" only checks. A package that is a wheel, and
    `constraints`, are files of the launching machine, and are copied to the nodes.
    """

    version: str
    venv: str = "~/metrale-ray-venv"
    python: str = "python3"
    package: str | None = None
    constraints: str | None = None
    model: str | None = None
    gpu: bool = False
    system_packages: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        values.path(self.venv, "--venv")
        values.python(self.python, "--python")
        if self.package is not None:
            values.requirement(self.package, "--package")
        if self.constraints is not None:
            values.path(self.constraints, "--constraints")
        if self.model is not None:
            values.model(self.model, "--model")

    @property
    def files(self) -> dict[str, str]:
        """Files that are copied to the nodes: their paths there, and on the launching machine."""
        paths = [self.package] if self._is_wheel else []
        paths += [self.constraints] if self.constraints is not None else []
        return {_copied(path): path for path in paths if path is not None}

    @property
    def path_command(self) -> str:
        """Puts the environment's programs first."""
        return f'export PATH={shell_path(self.venv)}/bin:"$PATH"'

    def steps(self) -> list[Step]:
        """The commands, in order."""
        steps = [Step("Only this user reads the token.", f"chmod 700 ~/.ray && chmod 600 {TOKEN_PATH}")]
        if self.gpu:
            steps.append(Step("A node without a working driver is told of here.", "nvidia-smi -L"))
        if self.system_packages and self.package != NO_PACKAGE:
            steps.append(self._system_step())
        steps.append(self._package_step())
        steps.append(self._path_step())
        if self.model is not None:
            steps.append(self._model_step())
        return steps

    def pip(self, *words: str) -> str:
        """A command that installs into the environment."""
        return " ".join([f"{shell_path(self.venv)}/bin/python -m pip install --quiet", *map(shell_word, words)])

    @property
    def _is_wheel(self) -> bool:
        return self.package is not None and self.package.endswith(".whl")

    def _system_step(self) -> Step:
        names = " ".join(self.system_packages)
        wait = "-o DPkg::Lock::Timeout=300"  # a new machine's own updates hold the lock for some minutes
        install = f"sudo apt-get {wait} update -q && sudo apt-get {wait} install -q -y {names}"
        return Step("Packages of the system.", f"dpkg -s {names} > /dev/null 2>&1 || {{ {install}; }}")

    def _package_step(self) -> Step:
        program, wanted = f"{shell_path(self.venv)}/bin/metrale-ray", f"metrale-ray {self.version}"
        if self.package == NO_PACKAGE:
            fail = f'echo "error: node $(hostname) needs {wanted} in {self.venv}; found: $found" >&2; exit 1'
            command = f"found=$({program} --version 2>&1)\n[ \"$found\" = '{wanted}' ] || {{ {fail}; }}"
            return Step(f"The environment is there already, with {wanted}.", command)
        make = f"{{ [ -x {shell_path(self.venv)}/bin/python ] || {self.python} -m venv {shell_path(self.venv)}; }}"
        if self._is_wheel:
            # The same name may hold another build, so it is installed each time.
            again = self._install("--force-reinstall", "--no-deps", extras="")
            return Step("The wheel, copied to each node.", f"{make} &&\n{self._install()} &&\n{again}")
        lines = [f"[ \"$({program} --version 2>&1)\" = '{wanted}' ] || {{", f"  {make} &&", f"  {self._install()}", "}"]
        return Step(f"{wanted}, unless the environment has it.", "\n".join(lines))

    def _install(self, *options: str, extras: str = "[serve,data]") -> str:
        words = list(options)
        if not self.gpu:
            words += ["--extra-index-url", CPU_INDEX]  # torch without CUDA: some GB less
        command = self.pip(*words)
        if self.constraints is not None:
            command += f" -c {shell_path(_copied(self.constraints))}"
        if not self._is_wheel:
            return f"{command} {shell_word(self.package or f'metrale-ray{extras}=={self.version}')}"
        return f"{command} {shell_path(_copied(self.package or ''))}{shell_word(extras) if extras else ''}"

    def _path_step(self) -> Step:
        line = shell_word(f"{self.path_command} RAY_AUTH_MODE=token {BASHRC_MARK}")
        forget = f"sed -i --follow-symlinks '/{BASHRC_MARK}$/d' ~/.bashrc"
        lines = [
            f"line={line}",
            'touch ~/.bashrc && { grep -qxF "$line" ~/.bashrc || {',
            f"  {forget} && printf '%s\\n' \"$line\" >> ~/.bashrc",
            "}; }",
        ]
        command = "\n".join(lines)
        return Step("`ray exec`, `ray attach` and `ray down` find Ray, and use the token.", command)

    def _model_step(self) -> Step:
        assert self.model is not None
        if not self.model.startswith(("/", "~/")):
            return Step(
                "The checkpoint, in each node's cache.", f"{shell_path(self.venv)}/bin/hf download {self.model}"
            )
        fail = f'echo "error: node $(hostname) has no checkpoint at {self.model}" >&2; exit 1'
        command = f"[ -f {shell_path(self.model)}/config.json ] || {{ {fail}; }}"
        return Step("The checkpoint is at the same path on each node.", command)


def _copied(path: str) -> str:
    """Where a file of the launching machine lies on a node."""
    return f"{NODE_FOLDER}/{PurePosixPath(path).name}"
