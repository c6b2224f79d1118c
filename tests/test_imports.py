# SPDX-License-Identifier: MIT OR Apache-2.0
"""The package keeps the rules on imports, and the checker sees each kind of breach."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_rules import LEVELS, violations

TOP = Path(__file__).resolve().parent.parent


def package_sources() -> dict[str, str]:
    files = sorted((TOP / "metrale_ray").rglob("*.py"))
    return {str(file.relative_to(TOP)): file.read_text(encoding="utf-8") for file in files}


def test_the_package_breaks_no_rule_on_imports() -> None:
    sources = package_sources()
    assert "metrale_ray/errors.py" in sources
    assert violations(sources) == []


def test_the_architecture_names_every_place_that_has_a_level() -> None:
    text = (TOP / "ARCHITECTURE.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert [name for name in LEVELS if name and name.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize("module", ["metrale_ray", "metrale_ray.config", "metrale_ray.cli"])
def test_importing_the_package_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers', 'numpy', 'zmq'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TOP)
    assert done.stdout.strip() == "[]"


GOOD = {
    "metrale_ray/__init__.py": '"""Doc."""\nif TYPE_CHECKING:\n    from metrale_ray.llm import LLM\n',
    "metrale_ray/errors.py": "class E(Exception):\n    code = 'e'\n",
    "metrale_ray/protocol/__init__.py": "",
    "metrale_ray/protocol/versions.py": "from metrale_ray.errors import E\nENV_VAR = 'X'\n",
    "metrale_ray/config.py": "from metrale_ray.protocol.versions import ENV_VAR\nlog = logging.getLogger(__name__)\n",
    "metrale_ray/scheduler/blocks.py": "from ..protocol import versions\nfrom .request import R\n",
    "metrale_ray/scheduler/request.py": "class R:\n    a: int = field(default_factory=list)\n",
    "metrale_ray/model/run.py": "import torch\nONE = torch.Size([1])\nTABLE = {c: lambda: start() for c in (1, 2)}\n",
    "metrale_ray/llm.py": "import ray\nfrom metrale_ray import config\nif __name__ == '__main__':\n    main()\n",
    "metrale_ray/demo.py": "def build() -> None:\n    import torch\n",
    "metrale_ray/cli.py": "from metrale_ray import llm\n",
}


def test_a_package_that_keeps_the_rules_has_no_violation() -> None:
    assert violations(GOOD) == []


BAD = {
    "a lower level imports a higher one": ("worker", "import metrale_ray.head", "level 4 from level 3"),
    "a lower level imports a higher one lazily": ("config", "def f():\n    from . import llm", "level 5 from level 0"),
    "a lower level imports a higher one for types": (
        "errors",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from metrale_ray.cli import main",
        "level 6 from level 0",
    ),
    "a file of the protocol imports a higher level of its folder": (
        "protocol/commands",
        "from .link import Link",
        "level 2 from level 0",
    ),
    "two folders of one level": ("sampling/a", "from metrale_ray.scheduler import b", "own level 1"),
    "the root package is imported from below": ("head", "from metrale_ray import LLM", "level 5 from level 4"),
    "a dynamic import": ("worker", "def f():\n    importlib.import_module('metrale_ray.head')", "level 4 from level 3"),
    "an import by a computed name": ("worker", "def f(x):\n    importlib.import_module(x)", "computed name"),
    "the scheduler imports the model": ("scheduler/a", "from metrale_ray.model.run import x", "never import one"),
    "serve imports the scheduler": ("serve/app", "from ..scheduler.blocks import x", "never import one"),
    "serve imports the model": ("serve/app", "import metrale_ray.model.run", "never import one"),
    "torch in the scheduler": ("scheduler/a", "import torch", "imports torch"),
    "torch in the head": ("head", "from torch import Tensor", "imports torch"),
    "torch in the protocol, lazily": ("protocol/codec", "def f():\n    import torch.cuda", "imports torch"),
    "torch at the top of the demo": ("demo", "import torch", "inside a function"),
    "ray in the head": ("head", "import ray", "imports ray"),
    "ray in the model": ("model/a", "from ray import remote", "imports ray"),
    "asyncio in the scheduler": ("scheduler/a", "import asyncio", "pure part"),
    "asyncio in the codec": ("protocol/codec", "import asyncio", "pure part"),
    "sockets in the model": ("model/a", "import zmq", "pure part"),
    "a clock in the scheduler": ("scheduler/a", "from time import monotonic", "must not know"),
    "a file without a level": ("helpers", "X = 1", "has no level"),
    "a file of the protocol without a level": ("protocol/more", "X = 1", "has no level"),
    "a call at import": ("config", "connect()", "does more than define"),
    "a constant made by a call": ("config", "X = connect()", "calls a function"),
    "a constant made by a method": ("config", "X = Pool().start()", "calls a function"),
    "a call in a comprehension": ("config", "X = [read(n) for n in (1, 2)]", "read(n)"),
    "a call in a comprehension's condition": ("config", "X = [n for n in (1, 2) if ask(n)]", "ask(n)"),
    "a call in a keyword": ("config", "X = dict(a=read())", "read()"),
    "a call in a class body": ("config", "class A:\n    x = connect()", "connect()"),
    "a call in a class's bases": ("config", "class A(make()): ...", "make()"),
    "a statement in a class body": ("config", "class A:\n    print(1)", "does more than define"),
    "a call in a default": ("config", "def f(x=connect()): ...", "connect()"),
    "a call in a keyword's default": ("config", "def f(*, x=connect()): ...", "connect()"),
    "a loop at import": ("config", "for x in (1, 2):\n    pass", "does more than define"),
    "a try at import": ("config", "try:\n    import a\nexcept ImportError:\n    pass", "does more than define"),
    "an if at import": ("config", "if DEBUG:\n    X = 1", "does more than define"),
    "an else of an allowed if": ("config", "if TYPE_CHECKING:\n    X = 1\nelse:\n    go()", "does more than define"),
    "an assignment to something else": ("config", "os.environ['A'] = 'b'", "does more than define"),
    "an assignment that adds": ("config", "X += 1", "does more than define"),
}


@pytest.mark.parametrize(("file", "source", "message"), BAD.values(), ids=BAD.keys())
def test_the_checker_reports(file: str, source: str, message: str) -> None:
    path = f"metrale_ray/{file}.py"
    found = violations({path: source})
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")
    assert message in found[0]


def test_the_checker_reports_a_cycle_that_a_lazy_import_closes() -> None:
    sources = {
        "metrale_ray/model/a.py": "from metrale_ray.model import b",
        "metrale_ray/model/b.py": "from .c import x",
        "metrale_ray/model/c.py": "def f():\n    from metrale_ray.model.a import y",
    }
    cycle = "metrale_ray.model.a -> metrale_ray.model.b -> metrale_ray.model.c -> metrale_ray.model.a"
    assert violations(sources) == [f"cycle of imports: {cycle}"]


def test_imports_for_types_alone_make_no_cycle() -> None:
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from metrale_ray.model import a\n"
    sources = {"metrale_ray/model/a.py": "from metrale_ray.model import b", "metrale_ray/model/b.py": typing}
    assert violations(sources) == []


def test_every_breach_in_a_file_is_reported_with_its_line() -> None:
    found = violations({"metrale_ray/head.py": "import ray\nimport torch\n\nstart()\n"})
    assert [line.split(" ")[0] for line in found] == [f"metrale_ray/head.py:{n}:" for n in (1, 2, 4)]
