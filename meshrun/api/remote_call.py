"""Pickles a call for the ranks and unpickles what they return or raise."""

from __future__ import annotations

import importlib.machinery
import inspect
import linecache
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, ModuleType
from typing import IO, Any, NoReturn

import cloudpickle

from meshrun.errors import MeshrunError, UsageError
from meshrun.host.folder import write_private
from meshrun.protocol.result import LaunchResult, RankFailed, cause_of
from meshrun.report.result_text import describe_rank
from meshrun.worker.function import ANSWER, answer_file, open_own, path_file
from meshrun.worker.pickling import dumps, unpickle_error, with_source

_registry = threading.Lock()
"""Held while a module is registered with cloudpickle, which has one registry per process."""


class RankTraceback(Exception):
    """A rank's traceback, as the ``__cause__`` of the exception that the caller gets."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


def write_path(folder: str) -> None:
    """Write ``sys.path`` to ``folder``, for the ranks."""
    write_private(path_file(folder), os.fsencode("\0".join(_absolute(sys.path))))


def _absolute(path: Sequence[object]) -> Iterator[str]:
    """Yield the entries as absolute paths, even if the working folder has changed or is gone."""
    for entry in path:
        if not isinstance(entry, str):  # which imports ignore
            continue
        finder = sys.path_importer_cache.get(entry)
        with suppress(FileNotFoundError):  # relative to a folder that is gone
            yield os.path.abspath(getattr(finder, "path", entry))


def pickle_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Return a pickled call for the ranks to make.

    Raises:
        UsageError: If it cannot be pickled, or would only return a coroutine or a generator.
    """
    _check_runs(function)
    try:
        with _by_value_if_needed(getattr(function, "__module__", None)):
            return dumps(_Call(function, tuple(args), dict(kwargs)))
    except Exception as error:
        name = getattr(function, "__qualname__", None) or repr(function)
        raise UsageError(
            f"cannot pickle `{name}` and its arguments for the ranks: {error}",
            hint="create files, locks and process groups inside the function",
        ) from error


class _Call(tuple[Any, ...]):
    """A call, which ranks unpickle as a tuple, with the source of a function that is in no file."""

    def __new__(cls, *parts: Any) -> _Call:
        return super().__new__(cls, parts)

    def __reduce__(self) -> tuple[Any, ...]:
        code = getattr(self[0], "__code__", None)
        name = code.co_filename if isinstance(code, CodeType) else ""
        text = "" if os.path.exists(name) else "".join(linecache.getlines(name))
        return (with_source, (tuple(self), name, text)) if text else (tuple, (tuple(self),))


def _check_runs(function: Callable[..., Any]) -> None:
    """Refuse a function whose call runs none of its code."""
    kinds: dict[str, tuple[Callable[[object], bool], str]] = {
        "an async function": (inspect.iscoroutinefunction, "def main(): return asyncio.run(...)"),
        "an async generator": (inspect.isasyncgenfunction, "def main(): return asyncio.run(...)"),
        "a generator": (inspect.isgeneratorfunction, "def main(): return list(...)"),
    }
    for kind, (is_one, wrapped) in kinds.items():
        if is_one(function) or is_one(type(function).__call__):
            name = getattr(function, "__qualname__", None) or repr(function)
            raise UsageError(
                f"`{name}` is {kind}; calling it runs nothing",
                hint=f"pass a function that runs it, such as `{wrapped}`",
            )


def read_values(folder: str, result: LaunchResult) -> list[Any]:
    """Return what the call returned on each rank of this node, or of a Ray cluster, in rank order.

    Raises:
        UsageError: If no rank was started.
        MeshrunError: If a rank exited with 0 before its call returned.
    """
    if result.generation is None and result.best_steps:  # a spare
        return []
    if result.generation is None:
        raise no_rank_started("there are no values")
    heads = {}
    for name in os.listdir(folder):
        if name.endswith(ANSWER):
            with open_own(os.path.join(folder, name)) as file:
                heads[int(name.removesuffix(ANSWER))] = pickle.load(file)  # noqa: S301 - as below
    # In an elastic launch, ranks of an earlier generation may have left their files.
    newest = [head for head in heads.values() if head[0] == result.generation]
    if not newest:
        raise exited_early("every rank")
    generation, ranks, _ = newest[0]
    values = []
    for rank in sorted(ranks):
        if heads.get(rank) != (generation, ranks, None):
            raise exited_early(f"rank {rank}")
        with open_own(answer_file(folder, rank)) as file:
            pickle.load(file)  # noqa: S301 - our ranks wrote it
            values.append(load_value(file, rank))
    return values


def no_rank_started(consequence: str) -> UsageError:
    """Return the error for a launch that succeeded without any rank."""
    return UsageError(
        f"no rank was started, so {consequence}",
        hint="remove options that prevent ranks from starting, such as --dry-run",
    )


def exited_early(who: str) -> MeshrunError:
    """Return the error for a rank that succeeded but returned no value."""
    return MeshrunError(
        f"{who} exited with code 0 before its function returned",
        hint="return from the function instead of calling sys.exit() or os._exit()",
    )


def load_value(file: IO[bytes], rank: int) -> Any:
    """Return a rank's value from a file.

    Raises:
        TypeError: If it cannot be unpickled here.
    """
    try:
        return pickle.load(file)  # noqa: S301 - our ranks wrote it
    except (Exception, SystemExit) as error:
        raise TypeError(f"cannot unpickle what rank {rank} returned: {error}") from error


def raise_failure(folder: str, result: LaunchResult) -> NoReturn:
    """Raise the cause of the failure of a function's launch.

    Raises:
        Exception: The exception of the first rank to fail, if a copy can be made here.
        RankFailed: Otherwise.
        MeshrunError: If no rank was the cause.
    """
    if result.trouble is not None:
        raise result.trouble
    if result.broken_program is not None:
        raise RankFailed(result) from RankTraceback(result.broken_program)
    first = cause_of(result)
    if result.signum is not None or first is None or first.raised is None:
        raise RankFailed(result)
    error: BaseException = RankFailed(result)
    text = first.raised.traceback
    # There is no file if it failed outside the function.
    with suppress(FileNotFoundError), open_own(answer_file(folder, first.rank)) as file:
        generation, _, raised = pickle.load(file)  # noqa: S301 - our ranks wrote it
        if generation == result.generation and raised is not None:
            text, pickled = raised
            error = unpickle_error(pickled) or error
    cause = RankTraceback(f"{describe_rank(first)} on {first.host}, pid {first.pid}:\n{text}")
    raise error from cause


@contextmanager
def _by_value_if_needed(name: str | None) -> Iterator[None]:
    """Pickle a module by value while the block runs, if a rank could not import it."""
    module = sys.modules.get(name or "")
    with _registry:
        needed = module is not None and name != "__main__" and not _can_be_imported(module)
        needed = needed and name not in cloudpickle.list_registry_pickle_by_value()
        if needed:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            if needed:
                cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(module: ModuleType) -> bool:
    """Return whether a new interpreter with this ``sys.path`` would find the same module.

    It would not find a module that was loaded by its path, as in pytest's ``importlib`` mode, or
    that never was in a file.
    """
    if module.__name__ in sys.builtin_module_names:
        return True
    folders: Sequence[str] | None = None
    found: importlib.machinery.ModuleSpec | None = None
    so_far = ""
    for part in module.__name__.split("."):
        so_far = f"{so_far}.{part}" if so_far else part
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(so_far, folders) for find in finders if find is not None)
        found = next(filter(None, specs), None)
        if found is None:
            return False
        folders = found.submodule_search_locations
    origin = getattr(module, "__file__", None)
    if found is None or origin is None or found.origin is None:
        return found is not None and origin is None  # a namespace package, or a frozen module
    return bool(os.path.realpath(found.origin) == os.path.realpath(origin))
