"""When a warm server is as good as a new interpreter that would import the same modules."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import ModuleType
from typing import Any

from meshrun.worker.early_settings import is_read_at_import
from meshrun.worker.learnt import Stat, stat_of

BASE = ("torch", "torch.distributed.device_mesh")
"""What every zygote imports, of whatever program."""
_FOR_PYTHON = ("PYTHON", "LD_", "LC_", "GLIBC_", "MALLOC_")
"""How variables begin that the interpreter, the loader or the C library reads at its start."""
_LANGUAGE = ("LANG", "LANGUAGE")
_OURS = "MESHRUN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file of a program, as far as a change of it could change what libraries do."""

    stat: Stat | None
    words: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What a warm server writes about itself, once it has imported what it holds."""

    pid: int
    born: str
    """When the kernel started it, so that nobody else has its id."""
    began: float
    """When it was started, in seconds since the epoch."""
    idle_s: float
    interpreter: str
    fixed: dict[str, str]
    """What it has from its parent and cannot be given."""
    base: list[str]
    """Packages that importing torch alone has imported."""
    extra: list[str]
    """Further packages, which a program imported when it last ran."""
    environment: dict[str, str]
    """A digest of each variable that the imports may have read."""
    read: list[str]
    """Variables that Python code read while it was imported."""
    sources: dict[str, Source]
    """The files of the program that the further packages are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a launch needs a server to be."""

    interpreter: str
    fixed: Mapping[str, str]
    modules: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables as the program has them when it imports its libraries."""
    own_files: Collection[str] = field(default=())
    changed: Collection[str] = field(default=())
    """Variables that the program set when it last ran."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a server cannot be used."""

    why: str
    distance: int | None = None
    """How far it is from being the server that one would expect; ``None`` if it is another."""
    is_forever: bool = False
    """Whether no launch can use it any more."""


def mismatch(server: Server, wanted: Wanted) -> Mismatch | None:
    """Return why a server is not what a launch needs; ``None`` if it is, unless a library changed.

    Those have thousands of files: :func:`changed_library` looks at them.
    """
    reasons = chain(
        _other_process(server, wanted), _other_variables(server, wanted), _changed_program(server)
    )
    return next(reasons, None)


def changed_library(files: Mapping[str, Any]) -> Mismatch | None:
    """Return which file a server had loaded before it was changed, if any.

    Args:
        files: What :func:`loaded_files` returned there; checked as it is compared.
    """
    for path, before in files.items():
        if not isinstance(before, list | tuple) or stat_of(path) != tuple(before):
            return Mismatch(f"`{path}` has changed", distance=0, is_forever=True)
    return None


def _other_process(server: Server, wanted: Wanted) -> Iterator[Mismatch]:
    if server.interpreter != wanted.interpreter:
        yield Mismatch("it has a different interpreter")
    if packages(wanted.modules) - {*server.base} != {*server.extra}:
        yield Mismatch("it holds different packages")
    if server.extra and not server.sources.keys() >= {*wanted.own_files}:
        yield Mismatch("it holds the packages of another program")
    for name, value in wanted.fixed.items():
        if server.fixed.get(name) != value:
            yield Mismatch(f"it has a different {name}", distance=1)


def _other_variables(server: Server, wanted: Wanted) -> Iterator[Mismatch]:
    asked = digests(wanted.environment, server.read)
    names = asked.keys() | server.environment.keys()
    other = [each for each in sorted(names) if asked.get(each) != server.environment.get(each)]
    if other:
        yield Mismatch(f"{other[0]} has changed", distance=len(other))
    if server.extra and (late := set_too_late(wanted.changed, server.read)):
        yield Mismatch(f"the program sets {late[0]}", distance=0, is_forever=True)


def _changed_program(server: Server) -> Iterator[Mismatch]:
    for path, source in server.sources.items() if server.extra else ():
        if stat_of(path) != source.stat and words_of(path, server.read) != source.words:
            why = f"the imports or variables in `{path}` have changed"
            yield Mismatch(why, distance=0, is_forever=True)


def this_interpreter() -> str:
    """Return what must be equal for two interpreters to be the same."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return f"{os.path.realpath(sys.executable)} {sys.prefix} {sys.version} {here}"


def packages(modules: Collection[str]) -> frozenset[str]:
    """Return the packages that modules are of."""
    return frozenset(name.partition(".")[0] for name in modules)


def set_too_late(changed: Collection[str], read: Collection[str]) -> list[str]:
    """Return the variables that a program sets as it runs, and libraries read at their import.

    Those of torch are found in the source before (``worker/early_settings.py``).
    """
    return sorted(name for name in changed if name in read and not is_read_at_import(name))


def digests(environment: Mapping[str, str], read: Collection[str]) -> dict[str, str]:
    """Return what shows whether variables that matter to imports are the same, and no secret."""
    return {
        name: hashlib.blake2b(os.fsencode(value), digest_size=8).hexdigest()
        for name, value in environment.items()
        if name.startswith(_FOR_PYTHON)
        or name in _LANGUAGE
        or is_read_at_import(name)
        or (name in read and not name.startswith(_OURS))
    }


def words_of(path: str, read: Collection[str]) -> list[str] | None:
    """Return what a Python file imports, and which of the variables it names.

    A change of anything else in it leaves what libraries do at their import as it was.
    """
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None
    words: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                words.update(name.name for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                words.update(f"{'.' * level}{module or ''}.{name.name}" for name in names)
            case ast.Constant(value=str(text)) if text in read:
                words.add(text)
    return sorted(words)


def loaded_files(modules: Mapping[str, ModuleType]) -> dict[str, Stat]:
    """Return the files this process was made of, and the folders in which Python looks for more."""
    found = {}
    for path in {*_files_of(modules), *_mapped(), *filter(os.path.isdir, sys.path)}:
        state = stat_of(path)
        if state is not None:
            found[path] = state
    return found


def _files_of(modules: Mapping[str, ModuleType]) -> Iterator[str]:
    for module in list(modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.startswith(os.sep):
            yield path


def _mapped() -> Iterator[str]:
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            _, slash, path = line.partition("/")
            if slash:
                yield f"/{path.rstrip()}".removesuffix(" (deleted)")
