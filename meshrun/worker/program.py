"""Runs the user's program in this process, as ``python program.py`` would."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import os
import pkgutil
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader, SourcelessFileLoader

from msgspec import Struct
from msgspec.structs import replace

from meshrun.host.named_files import absolute
from meshrun.host.users_files import OURS
from meshrun.plan.rank_program import Program, first_path, is_archive
from meshrun.worker.early_settings import EarlySettings, read_early_settings

_MACHINERY = (runpy.__file__, importlib.__file__)
_run_as_main: Callable[[str, bool], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
"""Runs a module in the namespace of the current ``__main__``, as for ``python -m``."""
_NO_ERRORS = ("Exit", "Abort")
"""Exceptions by which click and typer end a command; they handle them with ``sys.exit()``."""


class UncaughtException(Struct, frozen=True):
    """An exception that left the program, without our own frames."""

    kind: str
    message: str
    traceback: str
    handled: bool = False
    """Whether the program caught it and called ``sys.exit()`` while handling it."""


class ProgramSource(Struct, frozen=True):
    """What a program's source reveals before it runs."""

    code: types.CodeType | None = None
    """The script's code; ranks compile modules and archives."""
    torch_modules: tuple[str, ...] = ()
    """The modules of torch that it imports."""
    settings: EarlySettings = EarlySettings()


def inspect_program(program: Program) -> ProgramSource:
    """Read a program once, before anything is forked.

    Raises:
        SyntaxError: As ``python`` raises it.
        OSError: If the file cannot be read.
    """
    folder = first_path(program)
    if program.kind == "module":
        tree, path = _module_source(program.target)
        package = program.target.rpartition(".")[0]
        settings = read_early_settings(
            tree, path, os.environ, folder=folder, package=package, args=program.args
        )
        return ProgramSource(None, tuple(_torch_imports(tree)), settings)
    if program.kind == "command" or is_archive(program.target):
        return ProgramSource()
    path = absolute(program.target)
    with open(path, "rb") as file:
        if _is_compiled(path):
            code: types.CodeType | None = pkgutil.read_code(file)
            if code is None:
                raise RuntimeError("Bad magic number in .pyc file")  # as ``python`` raises it
            return ProgramSource(code)
        tree = _parse(file.read(), path)
    return ProgramSource(
        compile(tree, path, "exec", dont_inherit=True),
        tuple(_torch_imports(tree)),
        read_early_settings(tree, path, os.environ, folder=folder, args=program.args),
    )


def _is_compiled(path: str) -> bool:
    return path.endswith(".pyc")


def _module_source(name: str) -> tuple[ast.Module, str]:
    """Return syntax tree and file of a module or a package's ``__main__``, without an import."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise SystemExit(f"{sys.executable}: No module named {top}")
    stem = os.path.join(*(spec.submodule_search_locations or [""])[:1], *rest)
    origin = spec.origin if not rest and spec.submodule_search_locations is None else None
    for path in (origin, f"{stem}.py", os.path.join(stem, "__main__.py")):
        try:
            with open(path or "", "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the rank warns, if necessary
                return _parse(file.read(), path or ""), path or ""
        except (OSError, SyntaxError, ValueError):  # the rank fails with it
            continue
    return ast.Module(body=[], type_ignores=[]), ""


def _parse(source: bytes, path: str) -> ast.Module:
    """Parse as ``ast.parse`` does, without a frame of its own in the traceback of an error."""
    tree = compile(source, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)  # noqa: S101 - which that flag gives
    return tree


def _torch_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of torch that a script imports at its top level.

    Importing them before the fork costs once what it would cost in each rank. Other packages may
    start threads, which do not survive a fork, so they are not imported.
    """
    for statement in tree.body:
        match statement:
            case ast.Import(names=names):
                yield from (name.name for name in names if _is_torch(name.name))
            case ast.ImportFrom(module=str(module), names=names, level=0) if _is_torch(module):
                yield module
                yield from (f"{module}.{name.name}" for name in names)
    if any(isinstance(node, ast.Attribute) and node.attr == "optim" for node in ast.walk(tree)):
        yield "torch._dynamo"  # the first optimizer imports it


def _is_torch(module: str) -> bool:
    return module.partition(".")[0] == "torch"


def format_raised(error: BaseException, *, may_be_ours: bool = False) -> UncaughtException:
    """Return what ``python`` prints of ``error``, without our frames above the user's.

    If it ``may_be_ours``, as a bug of meshrun's, our frames are kept if there are no others.
    """
    if isinstance(error, SystemExit):
        if (handled := _handled_by(error)) is not None:
            return replace(format_raised(handled), handled=True)
        # sys.exit("text") prints the text alone
        message = _message_of(error.code)
        return UncaughtException("SystemExit", message, f"{message}\n")
    frames = without_our_frames(error.__traceback__)
    if frames is not None or not may_be_ours:
        error.__traceback__ = frames
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return UncaughtException(type(error).__name__, _message_of(error), text)


def without_our_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    """Return ``frames`` from the first one that is neither meshrun's nor Python's own."""
    first = frames
    while first is not None and _is_ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first


def run_program(
    program: Program, code: types.CodeType | None, on_raise: Callable[[BaseException], None]
) -> None:
    """Run the program as ``__main__`` of this process.

    Args:
        program: What to run.
        code: The compiled script, if :attr:`Source.code` has one.
        on_raise: Called in place of the interpreter's own printing, with an exception that leaves
            the program, or with a ``SystemExit`` that carries a text or was raised while the
            program handled an exception.

    Raises:
        BaseException: Whatever the program raised, which then ends the interpreter.
    """
    sys.argv = [program.target, *program.args]
    sys.orig_argv[:] = [sys.executable, "-u", *program.argv]
    ours = vars(sys.modules["__main__"])
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if "__mp_main__" in sys.modules:  # the module of objects that spawned children send back
        sys.modules["__mp_main__"] = main
    if "__annotations__" in ours:  # until Python 3.13, the interpreter creates them beforehand
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    try:
        if program.kind == "module":
            _run_as_main(program.target, True)
        elif code is None:
            _run_as_main("__main__", False)
        else:
            is_compiled = _is_compiled(program.target)
            path = absolute(program.target) if is_compiled else code.co_filename
            loader = SourcelessFileLoader if is_compiled else SourceFileLoader
            main.__dict__.update(__file__=path, __cached__=None)
            main.__loader__ = loader("__main__", path)
            exec(code, main.__dict__)  # noqa: S102 - the purpose of a launcher
    except SystemExit as error:
        is_text = not (error.code is None or isinstance(error.code, int))
        if is_text or _handled_by(error) is not None:
            on_raise(error)
        if is_text:
            raise SystemExit(1) from None
        raise
    except BaseException as error:
        try:
            on_raise(error)
        except Exception as raised:  # by a signal's handler, as DataLoader's for a killed worker
            on_raise(raised)
        sys.excepthook = print_nothing
        raise


def _handled_by(error: SystemExit) -> Exception | None:
    """Return the error in whose handler the program called ``sys.exit()`` with a code, if any.

    A function that the handler calls, such as a fallback, may exit for another reason. So may the
    handler of a signal that arrives meanwhile.
    """
    handled, exits = error.__context__, error.__traceback__
    is_failure = isinstance(error.code, int) and error.code and not error.__suppress_context__
    if not is_failure or not isinstance(handled, Exception) or handled.__traceback__ is None:
        return None
    if type(handled).__name__ in _NO_ERRORS:
        return None
    while exits is not None and exits.tb_next is not None:
        exits = exits.tb_next
    frame = exits and exits.tb_frame
    if frame and frame.f_globals.get("__name__") == "_sitebuiltins":  # exit() raises it there
        frame = frame.f_back
    return handled if frame is handled.__traceback__.tb_frame else None


def print_nothing(*_: object) -> None:
    """Print nothing: an excepthook for an exception that has been reported."""


def _is_ours(filename: str) -> bool:
    return filename.startswith((*OURS, "<frozen ")) or filename in _MACHINERY


def _message_of(thing: object) -> str:
    try:
        return str(thing)
    except BaseException:  # even SystemExit, as where Python prints it
        return "(no message: its __str__ raised)"
