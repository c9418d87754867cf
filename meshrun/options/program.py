"""What ranks are to run, from the options that say so."""

from __future__ import annotations

import sys

from meshrun.asked import Asked
from meshrun.errors import UsageError
from meshrun.request import Program


def read_program(asked: Asked) -> Program:
    """Return the program that was asked for.

    Raises:
        UsageError: If there is none, or it is to be run in two ways.
    """
    target, args = asked.text("script"), tuple(asked.values.get("args") or ())
    if target is None:
        raise UsageError("no program was given", hint="meshrun --mesh dp=2 train.py")
    module = asked.flag("module")
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
