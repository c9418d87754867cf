"""Whether the program of a launch is there to be run."""

from __future__ import annotations

import os

from meshrun.errors import HostError, ProgramError
from meshrun.request import Program
from meshrun.stacks import current_folder


def check_program(program: Program) -> None:
    """Say what ``python`` would say of a program that cannot be opened.

    Raises:
        ProgramError: With the exit code that ``python`` would have.
        HostError: If there is no folder to run it in: torch cannot be imported then.
    """
    if not current_folder():
        raise HostError("the current folder was removed", hint="`cd` to one that is there")
    if program.kind == "module":
        return
    path = program.target
    if program.kind == "command":
        _check_command(path)
        return
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise ProgramError(
                f"can't find '__main__' module in '{os.path.abspath(path)}'",
                exit_code=1,
                hint="name a file in it, or give the directory a `__main__.py`",
            )
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ProgramError(
            f"can't open file '{os.path.abspath(path)}': [Errno {error.errno}] {error.strerror}",
            exit_code=2,
            hint=_nearest_file(path),
        ) from error


def _check_command(name: str) -> None:
    import shutil

    if shutil.which(name) is not None:
        return
    found = os.path.exists(name)
    raise ProgramError(
        f"`{name}` is not executable" if found else f"there is no command `{name}`",
        exit_code=126 if found else 127,  # as a shell says it
        hint=f"chmod +x {name}, or leave --no-python out" if found else None,
    )


def _nearest_file(path: str) -> str | None:
    """Return a hint with a file of a similar name, if the folder has one."""
    from difflib import get_close_matches

    folder = os.path.dirname(path) or "."
    try:
        near = get_close_matches(os.path.basename(path), os.listdir(folder), n=1, cutoff=0.7)
    except OSError:
        return None
    return f"`{os.path.normpath(os.path.join(folder, near[0]))}`?" if near else None
