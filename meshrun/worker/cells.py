"""Cells of a notebook on a rank: they run in ``__main__``, whose variables stay."""

from __future__ import annotations

import ast
import linecache
import sys


def run_cell(text: str, name: str) -> str | None:
    """Run a cell; return the text of its last expression's value, ``None`` if it has none.

    Args:
        text: Its Python code.
        name: What tracebacks call it, in place of a file's name.

    Raises:
        BaseException: Whatever it raises.
    """
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    tree = ast.parse(text, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    space = sys.modules["__main__"].__dict__
    exec(compile(tree, name, "exec"), space)  # noqa: S102 - what a notebook is for
    if not isinstance(last, ast.Expr):
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), space)  # noqa: S307
    return None if value is None else repr(value)
