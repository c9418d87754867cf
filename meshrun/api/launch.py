"""launch(): the command line as a function, which runs the launcher as a child process."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar, get_type_hints, overload

from meshrun.api.child_launcher import run_launcher
from meshrun.errors import HostError, MeshrunError, UsageError, exit_code_of
from meshrun.host.folder import (
    is_temporary,
    private_folder,
    read_private,
    remove_if_stale,
    write_private,
    writing_to,
)
from meshrun.host.own_variables import PARENT_FOLDER, PARENT_PID
from meshrun.layout.parameters import check_parameter, check_parameters
from meshrun.layout.spec import AnyMesh, mesh_text
from meshrun.protocol.caller import ERROR, REPORT, Caller, as_caller
from meshrun.protocol.result import LaunchResult, Timings, describe_exit
from meshrun.report.result_json import parse_error_json, parse_result_json, render_error_json
from meshrun.start import own_command

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from meshrun.cli.option import Option

AnyText = str | Sequence[str]
"""One text or several."""
AnyWords = str | Sequence[str | os.PathLike[str]]
"""One text, or several texts and paths."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


class LaunchOptions(TypedDict, total=False):
    """Parameters of ``launch()`` for any kind of program, by the names of options.

    The last three are not options.
    """

    mesh: AnyMesh | None
    names: str | Sequence[str] | None
    nproc_per_node: int | str | None
    nnodes: int | str | None
    device: str | None
    start_method: str | None
    preload: str | Sequence[str]
    warm: bool
    max_restarts: int | None
    shutdown_timeout: float | str | None
    log_dir: str | os.PathLike[str] | None
    tee: int | str | None
    redirects: int | str | None
    show: str | Sequence[str]
    hide: str | Sequence[str]
    prefix: bool | str
    env: Mapping[str, str] | None
    cwd: str | os.PathLike[str] | None
    options: str | Sequence[str | os.PathLike[str]]


@overload
def launch(
    program: str | os.PathLike[str],
    *,
    args: Sequence[str | os.PathLike[str]] = (),
    module: bool = False,
    **flags: Unpack[LaunchOptions],
) -> LaunchResult: ...


@overload
def launch(
    program: Callable[_P, _R],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **flags: Unpack[LaunchOptions],
) -> list[_R]: ...


def launch(
    program: str | os.PathLike[str] | Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    module: bool = False,
    **flags: Any,
) -> LaunchResult | list[Any]:
    """Launch a script or a function on every device, with its mesh, and wait for it to finish.

    Parameters have the names and meanings of command-line options; the environment is read
    in the same way.

    Args:
        program: A script's path, a module's name with ``module``, or a function, which may be a
            lambda or defined in a notebook.
        args: Arguments of a script, as strings; or of a function, anything that can be pickled.
        kwargs: A function's keyword arguments.
        module: Whether ``program`` is run as ``python -m`` does.
        **flags: These parameters, which may all be omitted:
        mesh: Such as ``dp=2,tp=4``, ``{"dp": 2, "tp": 4}`` or ``(2, 4)``.
        names: Names of a mesh such as ``2x4``: ``dp,tp``, or a list.
        nproc_per_node: Workers on each node.
        nnodes: Number of nodes, on each of which ``launch()`` is called.
        device: A torch device type, or ``auto``.
        start_method: ``fork`` or ``exec``.
        preload: Modules to import once per node.
        warm: Whether to start from a warm server, and to leave one for the next launch.
        max_restarts: Maximum number of restarts of all ranks.
        shutdown_timeout: How long ranks may take to exit once asked to: 30 or ``"5m"``.
        log_dir: Where log files go.
        tee: Streams that also go to files: 1 stdout, 2 stderr, 3 both.
        redirects: Streams that go only to files.
        show: Print only these ranks.
        hide: Print all except these ranks.
        prefix: Whether lines start with the coordinate of their rank, or a value of ``--prefix``.
        env: Variables for the launcher and the ranks, in addition to those of this process.
        cwd: Working directory.
        options: Command-line options without a parameter.

    Returns:
        For a script, its result, even if it failed; for a function, what each rank of this node
        returned, in rank order.

    Raises:
        UsageError: If the request is invalid; nothing was started.
        HostError: If this machine cannot run the launch.
        RankFailed: If a rank of a function failed without an exception that can be raised here.
        Exception: What the first rank to fail raised, if ``program`` is a function; its
            ``__cause__`` shows the rank's traceback.
    """
    check_parameters(launch, locals())
    if unknown := flags.keys() - LaunchOptions.__annotations__.keys():
        raise TypeError(f"launch() got an unexpected keyword argument '{min(unknown)}'")
    flags = {name: value for name, value in flags.items() if value is not None}
    check_parameters(LaunchOptions, flags)
    if isinstance(program, str | os.PathLike):
        check_parameter("args", args, Sequence[str | os.PathLike[str]])
        if kwargs is not None:
            raise UsageError("kwargs requires a function", hint="a script takes args only")
    elif module:
        raise UsageError(f"module=True requires a module name, found {program!r}")
    if flags.get("prefix") is True:
        del flags["prefix"]  # as if it were omitted
    env, cwd, options = (flags.pop(name, None) for name in ("env", "cwd", "options"))
    line = to_flags({"module": module, **flags}, options or ())
    environ = {**os.environ, **(env or {})}
    check_cwd(cwd)
    place = None if cwd is None else os.fspath(cwd)
    if isinstance(program, str | os.PathLike):
        words = [os.fspath(program), *map(os.fspath, args)]
        with private_folder() as folder:
            return _run(folder, line, words, env=environ, cwd=place, stdin=None)

    from meshrun.api.remote_call import pickle_call, raise_failure, read_values, write_path
    from meshrun.cli.options import KINDS_OF_PROGRAM
    from meshrun.worker.function import PROGRAM, call_file

    environ = without_variables(KINDS_OF_PROGRAM, environ)
    line[:0] = ["--module", "--allow-different-programs"]  # the folder differs on each node
    with private_folder() as folder:
        with writing_to(folder):
            write_private(call_file(folder), pickle_call(program, args, kwargs or {}))
            write_path(folder)
        words = [PROGRAM, folder]
        result = _run(folder, line, words, env=environ, cwd=place, stdin=subprocess.DEVNULL)
        if result.exit_code:
            raise_failure(folder, result)
        return read_values(folder, result)


def sign(function: Any, options: type[Any]) -> None:
    """Name each of the options in the signature of a function, for notebooks and ``help()``."""
    short = inspect.signature(function)
    *own, _ = short.parameters.values()
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in get_type_hints(options).items()
    ]
    function.__signature__ = short.replace(parameters=[*own, *named])


sign(launch, LaunchOptions)


def serve_caller() -> tuple[Caller, Callable[[MeshrunError], None]] | None:
    """Make this launcher end with the process that called ``launch()``, if one did.

    The variables that identify the caller are removed, so that ranks do not inherit them. They are
    ignored if their folder was not made by a caller of the same user.

    Returns:
        The caller, and a function that reports an error to it; ``None`` if there is no caller.
    """
    import atexit

    from meshrun.cli.end import end_silently
    from meshrun.host.processes import die_with_parent

    caller, folder = os.environ.pop(PARENT_PID, ""), os.environ.pop(PARENT_FOLDER, "")
    if not caller.isdecimal() or not is_temporary(folder):
        return None

    def clean_up() -> None:
        if os.getppid() != int(caller):
            remove_if_stale(folder)

    def report(error: MeshrunError) -> None:
        try:
            write_private(_error_file(folder), render_error_json(error))
        except OSError:  # the disk is full, or the caller is gone
            from meshrun.host.stderr import say
            from meshrun.report.result_text import render_error

            say(render_error(error))

    clean_up()
    atexit.register(clean_up)
    signal.signal(signal.SIGTERM, end_silently)  # even if it is ignored
    die_with_parent(int(caller), signal.SIGTERM)
    return Caller(int(caller), folder), report


def check_cwd(cwd: str | os.PathLike[str] | None) -> None:
    """Raise UsageError if ``cwd`` is given and not a folder."""
    if cwd is not None and not os.path.isdir(cwd):
        raise UsageError(f"cwd must be a folder, found `{os.fspath(cwd)}`")


def _listed(values: AnyWords) -> list[str]:
    return [values] if isinstance(values, str) else [os.fspath(value) for value in values]


_TEXT_OF: Mapping[str, Callable[[Any], str]] = {
    "mesh": mesh_text,
    "names": lambda names: ",".join(_listed(names)),
    "log_dir": os.fspath,
    "prefix": lambda prefix: prefix or "none",
}
"""Options that have forms of their own as parameters."""


def to_flags(parameters: Mapping[str, Any], options: AnyWords) -> list[str]:
    """Return the words for values of options by name, ``None`` if not given, and for others.

    Raises:
        UsageError: If the others contain a word that is no option, or end without a value.
    """
    from meshrun.cli.options import Options
    from meshrun.cli.words import spell_out

    others = _listed(options)
    takes_value = {flag: row.takes_value for row in Options.rows() for flag in row.flags}
    line, wrong = spell_out(others, takes_value)
    if wrong is not None and spell_out([*others, ""], takes_value)[1] is None:
        raise wrong  # before a flag of ours follows the last option, which lacks its value
    if wrong is None and line.program:
        word = line.program[0]
        raise UsageError(
            f"options: `{word}` is neither an option nor the value of one",
            hint="separate dims with commas: dp=2,tp=4" if "=" in word else None,
        )
    flags: list[str] = []
    for name, value in parameters.items():
        row = getattr(Options, name)
        if not row.takes_value:
            flags += [row.flag] * value
        elif row.repeats:
            flags += [f"{row.flag}={each}" for each in _listed(value)]
        elif value is not None:
            flags.append(f"{row.flag}={_TEXT_OF.get(name, str)(value)}")
    return flags + others


def without_variables(rows: Iterable[Option[Any]], env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of some options."""
    names = {row.variable for row in rows}
    return {name: value for name, value in env.items() if name not in names}


def launcher_command(
    folder: str, flags: Sequence[str], words: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return a launcher's command line, and the variables that make this process its caller."""
    report = f"--report={os.path.join(folder, REPORT)}"
    command = own_command("launcher", *flags, report, "--", *words)
    return command, as_caller(folder)


def _run(
    folder: str,
    flags: Sequence[str],
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    stdin: int | None,
) -> LaunchResult:
    """Run a launcher and return the result that it reports, as :func:`read_result` does."""
    began_ns = time.monotonic_ns()
    command, variables = launcher_command(folder, flags, words)
    code = run_launcher(command, env={**env, **variables}, cwd=cwd, stdin=stdin)
    return read_result(folder, code, began_ns=began_ns)


def read_result(folder: str, code: int, *, began_ns: int) -> LaunchResult:
    """Return what a launcher reported that exited with ``code``, or was killed by signal -``code``.

    Raises:
        MeshrunError: The launcher's error, if it could not launch.
    """
    if (error := read_error(folder)) is not None:
        raise error
    if (result := _read(os.path.join(folder, REPORT), parse_result_json)) is not None:
        return result
    return _unreported(folder, code, Timings(began_ns=began_ns, ended_ns=time.monotonic_ns()))


def _read(path: str, parse: Callable[[str], _R]) -> _R | None:
    """Return the parsed file, or ``None`` if it is missing or, as on a full disk, incomplete."""
    with suppress(FileNotFoundError, ValueError):
        return parse(read_private(path).decode())
    return None


def check_by_dry_run(flags: Sequence[str]) -> None:
    """Check the options of a launch on this machine; raise the error of a dry run that fails."""
    began_ns = time.monotonic_ns()
    with private_folder() as folder:
        words = ["--standalone", *to_flags({}, flags), "--dry-run"]
        command, variables = launcher_command(folder, words, ["-"])
        env, null = {**os.environ, **variables}, subprocess.DEVNULL
        code = subprocess.call(command, env=env, stdin=null, stdout=null, stderr=null)
        if code or os.path.exists(_error_file(folder)):
            read_result(folder, code, began_ns=began_ns)


def _unreported(folder: str, code: int, timings: Timings) -> LaunchResult:
    """Return the result of a launcher that reported none, because it was killed or did nothing."""
    signum = -code if code < 0 else None
    trouble = None
    if code:
        end = describe_exit(code, signum)
        why = "before it could report a result"
        if not os.path.isdir(folder):
            why = f"without a result: its temporary folder `{folder}` was removed during the launch"
        trouble = HostError(
            f"the launcher {end} {why}",
            exit_code=exit_code_of(signum, code),
        )
    elif signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # wait() returns 0 then
        trouble = HostError(
            "the launcher reported no result, and its exit code is unknown: SIGCHLD is ignored",
            hint="call `signal.signal(signal.SIGCHLD, signal.SIG_DFL)` before the launch",
        )
    return LaunchResult(
        exit_code=trouble.exit_code if trouble else 0,
        signum=signum,
        trouble=trouble,
        timings=timings,
    )


def read_error(folder: str) -> MeshrunError | None:
    """Return why a launcher could not launch, if it has written that to its caller's folder."""
    return _read(_error_file(folder), parse_error_json)


def _error_file(folder: str) -> str:
    return os.path.join(folder, ERROR)
