"""Decides whether a warm server equals a new interpreter that imports the same modules."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import all_suffixes
from itertools import chain
from types import ModuleType
from typing import Any

from msgspec import Struct, field

from meshrun.host.users_files import is_users_file, module_files
from meshrun.warm.inherited import fixed_by_parent
from meshrun.worker.early_settings import is_read_at_import
from meshrun.worker.import_record import Stat, stat_of

_FOR_PYTHON = ("PYTHON", "LD_", "LC_", "GLIBC_", "MALLOC_")
"""Prefixes of variables that the interpreter, the loader or the C library reads at its start."""
_LANGUAGE = ("LANG", "LANGUAGE")
_OURS = "MESHRUN_"
_IMPORTED = (*all_suffixes(), ".pth", ".dist-info", ".egg-info", ".egg-link")
"""Suffixes of files that Python imports, or that list what is installed beside them."""


def this_interpreter() -> str:
    """Return a text that identifies this interpreter and this copy of meshrun."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return f"{os.path.realpath(sys.executable)} {sys.prefix} {sys.version} {here}"


class FileParts(Struct, frozen=True, kw_only=True):
    """The parts of a program's file on which libraries may depend when they are imported."""

    stat: Stat | None
    words: list[str] | None


class ServerDescription(Struct, frozen=True, kw_only=True):
    """A warm server's description of itself, written once it has imported its modules."""

    pid: int
    born: str
    """When the kernel started it, which distinguishes it from a later process with its id."""
    began: float
    """When it was started, in seconds since the epoch."""
    idle_s: float
    interpreter: str
    fixed: dict[str, str]
    """What it has inherited and cannot change, as of :func:`fixed_by_parent`."""
    base: list[str]
    """Packages that importing torch alone has imported."""
    extra: list[str]
    """Further packages, which a program imported when it last ran."""
    environment: dict[str, str]
    """A digest of each variable that the imports may have read."""
    read: list[str]
    """Variables that Python code read while it was imported."""
    sources: dict[str, FileParts]
    """The files of the program for which the further packages were imported."""


class Requirements(Struct, frozen=True, kw_only=True):
    """What a launch requires of a server."""

    interpreter: str = field(default_factory=this_interpreter)
    fixed: dict[str, str] = field(default_factory=fixed_by_parent)
    modules: list[str]
    environment: dict[str, str]
    """The variables when the program imports its libraries."""
    own_files: list[str] = []
    """The program's own files when it last ran."""
    changed: list[str] = []
    """Variables that the program set then."""


class Mismatch(Struct, frozen=True):
    """Why a server cannot be used."""

    reason: str
    distance: int | None = None
    """How much differs, for a server that the user may expect to be used; otherwise ``None``."""
    is_permanent: bool = False
    """Whether no launch can use the server any longer."""


def find_mismatch(server: ServerDescription, required: Requirements) -> Mismatch | None:
    """Return why a server does not meet the requirements of a launch, or ``None``.

    Changes of libraries, which have thousands of files, are left to :func:`changed_library`.
    """
    reasons = chain(
        _other_process(server, required),
        _other_variables(server, required),
        _changed_program(server),
    )
    return next(reasons, None)


def changed_library(files: Mapping[str, Any]) -> Mismatch | None:
    """Return the first file that has changed since a server loaded it, if there is one.

    Args:
        files: What :func:`loaded_files` returned in the server; its values are not trusted.
    """
    for path, before in files.items():
        if not isinstance(before, list | tuple) or _state_of(path) != tuple(before):
            return Mismatch(f"`{path}` has changed", distance=0, is_permanent=True)
    return None


def _other_process(server: ServerDescription, required: Requirements) -> Iterator[Mismatch]:
    if server.interpreter != required.interpreter:
        yield Mismatch("it has a different interpreter")
    if packages(required.modules) - {*server.base} != {*server.extra}:
        yield Mismatch("it holds different packages")
    if server.extra and not server.sources.keys() >= {*required.own_files}:
        yield Mismatch("it holds the packages of another program")
    for name, value in required.fixed.items():
        if server.fixed.get(name) != value:
            yield Mismatch(f"it has a different {name}", distance=1)


def _other_variables(server: ServerDescription, required: Requirements) -> Iterator[Mismatch]:
    now = digests(required.environment, server.read)
    names = now.keys() | server.environment.keys()
    other = [each for each in sorted(names) if now.get(each) != server.environment.get(each)]
    if other:
        yield Mismatch(f"{other[0]} has changed", distance=len(other))
    if server.extra and (late := set_too_late(required.changed, server.read)):
        yield Mismatch(f"the program sets {late[0]}", distance=0, is_permanent=True)


def _changed_program(server: ServerDescription) -> Iterator[Mismatch]:
    for path, source in server.sources.items() if server.extra else ():
        if stat_of(path) != source.stat and words_of(path, server.read) != source.words:
            reason = f"the imports or variables in `{path}` have changed"
            yield Mismatch(reason, distance=0, is_permanent=True)


def packages(modules: Collection[str]) -> frozenset[str]:
    """Return the top-level packages of modules."""
    return frozenset(name.partition(".")[0] for name in modules)


def set_too_late(changed: Collection[str], read: Collection[str]) -> list[str]:
    """Return the variables that a program sets as it runs and libraries read on import.

    Those that torch reads are found in the program's source (``worker/early_settings.py``).
    """
    return sorted(name for name in changed if name in read and not is_read_at_import(name))


def digests(environment: Mapping[str, str], read: Collection[str]) -> dict[str, str]:
    """Return digests, which reveal no secrets, of the variables that matter to imports."""
    return {
        name: hashlib.blake2b(os.fsencode(value), digest_size=8).hexdigest()
        for name, value in environment.items()
        if name.startswith(_FOR_PYTHON)
        or name in _LANGUAGE
        or is_read_at_import(name)
        or (name in read and not name.startswith(_OURS))
    }


def words_of(path: str, read: Collection[str]) -> list[str] | None:
    """Return what a Python file imports, and which of the variables in ``read`` it names.

    No other change of the file affects how libraries are imported.
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
    """Return the files that this process has loaded, and the folders of its ``sys.path``."""
    found = {}
    files = (path for _, path in module_files(modules))
    for path in {*files, *_mapped(), *filter(os.path.isdir, sys.path)}:
        state = _state_of(path)
        if state is not None:
            found[path] = state
    return found


def _state_of(path: str) -> Stat | None:
    """Return a value that changes with a file, or with the names that a folder lets one import.

    Programs write checkpoints and logs to their own folders, which ``PYTHONPATH`` or an editable
    installation may have put on the path; any change of an installed one may be an installation.
    """
    if not os.path.isdir(path) or not is_users_file(os.path.join(path, "")):
        return stat_of(path)
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if _can_be_imported(entry))
    except OSError:
        return None
    digest = hashlib.blake2b(os.fsencode("\0".join(names)), digest_size=8)
    return int.from_bytes(digest.digest(), "big"), len(names)


def _can_be_imported(entry: os.DirEntry[str]) -> bool:
    if entry.name.endswith(_IMPORTED):
        return True
    return entry.is_dir() and os.path.exists(os.path.join(entry.path, "__init__.py"))


def _mapped() -> Iterator[str]:
    with (
        contextlib.suppress(OSError),
        open("/proc/self/maps", encoding="utf-8", errors="replace") as file,
    ):
        for line in file:
            _, slash, path = line.partition("/")
            if slash:
                yield f"/{path.rstrip()}".removesuffix(" (deleted)")
