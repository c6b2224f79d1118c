# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a module does when it is imported, from its syntax tree: `effects(tree)` lists all that is not a definition.

Allowed at the top of a module and in a class body: docstrings, imports, functions, classes, constants, and `if` for
TYPE_CHECKING or `__name__`. A constant may be computed by the functions in PURE_CALLS and by constructors (names in
capitals), which is what tells `Struct("<I")` from `connect()`. Decorators are taken for definitions. Bodies of
functions do not run on import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

PURE_CALLS = {
    *("bytes", "dict", "enumerate", "float", "frozenset", "int", "len", "list", "max", "min", "object", "range", "set"),
    *("sorted", "str", "sum", "tuple", "type", "zip", "cast", "field", "get_args", "namedtuple", "partial"),
    *("dataclasses.field", "dataclasses.fields", "fields", "functools.partial", "logging.getLogger", "re.compile"),
    *(
        "typing.cast",
        "typing.get_args",
        "auto",
        "enum.auto",
        "property",
        "staticmethod",
        "classmethod",
        "attrgetter",
        "itemgetter",
    ),
}
PURE_METHODS = {"encode", "format", "from_bytes", "items", "join", "keys", "split", "values"}
ASKED = ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")


def effects(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each thing that an import of `tree` does besides defining."""
    yield from _statements(tree.body)


def _statements(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    for statement in body:
        yield from _statement(statement)


def _statement(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            pass
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from _calls([*statement.args.defaults, *(d for d in statement.args.kw_defaults if d)])
        case ast.ClassDef():
            yield from _calls([*statement.bases, *(k.value for k in statement.keywords)])
            yield from _statements(statement.body)
        case ast.Assign(targets=targets) if all(map(_is_name, targets)):
            yield from _calls([statement.value])
        case ast.AnnAssign(target=target, value=value) if _is_name(target):
            yield from _calls([value] if value else [])
        case ast.Expr(value=ast.Constant()):  # a docstring, or ...
            pass
        case ast.If(test=test, orelse=[]) if ast.unparse(test) in ASKED:
            pass
        case _:
            yield statement.lineno, f"does more than define when imported: {_first_line(statement)}"


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


def _calls(values: list[ast.expr]) -> Iterator[tuple[int, str]]:
    for value in values:
        if isinstance(value, ast.Lambda):
            continue
        if isinstance(value, ast.Call) and not _is_pure(value.func):
            yield value.lineno, f"calls a function when imported: {_first_line(value)}"
        yield from _calls([child for child in _children(value) if isinstance(child, ast.expr)])


def _children(value: ast.expr) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(value):
        if isinstance(child, ast.comprehension | ast.keyword):
            yield from ast.iter_child_nodes(child)
        else:
            yield child


def _is_pure(function: ast.expr) -> bool:
    name = ast.unparse(function)
    if name in PURE_CALLS:
        return True
    last = name.rpartition(".")[2]
    return last.lstrip("_")[:1].isupper() or (isinstance(function, ast.Attribute) and last in PURE_METHODS)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]
