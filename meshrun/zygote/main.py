"""The zygote, started by ``meshrun.start``: import torch once, stay single-threaded, fork ranks.

    CONTROL_FD REPORT_FD STACKS_FD script|module|command TARGET [ARGUMENT ...]

It communicates only with the launcher, over an inherited socket, and kills everything below it when
that socket closes. In a forked rank ``main`` returns, and the program runs from module level.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pkgutil import iter_modules

from meshrun.errors import UsageError
from meshrun.host.processes import become_subreaper, die_with_parent, set_title
from meshrun.host.shortage import describe_shortage
from meshrun.host.stderr import note
from meshrun.mesh.build import check_registered
from meshrun.plan.rank_program import Program, first_path
from meshrun.protocol.zygote_messages import Prepare, ProgramBroken, ZygoteReady, ZygoteUnsafe
from meshrun.worker import imports
from meshrun.worker.bootstrap import become_rank
from meshrun.worker.exit import ExitHandler
from meshrun.worker.program import ProgramSource, format_raised, inspect_program
from meshrun.worker.stack_handler import enable_stack_dumps
from meshrun.zygote.control import (
    is_hung_up,
    leave_signals_to_launcher,
    receive,
    send,
)
from meshrun.zygote.count_devices import check_devices
from meshrun.zygote.fork_safety import ImportWatch, nvml_based_cuda_check
from meshrun.zygote.server import ZygoteServer
from meshrun.zygote.store import Guard


def main(known_at_start: frozenset[str]) -> Callable[[], None]:
    """Run the zygote; return only in a rank, with the function that it is to run."""
    fds, program = list(map(int, sys.argv[1:4])), Program.of_words(sys.argv[4:])
    return run_zygote(fds, program, ending=ExitHandler(), known_at_start=known_at_start)


def run_zygote(
    fds: Sequence[int], program: Program, *, ending: ExitHandler, known_at_start: frozenset[str]
) -> Callable[[], None]:
    """Run the zygote; return only in a rank, with the function that it is to run.

    Args:
        fds: The control socket, for orders and events; the socket for the ranks' reports; the file
            to which this process dumps its stacks.
        program: The program that ranks run.
        ending: Ends a rank.
        known_at_start: Modules that a new interpreter has loaded before its program.
    """
    try:
        return _prepare(fds, program, ending, known_at_start).serve()
    except (OSError, MemoryError) as error:
        if (shortage := describe_shortage(error)) is None:
            raise
        note(f"{shortage.message}; {shortage.hint}")
        os._exit(shortage.exit_code)


def _prepare(
    fds: Sequence[int], program: Program, ending: ExitHandler, known_at_start: frozenset[str]
) -> ZygoteServer:
    """Import what ranks share, and return the server that forks them."""
    control_fd, reports_fd, stacks_fd = fds
    control, reports = socket.socket(fileno=control_fd), socket.socket(fileno=reports_fd)
    for inherited in (control, reports):
        inherited.set_inheritable(False)
    enable_stack_dumps(stacks_fd)
    set_title("zygote", program.target, *program.args)
    die_with_parent(os.getppid())
    dispositions = leave_signals_to_launcher()
    become_subreaper()
    order, _ = receive(control)
    # If the launcher was killed before die_with_parent(), only the socket shows it.
    if not isinstance(order, Prepare) or is_hung_up(control):
        os._exit(0)
    for signum in order.ignored:  # in ranks as well
        signal.signal(signum, signal.SIG_IGN)
        dispositions[signum] = signal.SIG_IGN
    guard = Guard(order.scratch_dir, control)
    began_ns = time.monotonic_ns()
    try:
        source, unsafe = _import_shared(program, order, known_at_start)
    except BaseException as error:
        send(control, _describe_broken(error))  # once, not for each rank
        os._exit(0)
    gc.enable()
    gc.freeze()  # the collector must not write to memory that ranks share
    if unsafe is not None:
        send(control, ZygoteUnsafe(reason=unsafe))
        os._exit(0)
    now_ns = time.monotonic_ns()
    send(control, ZygoteReady(at_ns=now_ns, import_ns=now_ns - began_ns))
    ending.keep_modules()
    return ZygoteServer(
        control=control,
        reports=reports,
        program=program,
        become_rank=partial(become_rank, program=program, source=source, ending=ending),
        fresh=order.start_method == "exec",
        dispositions=dispositions,
        guard=guard,
    )


def _import_shared(
    program: Program, order: Prepare, known_at_start: frozenset[str]
) -> tuple[ProgramSource, str | None]:
    """Return the program, and why ranks cannot be forks of this process, after its imports."""
    folder, watch = first_path(program), ImportWatch()
    with imports.on_path(folder):
        source = inspect_program(program)
    gc.disable()
    first = imports.on_path(folder if imports.holds(folder, order.preload) else None)
    if order.start_method == "exec":  # this process imports only for its store
        with first, source.settings.in_effect():
            if not order.preload:  # otherwise only the ranks can check
                check_registered(order.backends)
        unsafe, modules = None, order.preload
    else:
        with first, nvml_based_cuda_check(), source.settings.in_effect():
            for module in order.preload:
                _preload(module)
                watch.imported(module)
            imports.check_torch_version()
            for module in source.torch_modules:
                with suppress(Exception):  # the program will report it
                    importlib.import_module(module)
            check_registered(order.backends)
        imports.put_first(folder, known_at_start=known_at_start)
        unsafe, modules = source.settings.first_unclear(), []
        if unsafe is not None:
            unsafe += " before torch is imported, to a value known only at run time"
        else:
            unsafe = watch.why_unsafe()
    if order.device and unsafe is None:
        with imports.on_path(folder):
            check_devices(order.device, order.workers, modules)
    return source, unsafe


def _describe_broken(error: BaseException) -> ProgramBroken:
    if isinstance(error, UsageError):
        hint = f"\n\nhint: {error.hint}" if error.hint else ""
        text = f"error: {error.message}{hint}"
        return ProgramBroken(text=text, exit_code=error.exit_code)
    if isinstance(error, MemoryError) and (shortage := describe_shortage(error)) is not None:
        note(f"{shortage.message}; {shortage.hint}")
    exit_code = error.code if isinstance(error, SystemExit) else 1
    return ProgramBroken(
        text=format_raised(error).traceback,
        exit_code=exit_code if isinstance(exit_code, int) else 1,
    )


def _preload(module: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == "torch":
            raise UsageError(
                f"torch is not installed for {sys.executable}",
                hint="install it there, or start meshrun with the Python that has it:"
                " python -m meshrun",
            ) from error
        if not f"{module}.".startswith(f"{missing}."):
            raise  # the module exists, but one that it imports does not
        if missing.startswith("torch."):
            imports.check_torch_is_supported()
        if "," in module:
            repeated = " ".join(f"--preload {name.strip()}" for name in module.split(","))
            raise UsageError(
                f"--preload {module}: expected one module", hint=f"use {repeated}"
            ) from error
        known = [found.name for found in iter_modules()]
        near = get_close_matches(missing, known, n=1) if "." not in missing else []
        raise UsageError(
            f"--preload {module}: no module named `{missing}`",
            hint=f"did you mean `{near[0]}`?"
            if near
            else "check that it is installed for this interpreter",
        ) from error
