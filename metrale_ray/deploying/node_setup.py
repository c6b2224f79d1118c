# SPDX-License-Identifier: MIT OR Apache-2.0
"""What is done on each node before Ray starts there, as commands of a shell.

Rules. Each command may run again on a node where it ran before, and then changes nothing. One that fails says on
standard error what the node lacks. None asks anything: Ray's launcher gives commands a terminal, and nobody is there.
Nodes may share a home, so one at a time installs. Ray's launcher reads ~/.bashrc before each command, so that is where
PATH is set: `ray down` and `ray exec` find `ray` nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from metrale_ray.deploying import values
from metrale_ray.deploying.templates import shell_path, shell_word
from metrale_ray.errors import UserError

NODE_FOLDER = "~/.metrale-ray"
TOKEN_PATH = "~/.ray/auth_token"  # where Ray looks for it by itself
BASHRC_MARK = "# metrale-ray: PATH of Ray"
CONSTRAINTS_PATH = f"{NODE_FOLDER}/constraints.txt"
NO_PACKAGE = "none"
EXTRAS = "[serve,data]"
PIP_INSTALL = "-m pip install --quiet --no-input --disable-pip-version-check"
ONE_AT_A_TIME = f"mkdir -p {NODE_FOLDER}; exec 9>> {NODE_FOLDER}/setup.lock; flock 9 || exit 1"


@dataclass(frozen=True)
class Step:
    """A command and the comment before it."""

    comment: str
    command: str


PROGRAMS = Step(
    "`ray up` leaves a Ray alone that this program finds.",
    'command -v pgrep > /dev/null || { echo "error: node $(hostname) has no pgrep; install procps" >&2; exit 1; }',
)


@dataclass(frozen=True)
class NodeSetup:
    """What every node has: `package` in `venv`, made by `python`, and `model`.

    `version` is the one that `package` must give; `package` "none" only checks. A package that is a wheel, and
    `constraints`, are files of the launching machine, and are copied to the nodes. `torch_index`: where torch, and
    nothing else, comes from; without it everything comes from where the nodes' own pip takes it.
    """

    version: str
    venv: str = "~/metrale-ray-venv"
    python: str = "python3"
    package: str | None = None
    constraints: str | None = None
    torch_index: str | None = None
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
        if self.torch_index is not None:
            values.index_url(self.torch_index, "--torch-index")
        for value, flag in ((self.constraints, "--constraints"), (self.torch_index, "--torch-index")):
            if value is not None and self.package == NO_PACKAGE:
                raise UserError(f"{flag} is for what pip installs, which --package none forbids; leave one of them out")
        if self.model is not None:
            values.model(self.model, "--model")

    @property
    def files(self) -> dict[str, str]:
        """Files that are copied to the nodes: their paths there, and on the launching machine."""
        files = {self._wheel_path: self.package} if self._is_wheel else {}
        files |= {CONSTRAINTS_PATH: self.constraints} if self.constraints is not None else {}
        return {there: here for there, here in files.items() if here is not None}

    @property
    def path_command(self) -> str:
        """Puts the environment's programs first."""
        return f'export PATH={shell_path(self.venv)}/bin:"$PATH"'

    def steps(self) -> list[Step]:
        """The commands, in order."""
        steps = [Step("Only this user reads the token.", f"chmod 700 ~/.ray && chmod 600 {TOKEN_PATH}"), PROGRAMS]
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
        return " ".join([f"{self._python} {PIP_INSTALL}", *map(shell_word, words)])

    @property
    def _python(self) -> str:
        return f"{shell_path(self.venv)}/bin/python"

    @property
    def _is_wheel(self) -> bool:
        return self.package is not None and self.package.endswith(".whl")

    @property
    def _wheel_path(self) -> str:
        """Where the wheel lies on a node. pip wants its own name."""
        return f"{NODE_FOLDER}/{PurePosixPath(self.package or '').name}"

    def _system_step(self) -> Step:
        names = " ".join(self.system_packages)
        # A new machine's own updates hold the lock for some minutes.
        install = "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300"
        install = f"{install} update -q && {install} install -q -y {names}"
        return Step("Packages of the system.", f"dpkg -s {names} > /dev/null 2>&1 || {{ {install}; }}")

    def _package_step(self) -> Step:
        program, wanted = f"{shell_path(self.venv)}/bin/metrale-ray", f"metrale-ray {self.version}"
        if self.package == NO_PACKAGE:
            fail = f'echo "error: node $(hostname) needs {wanted} in {self.venv}; found: $found" >&2; exit 1'
            command = f"found=$({program} --version 2>&1)\n[ \"$found\" = '{wanted}' ] || {{ {fail}; }}"
            return Step(f"The environment is there already, with {wanted}.", command)
        has_version, mark = f"[ \"$({program} --version 2>&1)\" = '{wanted}' ]", self._mark()
        lines = [ONE_AT_A_TIME]
        if mark is None:
            lines.append(f"{has_version} || {{")
        else:
            # The same version may be another build, or have been asked for with other packages beside it.
            lines += [f"wanted={mark}", f"installed={shell_path(self.venv)}/metrale-ray.installed"]
            lines.append(f'{{ {has_version} && [ "$wanted" = "$(cat "$installed" 2> /dev/null)" ]; }} || {{')
        make = f"{self._python} -m pip --version > /dev/null 2>&1 || {self.python} -m venv {shell_path(self.venv)}"
        commands = [f"{{ {make}; }}", *self._installs()]
        commands += [] if mark is None else ['printf \'%s\\n\' "$wanted" >| "$installed"']
        lines += [f"  {command} &&" for command in commands[:-1]] + [f"  {commands[-1]}", "}"]
        comment = "The wheel, copied to each node." if self._is_wheel else f"{wanted}, unless the environment has it."
        return Step(comment, "\n".join(lines))

    def _mark(self) -> str | None:
        """A word of the shell that tells what was asked for from anything else; None: the version tells it."""
        files = " ".join(shell_path(path) for path in self.files)
        if self._is_wheel or (self.package is None and files):
            return f'"$(cat {files} | sha256sum)"'
        if self.package is None:
            return None
        return f'"$(cat {files} | sha256sum) "{shell_word(self.package)}' if files else shell_word(self.package)

    def _installs(self) -> list[str]:
        """The commands that install it."""
        limits = f" -c {shell_path(CONSTRAINTS_PATH)}" if self.constraints is not None else ""
        # torch alone, so that no other package can come from its index.
        torch = [self.pip("--index-url", self.torch_index, "--no-deps") + f"{limits} torch"] if self.torch_index else []
        if not self._is_wheel:
            return [
                *torch,
                f"{self.pip()}{limits} {shell_word(self.package or f'metrale-ray{EXTRAS}=={self.version}')}",
            ]
        wheel = shell_path(self._wheel_path)
        again = self.pip("--force-reinstall", "--no-deps")  # pip takes another build of the same version for the same
        return [*torch, f"{self.pip()}{limits} {wheel}{shell_word(EXTRAS)}", f"{again} {wheel}"]

    def _path_step(self) -> Step:
        line = shell_word(f"{self.path_command} RAY_AUTH_MODE=token {BASHRC_MARK}")
        fail = (
            'echo "error: ~/.bashrc of node $(hostname) ends early, before the line with which \\`ray exec\\` and '
            '\\`ray down\\` find Ray; move that last line to its top" >&2; exit 1'
        )
        lines = [
            f"line={line}",
            'touch ~/.bashrc && { grep -qxF "$line" ~/.bashrc || {',
            f"  sed -i --follow-symlinks '/^export PATH=.*{BASHRC_MARK}$/d' ~/.bashrc &&",
            '  { [ -z "$(tail -c 1 ~/.bashrc)" ] || echo >> ~/.bashrc; } && printf \'%s\\n\' "$line" >> ~/.bashrc',
            "}; } || exit 1",
            '(unset RAY_AUTH_MODE; . ~/.bashrc > /dev/null 2>&1; [ "$RAY_AUTH_MODE" = token ]) || {',
            f"  {fail}",
            "}",
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
