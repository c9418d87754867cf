"""The program that each rank runs, as a value, and where ``python`` would look for it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from string import Template
from typing import Literal
from zipimport import ZipImportError, zipimporter

from msgspec import Struct
from msgspec.structs import replace

from meshrun.host.named_files import absolute

PYTHON_EXEC = "PYTHON_EXEC"
"""torchrun's variable for the interpreter of the ranks."""
ProgramKind = Literal["script", "module", "command"]
BASE = ("torch", "torch.distributed.device_mesh")
"""What every zygote imports, for any program."""


class Program(Struct, frozen=True, kw_only=True):
    """A script by path, a module by name, or a command, with its arguments.

    ``${local_rank}`` in an argument stands for the rank's number on its node.
    """

    kind: ProgramKind
    target: str
    args: tuple[str, ...] = ()

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Program:
        """Return the program with these :attr:`words`."""
        kind, target, *args = words
        return cls(kind=kind, target=target, args=tuple(args))  # type: ignore[arg-type]

    @property
    def words(self) -> tuple[str, ...]:
        """Its kind, target and arguments, for the command line of another process of meshrun."""
        return self.kind, self.target, *self.args

    @property
    def argv(self) -> tuple[str, ...]:
        """The words that run the same program without meshrun, after the interpreter."""
        flag = ("-m",) if self.kind == "module" else ()
        return (*flag, self.target, *self.args)

    def __str__(self) -> str:
        """Return a command line that runs the same program without meshrun."""
        return ("" if self.kind == "command" else "python ") + shlex.join(self.argv)

    def for_local_rank(self, local_rank: int) -> Program:
        """Return the program with ``${local_rank}`` filled in, by torchrun's rules."""
        if not any("$" in arg for arg in self.args):
            return self
        filled = (Template(arg).safe_substitute(local_rank=local_rank) for arg in self.args)
        return replace(self, args=tuple(filled))


def first_path(program: Program) -> str | None:
    """Return what ``python`` puts in front of ``sys.path`` for this program, or ``None``.

    A command has its own path, and a function passed to ``launch()`` uses its caller's.
    """
    is_ours = program.kind == "module" and program.target.partition(".")[0] == "meshrun"
    if program.kind == "command" or is_ours:
        return None
    if program.kind == "script" and is_archive(program.target):
        return absolute(program.target)
    if getattr(sys.flags, "safe_path", False):
        return None
    if program.kind == "module":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(program.target))


def is_archive(path: str) -> bool:
    """Return whether ``python path`` would look for a ``__main__`` module inside it."""
    if not os.path.isfile(path):  # a pipe is read only once, later
        return os.path.isdir(path)
    try:
        zipimporter(path)
    except ZipImportError:
        return False
    return True
