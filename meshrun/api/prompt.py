"""``meshrun --interactive``: a prompt that runs its input on every rank of a mesh."""

from __future__ import annotations

import ast
import atexit
import code
import importlib.util
import os
import signal
import sys
import termios
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

from meshrun import __version__
from meshrun.api.group_cells import CellFailed, call_on_ranks, run_on_ranks
from meshrun.api.worker_group import WorkerGroup
from meshrun.errors import HostError, MeshrunError
from meshrun.host.process_state import is_foreground
from meshrun.host.stderr import say
from meshrun.layout.selection import find_rank
from meshrun.mesh.current_layout import current_layout
from meshrun.protocol.result import RankFailed
from meshrun.wording import count
from meshrun.worker.cells import complete
from meshrun.worker.serve_calls import run_own_program

try:  # here, as the working folder is searched later
    import readline
except ImportError:  # a Python without it
    readline = None  # type: ignore[assignment]

_CANNOT_COMPILE = (MemoryError, OverflowError, RecursionError, SyntaxError, ValueError)
_HISTORY = "~/.meshrun_history"
_MOST_LINES = 1000


def run_prompt(options: Sequence[str], program: Sequence[str]) -> int:
    """Run a program on all ranks, then the input that is typed or piped; return the exit code.

    ``options`` are those of a launch; ``program`` may be empty.

    Raises:
        MeshrunError: If the ranks cannot be started.
        KeyboardInterrupt: If anything except a cell is interrupted.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    if not program and not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [os.getcwd()]  # as at Python's own prompt; ranks get this path
    try:
        prompt = _Prompt(options, program)
    except RankFailed as failed:  # which the launcher has reported
        return failed.exit_code
    signal.signal(signal.SIGQUIT, lambda *_: prompt.group.print_stacks())
    code = 1
    try:
        code = prompt.run()
    finally:
        trouble = prompt.group.end(None)
    return code or (trouble.exit_code if trouble is not None else 0)


class _Prompt(code.InteractiveConsole):
    """Reads inputs and runs them on the ranks."""

    def __init__(self, options: Sequence[str], program: Sequence[str]) -> None:
        super().__init__()
        self._options, self._program = options, program
        self.compile.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        self._is_typed = sys.stdin.isatty()
        self.group = self._start()
        self._labels = self.group.labels
        self._only: int | None = None
        self._count = 0
        self._code = 1
        """The exit code if piped input fails."""
        self._names: list[str] = []

    def run(self) -> int:
        """Run the program, then all input; return the exit code."""
        try:
            succeeded = not self._program or self._run_program()
            if self._is_typed:
                self._interact()
            elif succeeded:
                succeeded = self._run_piped(sys.stdin.buffer.read())
        except SystemExit as error:
            return _exit_code(error)
        return 0 if self._is_typed or succeeded else self._code

    def runsource(self, source: str, filename: str = "", symbol: str = "single") -> bool:  # noqa: ARG002
        """Run an input on the ranks; return whether it is incomplete."""
        if source.startswith("%"):
            self._choose(source)
            return False
        name = f"<cell {self._count + 1}>"
        try:
            if self.compile(source, name, symbol) is None:
                return True
        except _CANNOT_COMPILE as error:
            _print_compile_error(error)
            return False
        self._count += 1
        self._run(source, name)
        return False

    def _start(self) -> WorkerGroup:
        return WorkerGroup(options=self._options, program=self._program)

    def _open_group(self) -> WorkerGroup:
        """Return the group; start a new one if the last one was closed."""
        if not self.group.is_open:
            self.group = self._start()
        return self.group

    def _interact(self) -> None:
        labels = self._labels
        # Input in another encoding is an error of the compiler then, which the prompt survives.
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
        _enable_line_editing(self._complete)
        self._set_prompt("")
        self.interact(
            f"meshrun {__version__}: {count(len(labels), 'rank')}, {labels[0]} to {labels[-1]};"
            " every input runs on all of them, Ctrl-D ends them",
            exitmsg="",
        )

    def _run_program(self) -> bool:
        """Run the program; return whether it succeeded. If it exits, the prompt does not."""
        try:
            is_last = not self._is_typed
            return self._try(lambda: call_on_ranks(self.group, run_own_program, is_last=is_last))
        except SystemExit as error:
            code = _exit_code(error)
            self._code = code or self._code
            return code == 0
        except KeyboardInterrupt:
            if not self._is_typed:
                raise
            say("KeyboardInterrupt")
            return False

    def _run_piped(self, data: bytes) -> bool:
        """Run piped input as Python does, without printing values; return whether it succeeded."""
        try:
            text = importlib.util.decode_source(data)
            compile(text, "<stdin>", "exec", dont_inherit=True)
        except _CANNOT_COMPILE as error:
            _print_compile_error(error)
            return False
        return self._run(f"{text}\npass", "<stdin>")

    def _run(self, cell: str, name: str) -> bool:
        """Run a cell as :meth:`_try` does."""
        is_last = not self._is_typed
        return self._try(
            lambda: run_on_ranks(self._open_group(), cell, name, only=self._only, is_last=is_last)
        )

    def _try(self, call: Callable[[], object]) -> bool:
        """Make a call on the ranks, and print its error; return whether it succeeded.

        Raises:
            SystemExit: If a rank raised it.
            KeyboardInterrupt: If the call was interrupted.
        """
        try:
            call()
        except CellFailed as failed:
            if isinstance(failed.error, SystemExit):
                raise failed.error from None
            if isinstance(failed.error, RankFailed | HostError):
                self._code = failed.error.exit_code
            if not getattr(failed.error, "is_reported_elsewhere", False):
                say(failed.message)
        except MeshrunError as error:
            _print_error(error)
        else:
            return True
        return False

    def _choose(self, line: str) -> None:
        """Run the next inputs on one rank (``%rank 3``, ``%rank tp=1``), or on all (``%rank``)."""
        word, _, which = line.strip().partition(" ")
        labels = self._labels
        if word != "%rank":
            say(f"error: unknown command `{word}`\n\nhint: use %rank 3 for one rank, %rank for all")
        elif not which.strip():
            self._only = None
            self._set_prompt("")
        else:
            try:
                layout = call_on_ranks(self._open_group(), current_layout)[0]
                self._only = find_rank(layout, which.strip(), "%rank")
            except MeshrunError as error:
                _print_error(error)
            else:
                self._set_prompt(f"[{labels[self._only]}] ")

    def _complete(self, text: str, state: int) -> str | None:
        """Return a name on the chosen rank that begins with ``text``, for readline."""
        if state == 0:
            rank = self._only or 0
            self._names = ["    "]
            if text.strip() and self.group.is_open:
                self._names = call_on_ranks(self.group, complete, text, rank)[rank]
        return self._names[state] if state < len(self._names) else None

    @staticmethod
    def _set_prompt(label: str) -> None:
        sys.ps1, sys.ps2 = f"{label}>>> ", f"{label}... "


def _print_error(error: MeshrunError) -> None:
    from meshrun.report.result_text import render_error

    say(render_error(error))


def _print_compile_error(error: Exception) -> None:
    say("".join(traceback.format_exception_only(error)).rstrip())


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    say(str(error.code))
    return 1


def _enable_line_editing(completer: Callable[[str, int], str | None]) -> None:
    """Edit and complete lines and keep a history, if this Python has readline."""
    if readline is None:
        return
    is_editline = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
    readline.set_completer(completer)
    path = os.path.expanduser(_HISTORY)
    readline.set_history_length(_MOST_LINES)
    with suppress(OSError):
        readline.read_history_file(path)

    modes = termios.tcgetattr(0)

    def leave() -> None:
        with suppress(OSError):
            readline.write_history_file(path)
        with suppress(termios.error):  # readline restores them, unless a signal ends the prompt
            if is_foreground(0):
                termios.tcsetattr(0, termios.TCSADRAIN, modes)

    atexit.register(leave)
