"""From a new process to the program's first line: environment, threads, seeds, mesh."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Literal

from msgspec.structs import asdict

from meshrun.host import rank_variables as var
from meshrun.host.cores import bind_to_cpus
from meshrun.host.exclusion import how_to_exclude, node_name
from meshrun.host.own_variables import SERVE, WATCH_FILE, WORKER_PID
from meshrun.host.printable import one_line
from meshrun.host.processes import set_title
from meshrun.mesh.late_settings import is_of_group, note
from meshrun.mesh.to_launcher import to_launcher
from meshrun.plan.rank_program import Program
from meshrun.protocol.rank_end import RankRaised, ended_collective, is_of_collective
from meshrun.protocol.zygote_messages import (
    BreakpointPassed,
    CallEnded,
    NodeExcluded,
    RankBeat,
    RankReady,
    StartRank,
)
from meshrun.worker.answer_requests import AnswerRequests, report_calls
from meshrun.worker.debuggers import ask_at_breakpoints, leave_interrupts, stop_on_interrupt
from meshrun.worker.early_settings import EarlySettings
from meshrun.worker.exit import ExitHandler
from meshrun.worker.group_lifetime import end_connections_with_rank, guard_groups
from meshrun.worker.imports import when_imported
from meshrun.worker.late_variables import follow_environment, raise_thread_counts
from meshrun.worker.process_group import adopt_process_group, join_mesh, serve_env_rendezvous
from meshrun.worker.program import ProgramSource, format_raised, print_nothing, run_program
from meshrun.worker.reporter import Reporter
from meshrun.worker.stack_handler import enable_stack_dumps, ignore_requests_on_exec, keep_high


def become_rank(
    order: StartRank,
    *,
    program: Program,
    source: ProgramSource,
    reports: socket.socket,
    ending: ExitHandler,
    barrier_fd: int,
    stacks_fd: int,
    requests_fd: int,
) -> None:
    """Turn this process into a rank and run the program in it.

    The caller has put the process into a session of its own and set up its stdout and stderr.
    """
    stacks_fd = enable_stack_dumps(stacks_fd)
    ignore_requests_on_exec(stacks_fd)
    set_environment(order)
    bind_to_cpus(order.cpus)
    program = program.for_local_rank(order.local_rank)
    where = f" [{order.label}]" if order.label else ""
    set_title(f"rank {order.rank}{where}", program.target, *program.args)
    # A program that closes all descriptors may soon have a connection of its own in their place.
    reporter = Reporter(socket.socket(fileno=keep_high(reports.detach())), order.rank)
    barrier_fd = keep_high(barrier_fd)
    to_launcher.exclude_node = partial(_exclude, reporter)
    to_launcher.send_beat = lambda step: reporter.report(RankBeat, step=step)
    to_launcher.end_call = lambda number: reporter.report(CallEnded, number=number)
    ending.arm(reporter, barrier_fd, order.imports_file)
    end_connections_with_rank(reporter)
    try:
        if order.check:
            _pass_check(order, source, reporter)
        raise_thread_counts(os.environ)
        _forget_state_of_imports()
        when_imported("torch.distributed.distributed_c10d", guard_groups)
        answers = AnswerRequests(requests_fd, stacks_fd, reporter)
        serve = partial(serve_env_rendezvous, dict(os.environ), before=answers.start)
        when_imported("torch.distributed.rendezvous", serve)
        if var.MESH in order.environment and not _is_mesh_late(order, source.settings):
            _join(order, source, reporter, before=answers.start)
        if "torch" in sys.modules:
            follow_environment(source.settings)
        if order.debug:
            stop_on_interrupt()
        else:
            leave_interrupts()
            if not order.stdin:
                ask_at_breakpoints(partial(_pass_breakpoint, reporter))
        reporter.report(RankReady)
    except BaseException as error:
        _report(reporter, error, may_be_ours=True)
        ending.note(error)
        sys.excepthook = print_nothing
        raise
    try:
        _run(program, source, reporter)
    except BaseException as error:
        ending.note(error)
        raise
    finally:
        if to_launcher.step is not None:  # heartbeat() may not have sent the last step
            reporter.report(RankBeat, step=to_launcher.step)


def _pass_breakpoint(reporter: Reporter) -> bool:
    reporter.report(BreakpointPassed)
    return False


def _pass_check(order: StartRank, source: ProgramSource, reporter: Reporter) -> None:
    """Check the mesh (``--check-first``); return only if nothing is wrong with it."""
    from meshrun.worker.check_first import check_first

    reason = check_first(order, source.settings, reporter)
    if reason is None:
        return
    is_one_of_several = int(os.environ[var.GROUP_WORLD_SIZE]) > 1
    if reason and is_one_of_several and order.local_rank == 0:
        _exclude(reporter, reason, found_by="check")
    while True:  # the launcher ends this process
        signal.pause()


def _join(
    order: StartRank, source: ProgramSource, reporter: Reporter, *, before: Callable[[], None]
) -> None:
    with source.settings.in_effect():
        for module in order.imports:
            import_module(module)
        before()
        join_mesh(tuple(order.coordinate), reporter)
    adopt_process_group()


def _run(program: Program, source: ProgramSource, reporter: Reporter) -> None:
    """Run the program, and note its files for ``--watch``; or serve a prompt, which may run it."""
    if (watched := os.environ.pop(WATCH_FILE, None)) is not None:
        from meshrun.worker.import_record import record_files

        record_files(watched)
    if SERVE in os.environ:
        from meshrun.worker.serve_calls import serve_instead

        serve_instead(partial(run_program, program, source.code, _print_exit_text))
    else:
        run_program(program, source.code, lambda error: _report(reporter, error))


def _is_mesh_late(order: StartRank, settings: EarlySettings) -> bool:
    """Return whether building the mesh is left to the program.

    It is with ``--mesh-init lazy``, or if the program sets a variable that the mesh depends on.
    """
    if order.lazy:
        return True
    device = order.environment[var.DEVICE]
    cause = settings.first_unclear(also=lambda name: is_of_group(name, device))
    if cause is not None and order.rank == 0:
        note(f"building the mesh at the first current_mesh(), because {cause}")
    return cause is not None


def _exclude(
    reporter: Reporter, reason: str, *, found_by: Literal["program", "check"] = "program"
) -> None:
    remedy = how_to_exclude(node_name(os.environ), os.environ)
    reporter.report(NodeExcluded, reason=one_line(reason), remedy=remedy, found_by=found_by)


def set_environment(order: StartRank) -> None:
    """Give this process the environment of its rank."""
    for name in var.THREADS:
        os.environ.pop(name, None)
    os.environ.update(order.environment)
    os.environ[WORKER_PID] = str(os.getpid())


def _report(reporter: Reporter, error: BaseException, *, may_be_ours: bool = False) -> None:
    """Report an exception, and print it where the program wants exceptions to be printed."""
    if isinstance(error, KeyboardInterrupt):
        # A scheduler that signals every process sends another, which would interrupt this.
        signal.signal(signal.SIGINT, lambda *_: None)
    raised = format_raised(error, may_be_ours=may_be_ours)
    shown = False
    if raised.handled:
        printed = shown = True  # the program has printed what it wants
    elif not isinstance(error, SystemExit) and not _is_plain(sys.excepthook):
        printed = shown = _call_hook(error)
    elif printed := reporter.is_in_fork or sys.stderr is not sys.__stderr__:  # may be a file
        _write_to_stderr(raised.traceback)
    if is_of_collective(raised.message, raised.traceback):
        report_calls(reporter, last_failed=ended_collective(raised.traceback))
    own = threading.current_thread()  # the interpreter waits for the others before it exits
    left = [each.name for each in threading.enumerate() if each is not own and not each.daemon]
    reported = reporter.report(RankRaised, **asdict(raised), shown=shown, threads=", ".join(left))
    if not (reported or printed):
        _write_to_stderr(raised.traceback)


def _print_exit_text(error: BaseException) -> None:
    """Print the text that ``sys.exit`` was given; the caller prints all other errors."""
    raised = format_raised(error)
    if isinstance(error, SystemExit) and not raised.handled:
        _write_to_stderr(raised.traceback)


def _call_hook(error: BaseException) -> bool:
    """Pass an exception to ``sys.excepthook``; return whether that did not raise."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as broken:
        broken.__context__ = None
        _write_to_stderr(f"Error in sys.excepthook:\n{format_raised(broken).traceback}")
        return False
    return True


def _write_to_stderr(text: str) -> None:
    with suppress(Exception):  # the report contains the text
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_plain(hook: object) -> bool:
    """Return whether ``hook`` is Python's own, or torch's, which only prefixes each line."""
    if hook is sys.__excepthook__:
        return True
    if getattr(hook, "__qualname__", "").endswith("._distributed_excepthook"):
        cells = getattr(hook, "__closure__", None) or ()
        return any(_is_plain(cell.cell_contents) for cell in cells)
    return False


def _forget_state_of_imports() -> None:
    """Give each rank what a fresh interpreter has: its own ids and random state, a free TMPDIR."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # as in multiprocessing
    tempfile: Any = sys.modules.get("tempfile")
    # The program may set the variable, and dill has asked for it before; a module may set a folder.
    if tempfile is not None and tempfile.tempdir in tempfile._candidate_tempdir_list():
        tempfile.tempdir = None
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:  # of the CPU; a device's starts alike on all ranks
        generator.seed()
