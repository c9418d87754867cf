"""A function as the program of a rank: ``python -m meshrun.worker.function FOLDER``.

The folder holds the call and receives what each rank returns or raises. Each record carries its
generation, so that a restart never mixes old with new.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from meshrun.host.folder import open_private

# Nothing that is not loaded yet is imported here: the caller's sys.path comes first.

PROGRAM = "meshrun.worker.function"
"""This module, as the program of a launch."""
FOLDER_VARIABLE = "MESHRUN_CALL_FOLDER"
"""The variable with a copy of the folder on this node, if it is not the caller's node."""


def path_file(folder: str) -> str:
    """Return the file with the caller's ``sys.path``, entries separated by NUL."""
    return os.path.join(folder, "path")


def call_file(folder: str) -> str:
    """Return the file with the pickled function, its args and its kwargs."""
    return os.path.join(folder, "call.pkl")


def value_file(folder: str, rank: int) -> str:
    """Return the file with (generation, world size) and then the value, both pickled."""
    return os.path.join(folder, f"value_{rank}.pkl")


def error_file(folder: str, rank: int) -> str:
    """Return the file with (generation, traceback, result of ``pickle_error()``), pickled."""
    return os.path.join(folder, f"error_{rank}.pkl")


def open_own(path: str, mode: str = "rb", **how: Any) -> IO[Any]:
    """Open a file that determines what this process runs.

    Raises:
        PermissionError: If it is not this user's. Others can replace a folder in a ``TMPDIR`` that
            they can write to, but not create a file that this user owns.
    """
    file: IO[Any] = open(path, mode, opener=_without_links, **how)  # noqa: SIM115 - the caller closes it
    if os.fstat(file.fileno()).st_uid != os.geteuid():
        file.close()
        raise PermissionError(f"`{path}` belongs to another user")
    return file


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def run(folder: str) -> None:
    """Call the function, and store what it returns or raises.

    Raises:
        BaseException: Whatever the function raised.
        TypeError: If what it returned cannot be pickled.
    """
    restore_path(folder)
    import pickle

    rank = int(os.environ["RANK"])
    for stale in (value_file(folder, rank), error_file(folder, rank)):
        if os.path.exists(stale):
            os.unlink(stale)
    try:
        with open_own(call_file(folder)) as file:
            function, args, kwargs = pickle.load(file)  # noqa: S301 - our caller wrote it
        _store_value(folder, rank, function(*args, **kwargs))
    except (SystemExit, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        _store_error(folder, rank, error)
        raise


def restore_path(folder: str) -> None:
    """Put the caller's ``sys.path`` first in this process's own."""
    with open_own(path_file(folder), "r", errors="surrogateescape", newline="") as file:
        callers = file.read().split("\0")
    sys.path[:] = [*callers, *(entry for entry in sys.path if entry not in callers)]


def _store_value(folder: str, rank: int, value: object) -> None:
    import pickle

    import cloudpickle

    path = value_file(folder, rank)
    head = (int(os.environ["MESHRUN_GENERATION"]), int(os.environ["WORLD_SIZE"]))
    with open(f"{path}.part", "wb", opener=open_private) as file:
        pickle.dump(head, file)
        try:
            cloudpickle.dump(value, file)
        except OSError:  # a full disk
            raise
        except Exception as error:
            kind = type(value)
            name = kind.__qualname__
            if kind.__module__ != "builtins":
                name = f"{kind.__module__}.{name}"
            raise TypeError(
                f"cannot pickle the {name} that rank {rank} returned: {error}"
            ) from None
    os.replace(file.name, path)


def _store_error(folder: str, rank: int, error: BaseException) -> None:
    import pickle

    from meshrun.worker.error_copy import pickle_error
    from meshrun.worker.program import format_raised

    path = error_file(folder, rank)
    generation = int(os.environ["MESHRUN_GENERATION"])
    record = (generation, format_raised(error).traceback, pickle_error(error))
    try:
        with open(f"{path}.part", "wb", opener=open_private) as file:
            pickle.dump(record, file)
        os.replace(file.name, path)
    except OSError:  # the exception itself matters more
        pass


if __name__ == "__main__":
    _folder = sys.argv.pop()
    run(os.environ.pop(FOLDER_VARIABLE, _folder))
