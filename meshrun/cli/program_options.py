"""What ranks are to run, from the options that say so."""

from __future__ import annotations

import os
import re
import shlex
import sys

from meshrun.cli.parsed_options import Asked
from meshrun.errors import UsageError
from meshrun.plan.request import Program

_PYTHON = re.compile(r"(.*/)?python[\d.]*")
_DIM = re.compile(r"[A-Za-z_]\w*=(-?\d+|auto|\d+:\d*)")


def read_program(asked: Asked) -> Program:
    """Return the program that was asked for.

    Raises:
        UsageError: If there is none, or it is to be run in two ways.
    """
    target, args = asked.text("script"), tuple(asked.values.get("args") or ())
    if target is None:
        raise UsageError("no program was given", hint="meshrun --mesh dp=2 train.py")
    module = asked.flag("module")
    if not (module or asked.flag("no_python") or os.path.lexists(target)):
        _check_target(asked, target, args)
    if asked.flag("run_path"):  # torchrun lets it win over both
        return Program(kind="script", target=target, args=args)
    if asked.flag("no_python"):
        if module:
            raise UsageError("--no-python and --module exclude each other")
        return Program(kind="command", target=target, args=args)
    interpreter = asked.env.get("PYTHON_EXEC")
    if interpreter and interpreter != sys.executable:
        words = ("-u", "-m", target) if module else ("-u", target)
        return Program(kind="command", target=interpreter, args=(*words, *args))
    return Program(kind="module" if module else "script", target=target, args=args)


def _check_target(asked: Asked, target: str, args: tuple[str, ...]) -> None:
    """Say what stands where the program should, where that is no file.

    Raises:
        UsageError: If it was meant for something else.
    """
    if _PYTHON.fullmatch(target):
        rest = shlex.join(args) or "train.py"
        raise UsageError(
            f"`{target}` is an interpreter, and meshrun takes the program itself",
            hint=f"leave it out: meshrun ... {rest}",
        )
    if _DIM.fullmatch(target):
        mesh = asked.text("mesh")
        joined = f"{mesh},{target}" if mesh and not asked.flag("names") else target
        raise UsageError(
            f"`{target}` stands where the program should",
            hint=f"dims are joined by commas: --mesh {joined}",
        )
    if target.isdigit():
        raise UsageError(
            f"`{target}` stands where the program should",
            hint=f"--nproc-per-node {target}" + "; -n is --dry-run" * asked.flag("dry_run"),
        )
