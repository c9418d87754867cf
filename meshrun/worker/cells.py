"""Cells of a notebook or a prompt on a rank: they run in ``__main__``, whose variables stay."""

from __future__ import annotations

import ast
import builtins
import codeop
import linecache
import os
import sys

_compile = codeop.Compile()
"""Has what is imported from ``__future__`` hold for later cells."""


def run_cell(text: str, name: str, only: int | None = None) -> str | None:
    """Run a cell; return the text of its last expression's value, ``None`` if it has none.

    Args:
        text: Its Python code.
        name: What tracebacks call it, in place of a file's name.
        only: The rank that runs it, if only one does.

    Raises:
        BaseException: Whatever it raises.
    """
    if only is not None and int(os.environ["RANK"]) != only:
        return None
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    tree = ast.parse(text, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    space = sys.modules["__main__"].__dict__
    exec(_compile(tree, name, "exec"), space)  # type: ignore[arg-type]  # noqa: S102 - what a notebook is for
    if not isinstance(last, ast.Expr):
        return None
    value = eval(_compile(ast.Expression(last.value), name, "eval"), space)  # type: ignore[arg-type]  # noqa: S307
    if value is None:
        return None
    builtins._ = value  # type: ignore[attr-defined]
    return repr(value)


def complete(text: str, rank: int) -> list[str]:
    """On that rank, return how a name or an attribute that begins so may end."""
    if int(os.environ["RANK"]) != rank:
        return []
    from rlcompleter import Completer

    completer, found = Completer(sys.modules["__main__"].__dict__), list[str]()
    while (match := completer.complete(text, len(found))) is not None:
        found.append(match)
    return found
