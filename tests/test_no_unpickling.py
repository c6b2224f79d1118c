# SPDX-License-Identifier: MIT OR Apache-2.0
"""Nothing in the package makes objects, or runs code, out of bytes that somebody else may have written.

Read from the syntax trees: no module that unpickles, no call that does so underneath, and no `eval` or `exec`. What
Ray does with the arguments of its own calls is Ray's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "metrale_ray"
UNPICKLERS = {"pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve"}
MODULES = UNPICKLERS | {"joblib", "jsonpickle", "multiprocessing", "xmlrpc"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
OF_SOCKETS = {"recv_pyobj", "send_pyobj", "recv_serialized"}
OF_GROUPS = {"all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"}
OF_FILES = {"Unpickler", "read_pickle", "unsafe_load", "full_load"}
METHODS = OF_SOCKETS | OF_GROUPS | OF_FILES | {"send_object_list", "recv_object_list"}
LOADS = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "yaml.load"}
KEYWORDS = {("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}


def unpickling(text: str) -> list[str]:
    """What in the source `text` could make objects out of foreign bytes, with line numbers; empty when all is well."""
    return [f"{node.lineno}: {what}" for node in ast.walk(ast.parse(text)) for what in _of_node(node)]  # type: ignore[attr-defined]


def _of_node(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(alias.name for alias in node.names)]
        yield from (f"import of {name}" for name in names if name.partition(".")[0] in MODULES | METHODS)
    elif isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        if node.attr in METHODS | {"pickle", "_pickle"} or dotted in LOADS:
            yield dotted
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield f"{node.func.id}()"
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant) and (keyword.arg, keyword.value.value) in KEYWORDS:
                yield f"{keyword.arg}={keyword.value.value}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
        yield f"the name {node.value!r}, which an import could be given"


def test_no_file_of_the_package_unpickles() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    assert [(str(path), what) for path in files for what in unpickling(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "def load():\n    from torch.serialization import pickle",
        "from multiprocessing.connection import Listener",
        "importlib.import_module('shelve')",
        "__import__('os')",
        "message = socket.recv_pyobj()",
        "from torch.distributed import broadcast_object_list",
        "torch.distributed.all_gather_object(out, value)",
        "weights = torch.load(path)",
        "weights = np.load(path)",
        "load(path, weights_only=False)",
        "load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "eval(text)",
        "exec(text)",
        "ray.cloudpickle.pickle.loads(data)",
    ],
)
def test_each_way_to_unpickle_is_found(text: str) -> None:
    assert unpickling(text) != []


def test_what_only_looks_like_it_is_allowed() -> None:
    text = "model.eval()\nvalues = json.loads(data)\nre.compile(x)\nload(path, allow_pickle=False)\nname = 'a pickle'"
    assert unpickling(text) == []
