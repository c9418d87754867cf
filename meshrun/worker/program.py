"""Runs the user's program in this process, as ``python program.py`` would."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import os
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader

from meshrun.plan.rank_program import Program
from meshrun.worker.early_settings import EarlySettings, read_early_settings
from meshrun.worker.sys_path import first_path, is_archive

_MACHINERY = (runpy.__file__, importlib.__file__)
_NO_ERRORS = ("Exit", "Abort")
"""What click and typer raise to end a command; they handle it by ``sys.exit()``."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that left the program, without our own frames."""

    kind: str
    message: str
    traceback: str
    handled: bool = False
    """Whether the program caught it, and called ``sys.exit()`` while it handled it."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of a program before it runs."""

    code: types.CodeType | None = None
    """A script, compiled; modules and archives wait for the rank."""
    torch_modules: tuple[str, ...] = ()
    """The modules of torch that it is about to import."""
    settings: EarlySettings = field(default_factory=EarlySettings)


def read_program(program: Program) -> Source:
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
        return Source(None, tuple(_torch_imports(tree)), settings)
    is_compiled = program.target.endswith(".pyc")
    if program.kind == "command" or is_compiled or is_archive(program.target):
        return Source()
    path = os.path.abspath(program.target)
    with open(path, "rb") as file:
        tree = _parse(file.read(), path)
    return Source(
        compile(tree, path, "exec", dont_inherit=True),
        tuple(_torch_imports(tree)),
        read_early_settings(tree, path, os.environ, folder=folder, args=program.args),
    )


def _module_source(name: str) -> tuple[ast.Module, str]:
    """Return syntax tree and file of a module or a package's ``__main__``, without importing it."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise SystemExit(f"{sys.executable}: No module named {top}")
    stem = os.path.join(*(spec.submodule_search_locations or [""])[:1], *rest)
    origin = spec.origin if not rest and spec.submodule_search_locations is None else None
    for path in (origin, f"{stem}.py", os.path.join(stem, "__main__.py")):
        try:
            with open(path or "", "rb") as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the rank will warn, if it has to
                return _parse(file.read(), path or ""), path or ""
        except (OSError, SyntaxError, ValueError):  # the rank will meet it, in its own place
            continue
    return ast.Module(body=[], type_ignores=[]), ""


def _parse(source: bytes, path: str) -> ast.Module:
    """Parse as ``ast.parse`` does, without a frame of its own in the traceback of an error."""
    tree = compile(source, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)  # noqa: S101 - which that flag gives
    return tree


def _torch_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of torch that a script imports at its top level.

    Imported before the fork they cost once what they would cost in each rank. Other packages are
    left alone: they may start threads, which do not survive a fork.
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


def format_raised(error: BaseException, *, may_be_ours: bool = False) -> Raised:
    """Return what ``python`` prints of ``error``, without our frames above the user's.

    Args:
        error: The exception.
        may_be_ours: Whether to keep our frames if there are no others, as it may be our bug.
    """
    if isinstance(error, SystemExit):
        if (handled := _handled_by(error)) is not None:
            return replace(format_raised(handled), handled=True)
        # sys.exit("text") prints the text alone
        message = _message_of(error.code)
        return Raised("SystemExit", message, f"{message}\n")
    frames = without_our_frames(error.__traceback__)
    if frames is not None or not may_be_ours:
        error.__traceback__ = frames
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Raised(type(error).__name__, _message_of(error), text)


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
        code: The compiled script, if :func:`compile_program` gave one.
        on_raise: Called with an exception that leaves the program, or with a ``SystemExit``
            that carries a text, or comes of an exception that the program handled; it stands in
            for the interpreter's own printing.

    Raises:
        BaseException: Whatever the program raised, for the interpreter to end by.
    """
    sys.argv = [program.target, *program.args]
    sys.orig_argv[:] = [sys.executable, "-u", *program.argv]
    ours = vars(sys.modules["__main__"])
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if "__mp_main__" in sys.modules:  # where objects that come back from spawned children are from
        sys.modules["__mp_main__"] = main
    if "__annotations__" in ours:  # until Python 3.13 the interpreter makes them beforehand
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    try:
        if program.kind == "module":
            _run_as_main(program.target, True)
        elif is_archive(program.target):
            _run_as_main("__main__", False)
        elif code is None:
            runpy.run_path(program.target, run_name="__main__")
        else:
            main.__dict__.update(__file__=code.co_filename, __cached__=None)
            main.__loader__ = SourceFileLoader("__main__", code.co_filename)
            exec(code, main.__dict__)  # noqa: S102 - it is what a launcher is for
    except SystemExit as error:
        is_text = not (error.code is None or isinstance(error.code, int))
        if is_text or _handled_by(error) is not None:
            on_raise(error)
        if is_text:
            raise SystemExit(1) from None
        raise
    except BaseException as error:
        on_raise(error)
        sys.excepthook = print_nothing
        raise


def _handled_by(error: SystemExit) -> Exception | None:
    """Return the error in whose handler the program called ``sys.exit()`` with a code.

    A function that the handler calls, such as a fallback, may exit for another reason; so may the
    handler of a signal that comes meanwhile.
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
    if frame and frame.f_globals.get("__name__") == "_sitebuiltins":  # exit(), in its own words
        frame = frame.f_back
    return handled if frame is handled.__traceback__.tb_frame else None


def _run_as_main(module: str, alter_argv: bool) -> None:
    """Run a module in the namespace that is ``__main__`` now, as ``python -m`` and archives do."""
    run: Callable[[str, bool], object] = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(module, alter_argv)


def print_nothing(*_: object) -> None:
    """An excepthook for what has been reported already."""


def _is_ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen ")) or filename in _MACHINERY


def _message_of(thing: object) -> str:
    try:
        return str(thing)
    except BaseException:  # also SystemExit, as where Python prints it
        return "(no message: its __str__ raised)"
