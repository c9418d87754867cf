"""Checks and reads the program of a launch."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import sys
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from meshrun.errors import NO_COMMAND, NOT_EXECUTABLE, HostError, ProgramError
from meshrun.host.named_files import absolute
from meshrun.plan.rank_program import PYTHON_EXEC, Program
from meshrun.protocol.stacks import current_folder

_LONGEST_SOURCE = 4 * 1024 * 1024
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/[1-9]\d*")
"""The path that a shell substitutes for ``<(...)``."""
_LONGEST_SHEBANG = 256
_SHELL = re.compile(rb"#!.*\b(?:ba|da|z|k|c|tc|fi)?sh\b")
_LARGEST = 64 * 1024 * 1024
"""Bytes of a program's file that is compared between nodes."""


def check_folder() -> str:
    """Return the current folder; raise HostError if it has been removed."""
    if not (folder := current_folder()):
        raise HostError("the current folder no longer exists", hint="`cd` to an existing folder")
    return folder


def check_program(program: Program) -> None:
    """Check that a program can be opened, with the errors of ``python``.

    Raises:
        ProgramError: If it cannot, with the exit code of ``python``.
        HostError: If the current folder no longer exists, where torch cannot be imported.
    """
    check_folder()
    if program.kind == "command":
        _check_command(program.target)
    elif program.kind == "script":
        _check_script(program.target)


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise ProgramError(
                f"can't find '__main__' module in '{absolute(path)}'",
                exit_code=1,
                hint="pass a file in it, or add a `__main__.py` to it",
            )
        return
    if _DESCRIPTOR.fullmatch(path):
        raise ProgramError(
            f"cannot run `{path}`: ranks do not inherit this descriptor",
            hint="pass the program on standard input: `meshrun /dev/stdin < <(...)`",
        )
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):  # a pipe can be read only once
            return
        with open(path, "rb") as file:
            begins = file.readline(_LONGEST_SHEBANG)
    except OSError as error:
        raise ProgramError(
            f"can't open file '{absolute(path)}': [Errno {error.errno}] {error.strerror}",
            hint=_hint_for(path, error),
        ) from error
    if begins.startswith(b"\x7fELF"):
        raise ProgramError(
            f"`{path}` is a binary, not a Python file",
            hint="if it is an interpreter, leave it out; to run a command, use --no-python",
        )
    if _SHELL.match(begins) and not path.endswith(".py") and not _is_python(path):
        interpreter = begins[2:].decode(errors="replace").strip()
        raise ProgramError(
            f"`{path}` is a script for `{interpreter}`, not a Python file",
            hint="use --no-python to run it as a command",
        )


def _is_python(path: str) -> bool:
    """Return whether a file is Python despite its first line; scripts of pip may name a shell."""
    try:
        with open(path, "rb") as file:
            ast.parse(file.read(_LONGEST_SOURCE))
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def read_source(program: Program) -> str | None:
    """Return the source of a program that is not a command, if its file is easy to find."""
    path = None if program.kind == "command" else file_of(program)
    try:
        if path is None or not stat.S_ISREG(os.stat(path).st_mode):
            return None
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_LONGEST_SOURCE)
    except OSError:
        return None


def digest_program(program: Program) -> tuple[str, str] | None:
    """Return the path and SHA-256 of a program's own file, or ``None``.

    There is none for pipes, large files, modules that are not found on the path, and commands that
    are not scripts. The first line of a command's script is left out: it names an interpreter,
    whose path may differ between machines.
    """
    import hashlib

    path = file_of(program)
    if path is None:
        return None
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            return None
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    if program.kind == "command":
        if not content.startswith(b"#!"):
            return None
        content = content.partition(b"\n")[2]
    return path, hashlib.sha256(content).hexdigest()


def file_of(program: Program) -> str | None:
    """Return a program's own file, if it is easy to find."""
    if program.kind == "command":
        return shutil.which(program.target)
    if program.kind == "module":
        return _file_of_module(program.target)
    is_folder = os.path.isdir(program.target)
    return os.path.join(program.target, "__main__.py") if is_folder else program.target


def _file_of_module(name: str) -> str | None:
    """Return the file of a module that ``python -m`` would run, without importing its packages."""
    places: list[str] | None = [current_folder(), *filter(None, sys.path)]
    spec, before = None, ""
    for part in (*name.split("."), "__main__"):
        if places is None:  # a module, which has no `__main__`
            break
        before = f"{before}.{part}".lstrip(".")
        try:
            spec = PathFinder.find_spec(before, places)
        except KeyError:  # a namespace package whose parent was not imported
            return None
        if spec is None:
            return None
        places = spec.submodule_search_locations
    return None if spec is None or not spec.has_location else spec.origin


def _check_command(name: str) -> None:
    if shutil.which(name) is not None:
        return
    is_file = os.path.isfile(name)
    is_interpreter = name == os.environ.get(PYTHON_EXEC)
    if is_file and os.sep in name:
        cure = f"unset {PYTHON_EXEC}" if is_interpreter else "remove --no-python"
        raise ProgramError(
            f"`{name}` is not executable",
            exit_code=NOT_EXECUTABLE,
            hint=f"run `chmod +x {name}`, or {cure}",
        )
    hint = f"{PYTHON_EXEC} must name an interpreter, or be unset" if is_interpreter else None
    raise ProgramError(
        f"no command named `{name}`",
        exit_code=NO_COMMAND,
        hint=f"for the file in this folder, write ./{name}" if is_file else hint,
    )


def _hint_for(path: str, error: OSError) -> str | None:
    """Return what may be meant by a path that cannot be opened."""
    if path == "-":
        return "pass /dev/stdin for a program on standard input"
    if os.path.islink(path):
        missing = ", which does not exist" if isinstance(error, FileNotFoundError) else ""
        return f"it is a symbolic link to `{os.readlink(path)}`{missing}"
    folder = os.path.dirname(path) or "."
    if os.path.isfile(f"{path}.py"):
        return f"did you mean `{path}.py`?"
    if shutil.which(path):
        return "use --no-python to run it as a command"
    try:
        names = [name for name in os.listdir(folder) if name != os.path.basename(path)]
        near = get_close_matches(os.path.basename(path), names, n=1, cutoff=0.7)
    except OSError:
        return None
    return f"did you mean `{Path(folder, near[0])}`?" if near else None
