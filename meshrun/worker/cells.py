"""Runs cells of a notebook or a prompt on a rank, in ``__main__``, whose variables persist."""

from __future__ import annotations

import ast
import builtins
import codeop
import contextlib
import inspect
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from meshrun.host import rank_variables as var
from meshrun.host.descriptors import without_output
from meshrun.worker.pickling import remember_source

if TYPE_CHECKING:
    import asyncio

SHELL = "get_ipython"
"""The function that IPython calls for commands such as ``!ls``."""
_OWN_SHELL = "_meshrun_shell"
_compile = codeop.Compile()
"""Keeps what is imported from ``__future__`` for later cells."""
_compile.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_loop: asyncio.AbstractEventLoop | None = None
"""The loop in which cells await; tasks left behind continue when the next cell awaits."""


def run_cell(
    text: str, name: str, only: int | None = None, hidden: Collection[int] = ()
) -> str | None:
    """Run a cell; return the ``repr`` of its last expression, or ``None`` if it has no value.

    Args:
        text: Its Python code, in which IPython has replaced commands such as ``!ls``.
        name: Its file name in tracebacks.
        only: The rank that runs it, if only one does.
        hidden: Ranks that print nothing.

    Raises:
        BaseException: Whatever the cell raises.
    """
    rank = var.own_rank()
    if only is not None and rank != only:
        return None
    remember_source(name, text)
    tree = ast.parse(text, name)
    space = sys.modules["__main__"].__dict__
    if SHELL not in space and _call_own_shell(tree):
        space[_OWN_SHELL] = CellShell
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    with _hidden() if rank in hidden else contextlib.nullcontext():
        parts = [_compile(tree, name, "exec")]  # type: ignore[arg-type]
        if isinstance(last, ast.Expr):
            parts.append(_compile(ast.Expression(last.value), name, "eval"))  # type: ignore[arg-type]
        value = _run(parts, space)
    if value is None:
        return None
    builtins._ = value  # type: ignore[attr-defined]
    return repr(value)


class CellShell:
    """Replaces IPython's shell for cells on a rank."""

    def system(self, command: str) -> None:
        """Run ``!command`` and print its output."""
        _flush(sys.stdout)
        _run_command(command)

    def getoutput(self, command: str) -> list[str]:
        """Run ``lines = !command`` and return its output."""
        from IPython.utils.text import SList

        ran = _run_command(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="locale",
            errors="replace",
        )
        return SList(ran.stdout.splitlines())


def _run_command(command: str, **how: Any) -> subprocess.CompletedProcess[Any]:
    ran = subprocess.run(  # noqa: S602
        _expanded(command), shell=True, stdin=subprocess.DEVNULL, check=False, **how
    )
    sys.modules["__main__"].__dict__["_exit_code"] = ran.returncode
    return ran


def _expanded(command: str) -> str:
    """Return a command with the values of its ``{name}`` and ``$name``, as IPython does."""
    from IPython.utils.text import DollarFormatter

    try:
        return str(DollarFormatter().vformat(command, (), sys.modules["__main__"].__dict__))
    except Exception:  # the braces and dollars are part of the command
        return command


def _call_own_shell(tree: ast.AST) -> bool:
    """Have a cell call our shell in place of IPython's; return whether it calls one."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == SHELL]
    for name in names:
        name.id = _OWN_SHELL
    return bool(names)


def _run(parts: Sequence[CodeType], space: dict[str, Any]) -> Any:
    """Return the value of the last part; if any part awaits, all run in the event loop."""
    if any(part.co_flags & inspect.CO_COROUTINE for part in parts):
        return _awaited(parts, space)
    return [eval(part, space) for part in parts][-1]  # noqa: S307 - what a notebook is for


async def _run_in_loop(parts: Sequence[CodeType], space: dict[str, Any]) -> Any:
    for part in parts:
        value = eval(part, space)  # noqa: S307 - as above
        if part.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _awaited(parts: Sequence[CodeType], space: dict[str, Any]) -> Any:
    import asyncio

    global _loop
    if _loop is None:
        asyncio.set_event_loop(_loop := asyncio.new_event_loop())
    task = _loop.create_task(_run_in_loop(parts, space))
    try:
        _loop.run_until_complete(asyncio.wait([task]))
    except BaseException:
        task.cancel()
        _loop.run_until_complete(asyncio.wait([task]))
        raise
    return task.result()


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    """Discard what is printed, also by native libraries."""
    from meshrun.worker.debuggers import passing_breakpoints

    streams = (sys.stdout, sys.stderr)
    _flush(*streams)
    with without_output(1, 2):
        try:
            with passing_breakpoints():
                yield
        finally:
            _flush(*streams)


def _flush(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(Exception):  # a cell has closed or replaced it
            stream.flush()


def complete(text: str, rank: int) -> list[str]:
    """On ``rank``, return the completions of a name or an attribute; elsewhere, none."""
    if var.own_rank() != rank:
        return []
    own, sys.path[:1] = sys.path[:1], []  # the folder of the program or the prompt
    try:
        from rlcompleter import Completer
    finally:
        sys.path[:0] = own
    completer, found = Completer(sys.modules["__main__"].__dict__), list[str]()
    while (match := completer.complete(text, len(found))) is not None:
        found.append(match)
    return found
