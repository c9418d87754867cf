"""A function as the program of a rank: ``python -m meshrun.worker.function FOLDER``.

The folder holds the call and receives what each rank returns or raises. Each record carries its
generation, so that a restart never mixes old with new.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import BinaryIO

from meshrun.host import rank_variables as var
from meshrun.host.folder import open_private
from meshrun.host.own_variables import CALL_FOLDER

# Nothing that is not loaded yet is imported here: the caller's sys.path comes first.

PROGRAM = "meshrun.worker.function"
"""This module, as the program of a launch."""
ANSWER = ".pkl"
"""The end of the names of files with an answer, and of no others."""


def path_file(folder: str) -> str:
    """Return the file with the caller's ``sys.path``, entries separated by NUL."""
    return os.path.join(folder, "path")


def call_file(folder: str) -> str:
    """Return the file with the pickled function, its args and its kwargs."""
    return os.path.join(folder, "call")


def answer_file(folder: str, rank: int) -> str:
    """Return the file with what a call returned or raised on a rank.

    It holds two pickled objects. The first is (generation, the ranks whose files are in the folder,
    ``None`` or what was raised: its traceback and the result of ``pickle_error()``), the second the
    value that was returned.
    """
    return os.path.join(folder, f"{rank}{ANSWER}")


def open_own(path: str) -> BinaryIO:
    """Open a file that determines what this process runs.

    Raises:
        PermissionError: If it, or its folder, is not this user's. Others can replace a folder in a
            ``TMPDIR`` that they can write to, and move a file of this user's into their own, but
            not create either as this user's.
    """
    file = open(path, "rb", opener=open_private)  # noqa: SIM115 - the caller closes it
    if os.fstat(file.fileno()).st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"`{path}` belongs to another user")
    return file


def run(folder: str, *, for_all_nodes: bool) -> None:
    """Call the function, and store what it returns or raises.

    Args:
        folder: Holds the call.
        for_all_nodes: Whether one caller gets the answers of all nodes, and not each those of its
            own.

    Raises:
        BaseException: Whatever the function raised.
        TypeError: If what it returned cannot be pickled.
    """
    restore_path(folder)
    import pickle

    from meshrun.layout.environment import read_layout
    from meshrun.worker.pickling import pickle_error
    from meshrun.worker.program import format_raised

    rank, layout = var.own_rank(), read_layout(os.environ)
    ranks = range(layout.world_size) if for_all_nodes else layout.ranks_of_node(layout.node_rank())
    own = (layout.generation, tuple(ranks))
    with suppress(FileNotFoundError):  # of an earlier generation
        os.unlink(answer_file(folder, rank))
    try:
        with open_own(call_file(folder)) as file:
            function, args, kwargs = pickle.load(file)  # noqa: S301 - our caller wrote it
        _store(folder, rank, (*own, None), function(*args, **kwargs))
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raised = (format_raised(error).traceback, pickle_error(error))
        with suppress(OSError):  # the exception itself matters more
            _store(folder, rank, (*own, raised), None)
        raise


def restore_path(folder: str) -> None:
    """Put the caller's ``sys.path`` first in this process's own."""
    with open_own(path_file(folder)) as file:
        callers = os.fsdecode(file.read()).split("\0")
    sys.path[:] = [*callers, *(entry for entry in sys.path if entry not in callers)]


def _store(folder: str, rank: int, head: object, value: object) -> None:
    import pickle

    from meshrun.worker.pickling import dump

    path = answer_file(folder, rank)
    try:
        with open(f"{path}.part", "wb", opener=open_private) as file:
            pickle.dump(head, file)
            try:
                dump(value, file)
            except OSError:
                raise
            except Exception as error:
                raise unpicklable(value, rank, error) from None
        os.replace(file.name, path)
    except OSError as error:  # a full disk
        why = f"{error.strerror or error}, so what rank {rank} returned is lost"
        raise OSError(error.errno, why, path) from None


def unpicklable(value: object, rank: int, error: Exception) -> TypeError:
    """Return the error for a value that a rank returned and that cannot be pickled."""
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    return TypeError(f"cannot pickle the {name} that rank {rank} returned: {error}")


if __name__ == "__main__":
    _folder, _copy = sys.argv.pop(), os.environ.pop(CALL_FOLDER, None)
    run(_copy or _folder, for_all_nodes=_copy is not None)
