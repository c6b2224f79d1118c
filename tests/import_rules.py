# SPDX-License-Identifier: MIT OR Apache-2.0
"""The rules of ARCHITECTURE.md on imports, checked from syntax trees: `violations(sources)` lists what breaks them.

- A file imports from lower levels or from its own folder, and never from a higher level. Files of level 0 may
  import one another.
- `scheduler`, `model` and `serve` never import one another.
- torch, ray and the modules that a pure part must not know are imported only where the tables below say.
- There are no cycles of imports, lazy ones included. Imports for type checking alone make no cycle.
- Importing a file does nothing but define: see `import_effects`.

Sources are given as a mapping from a path such as `metrale_ray/protocol/link.py` to its text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.import_effects import effects

ROOT = "metrale_ray"
LEVELS = {
    "protocol": 0,
    "protocol.commands": 0,
    "protocol.fields": 0,
    "protocol.limits": 0,
    "protocol.port": 0,
    "protocol.versions": 0,
    "config": 0,
    "errors": 0,
    "baton": 0,
    "clock": 0,
    "control_groups": 0,
    "core_claims": 0,
    "cores": 0,
    "version": 0,
    "native": 0,
    "process_end": 0,
    "process_memory": 0,
    "termination": 0,
    "protocol.session": 1,
    "protocol.codec": 1,
    "protocol.command_body": 1,
    "protocol.journal": 1,
    "protocol.verdict": 1,
    "scheduler": 1,
    "sampling": 1,
    "model": 1,
    "grammar": 1,
    "protocol.keys": 2,
    "protocol.door": 2,
    "protocol.link": 2,
    "protocol.front": 2,
    "protocol.transport": 2,
    "protocol.zmq_transport": 2,
    "vocabulary": 2,
    "worker": 3,
    "engine": 4,
    "chores": 4,
    "clients": 4,
    "compiling": 4,
    "counters": 4,
    "desk": 4,
    "inbox": 4,
    "incidents": 2,
    "orders": 4,
    "recording": 4,
    "recovery": 4,
    "last_commands": 2,
    "live": 4,
    "readout": 4,
    "head": 4,
    "start": 4,
    "surroundings": 4,
    "serve": 4,
    "figures": 4,
    "histogram": 4,
    "timelines": 4,
    "": 5,  # metrale_ray/__init__.py: the public names, found when they are asked for
    "cluster": 5,
    "llm": 5,
    "attached": 5,
    "driver": 5,
    "ray_data": 6,
    "model_files": 5,
    "reach": 4,
    "demo": 5,
    "progress": 5,
    "conversation": 5,
    "doctor": 5,
    "serve.deployment": 6,
    "service": 5,
    "traffic": 5,
    "batch": 5,
    "deploying": 5,
    "replay": 5,
    "cli": 6,
    "cli_answers": 6,
    "cli_batch": 6,
    "cli_bench": 6,
    "cli_bench_flags": 6,
    "cli_serve": 6,
    "cli_flags": 6,
    "cli_chat": 6,
    "cli_cluster": 6,
    "cli_cluster_flags": 6,
    "cli_cluster_questions": 6,
    "cli_doctor": 6,
    "cli_inspect": 6,
    "cli_inspect_journal": 6,
    "cli_journal": 6,
    "cli_journal_flags": 6,
    "cli_output": 6,
    "cli_prompts": 6,
    "cli_parser": 6,
    "cli_token": 6,
    "cli_wait": 6,
    "__main__": 6,
}
APART = ("scheduler", "model", "serve")
# Modules of others, and the only places that may import them.
HOMES = {
    "torch": ("model", "sampling", "demo"),
    "ray": ("cluster", "llm", "ray_data", "service", "serve.deployment", "doctor.nodes", "deploying.ray_view"),
    "fastapi": ("serve.http", "serve.deployment", "service"),
    "starlette": ("serve.http", "serve.deployment"),
    "uvicorn": ("service",),
    "pydantic": ("serve.openai", "serve.http", "serve.deployment"),
    "prometheus_client": ("serve.metrics",),
    "llguidance": ("grammar",),
    "aiohttp": ("traffic",),
}
LAZY_HOMES = {"torch": ("demo",)}  # there, only inside a function
PURE_LEVEL = 1  # up to here: no event loop and no wire
NOT_IN_PURE = ("asyncio", "zmq", "fastapi", "uvicorn")
NOT_IN = {"scheduler": ("time", "datetime", "threading", "socket")}  # time is an argument there
COMPUTED = "?"  # the target of an import whose name is not in the source


@dataclass(frozen=True)
class Import:
    """One import of `target` (a dotted name) on `line`. `lazy`: inside a function; `typing`: for type checking only."""

    line: int
    target: str
    lazy: bool
    typing: bool


def violations(sources: Mapping[str, str]) -> list[str]:
    """Everything in `sources` that breaks a rule, one line each; empty when all is well."""
    trees = {path: ast.parse(text, path) for path, text in sources.items()}
    names = {module_name(path) for path in sources}
    imports = {path: list(_imports(path, tree, names)) for path, tree in trees.items()}
    found = [f"{path}:{line}: {what}" for path in sources for line, what in _of_file(path, imports[path])]
    found += [f"{path}:{line}: {what}" for path, tree in trees.items() for line, what in effects(tree)]
    return list(dict.fromkeys(found)) + _cycles(imports)


def module_name(path: str) -> str:
    """The dotted name of the module at `path`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _of_file(path: str, imports: list[Import]) -> Iterator[tuple[int, str]]:
    here = _inner(module_name(path))
    if _level(here) is None:
        yield 1, f"{here} has no level: add it to LEVELS in tests/import_rules.py and to ARCHITECTURE.md"
        return
    for item in imports:
        inside = item.target == ROOT or item.target.startswith(ROOT + ".")
        problem = _inside(here, _inner(item.target)) if inside else _outside(here, item)
        if problem:
            yield item.line, problem


def _inside(here: str, there: str) -> str | None:
    my_level, level = _level(here), _level(there)
    if my_level is None or level is None:
        return f"imports {there or ROOT}, which has no level"
    if level > my_level:
        return f"imports {there or ROOT} of level {level} from level {my_level}"
    mine, theirs = _folder(here), _folder(there)
    if mine == theirs:
        return None
    if mine in APART and theirs in APART:
        return f"{mine} imports {theirs}; {', '.join(APART)} never import one another"
    if level == my_level > 0:
        return f"imports {there} of its own level {level} from another folder"
    return None


def _outside(here: str, item: Import) -> str | None:
    if item.target == COMPUTED and here:
        return "imports a module by a computed name, which only metrale_ray/__init__.py may"
    top = item.target.partition(".")[0]
    homes = HOMES.get(top)
    if homes is not None and not _within(here, homes):
        return f"imports {top}, which only {', '.join(homes)} may"
    if _within(here, LAZY_HOMES.get(top, ())) and not (item.lazy or item.typing):
        return f"imports {top} at import; here it belongs inside a function"
    if (_level(here) or 0) <= PURE_LEVEL and top in NOT_IN_PURE:
        return f"imports {top} in a pure part"
    if top in NOT_IN.get(_folder(here), ()):
        return f"imports {top}, which {_folder(here)} must not know"
    return None


def _imports(path: str, tree: ast.Module, names: set[str]) -> Iterator[Import]:
    package = path.rpartition("/")[0].replace("/", ".")
    for node, lazy, typing in _walk(tree, lazy=False, typing=False):
        for target in _targets(node, package, names):
            yield Import(getattr(node, "lineno", 1), target, lazy, typing)


def _walk(node: ast.AST, *, lazy: bool, typing: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    yield node, lazy, typing
    lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if isinstance(node, ast.If) and is_type_checking(node.test):
        for inner in node.body:
            yield from _walk(inner, lazy=lazy, typing=True)
        for inner in node.orelse:
            yield from _walk(inner, lazy=lazy, typing=typing)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, lazy=lazy, typing=typing)


def is_type_checking(test: ast.expr) -> bool:
    """Whether an `if` asks for TYPE_CHECKING."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _targets(node: ast.AST, package: str, names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in names else base
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
        name = node.args[0] if node.args else None
        yield name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else COMPUTED


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def _inner(module: str) -> str:
    return module.removeprefix(ROOT).removeprefix(".")


def _level(inner: str) -> int | None:
    """The level of the longest listed name that `inner` is in; `metrale_ray` itself is listed as the empty name."""
    if inner in LEVELS:
        return LEVELS[inner]
    parent = inner.rpartition(".")[0]
    # `protocol` is listed for its __init__.py alone: each of its files has a level of its own.
    return _level(parent) if parent and parent != "protocol" else None


def _folder(inner: str) -> str:
    return inner.partition(".")[0] if _is_folder(inner.partition(".")[0]) else ""


def _is_folder(top: str) -> bool:
    return top in (*APART, "protocol", "sampling")


def _within(here: str, places: tuple[str, ...]) -> bool:
    return any(here == place or here.startswith(place + ".") for place in places)


def _cycles(imports: Mapping[str, list[Import]]) -> list[str]:
    graph = {module_name(path): {i.target for i in found if not i.typing} for path, found in imports.items()}
    done: set[str] = set()
    cycles: list[str] = []
    for start in sorted(graph):
        _visit(start, [], graph, done, cycles)
    return cycles


def _visit(here: str, trail: list[str], graph: Mapping[str, set[str]], done: set[str], cycles: list[str]) -> None:
    if here in trail:
        cycles.append("cycle of imports: " + " -> ".join([*trail[trail.index(here) :], here]))
        return
    if here in done:
        return
    for target in sorted(graph[here] & graph.keys()):
        _visit(target, [*trail, here], graph, done, cycles)
    done.add(here)
