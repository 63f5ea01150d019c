"""The syntax of a function without its layout, and the names that it looks up."""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_UNREAD = {"ctx", "type_comment", "type_ignores", "type_params", "kind", "annotation", "returns"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Names(NamedTuple):
    """What code looks up: among the globals of its module, and on objects, such as `self`."""

    globals: set[str]
    attributes: set[str]


def names(*codes: CodeType) -> Names:
    """Also of the functions inside them.

    >>> def f(x):
    ...     return [len(y.shape) for y in x]
    >>> names(f.__code__)
    Names(globals={'len'}, attributes={'shape'})
    """
    found = Names(set(), set())
    for part in (part for code in codes for part in _codes(code)):
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.globals.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                found.attributes.add(instruction.argval)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def syntax(function: FunctionType) -> Any:
    """Its syntax tree as nested lists, without comments, docstrings and annotations; None if there is no source.

    The trees of two releases of Python can differ where the language grew, and with them what is made of them.
    """
    node = _node(function)
    return None if node is None else _tree(node)


def bytecode(code: CodeType) -> Any:
    """What is left of a function without source: its instructions, constants and names, of one release of Python."""
    constants = [bytecode(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names)]


def _constant(value: Any) -> str:
    members = sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
    return f"{type(value).__name__} {members}"


def _tree(node: Any) -> Any:
    if isinstance(node, list):
        return [_tree(v) for v in node if not _silent(v)]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.Constant):
        return ["Constant", _constant(node.value)]
    if isinstance(node, ast.AnnAssign):  # without its annotation it is like any other
        return ["Assign", ["targets", [_tree(node.target)]], ["value", _tree(node.value)]]
    fields = ((k, v) for k, v in ast.iter_fields(node) if k not in _UNREAD and v is not None and v != [])
    return [type(node).__name__, *([k, _tree(v)] for k, v in fields)]


def _silent(node: Any) -> bool:
    """Whether a statement does nothing: a docstring, or an annotation alone."""
    lone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return (lone and isinstance(node.value.value, str)) or (
        isinstance(node, ast.AnnAssign) and node.value is None
    )


def _node(function: FunctionType) -> ast.AST | None:
    """Where the function stands in the file that it came from."""
    code = function.__code__
    lines = tuple(linecache.getlines(code.co_filename, function.__globals__))
    found = [n for n in _functions(lines) if _start(n) == code.co_firstlineno and _named(n) == code.co_name]
    found = [n for n in found if _arguments(n.args) == code.co_varnames[: len(_arguments(n.args))]]
    if len(found) > 1:  # lambdas on one line
        found = [n for n in found if _covers(n, code)]
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=16)
def _functions(lines: tuple[str, ...]) -> list[Any]:
    try:
        return [n for n in ast.walk(ast.parse("".join(lines))) if isinstance(n, _FUNCTIONS)]
    except (SyntaxError, ValueError):  # of a notebook's magic, say
        return []


def _start(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _named(node: Any) -> str:
    return getattr(node, "name", "<lambda>")


def _arguments(args: ast.arguments) -> tuple[str, ...]:
    """In the order in which code keeps them."""
    rest = [a for a in (args.vararg, args.kwarg) if a is not None]
    return tuple(a.arg for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest])


def _covers(node: ast.Lambda, code: CodeType) -> bool:
    """Whether the code of a lambda is that of this node: Python 3.10 does not know the columns."""
    if not hasattr(code, "co_positions"):
        return False
    body = node.body
    places = [(line, column) for line, _, column, _ in code.co_positions() if line and column]
    return bool(places) and min(places) == (body.lineno, body.col_offset)
