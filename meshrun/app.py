"""What meshrun does, as functions: plan a launch, then carry it out.

A launch binds the store's socket, starts the zygote, which imports torch once, has it fork the
ranks, brings their output to the console, and ends everything when the first rank fails.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from meshrun.errors import ProgramError
from meshrun.host.facts import detect_host
from meshrun.plan import HostFacts, LaunchPlan, build_plan
from meshrun.request import LaunchRequest, Program

if TYPE_CHECKING:
    from meshrun.events import Event
    from meshrun.result import LaunchResult
    from meshrun.supervise.console import Console
    from meshrun.supervise.known import State
    from meshrun.supervise.loop import Watch


def plan(
    request: LaunchRequest, *, facts: HostFacts | None = None, check_host: bool = True
) -> LaunchPlan:
    """Decide everything about a launch; starts nothing.

    Args:
        request: What was asked for.
        facts: This machine; looked up if ``None``.
        check_host: Whether a device this machine lacks is an error.

    Raises:
        UsageError: If the request does not fit together, with the numbers.
    """
    facts = facts or detect_host(with_topology=request.numa_binding is not None)
    return build_plan(request, facts, check_host=check_host)


def launch(
    plan: LaunchPlan, *, watch: Watch | None = None, began_ns: int | None = None
) -> LaunchResult:
    """Carry out a plan and wait for its end.

    Args:
        plan: What to start.
        watch: Called with every event, the state after it and the console.
        began_ns: Monotonic time at which the user's wait began; now if ``None``.

    Returns:
        How it went; nothing that was started is left, whatever happened.

    Raises:
        ProgramError: If the program cannot be opened.
        HostError: If this machine cannot hold the launch.
    """
    # What only a launch needs is imported here: a dry run is twice as fast without it.
    import secrets

    from meshrun.environment import Session
    from meshrun.host.run_folder import RunFolder
    from meshrun.host.sockets import LOOPBACK_INTERFACE, listen_on
    from meshrun.supervise.clock import Stopwatch
    from meshrun.supervise.console import Console
    from meshrun.supervise.loop import Loop
    from meshrun.supervise.outcome import build_result, went_well

    check_program(plan.program)
    stopwatch = Stopwatch(began_ns or time.monotonic_ns())
    console = Console()

    def see(event: Event, state: State, console: Console) -> None:
        stopwatch.see(event)
        if watch is not None:
            watch(event, state, console)

    run_id = plan.request.rendezvous.run_id or secrets.token_hex(8)
    with listen_on(plan.store_address, plan.store_port) as listener:
        folder = RunFolder(plan.request.logs, run_id)
        session = Session(
            run_id=run_id,
            master_addr=plan.store_address,
            master_port=listener.getsockname()[1],
            run_folder=folder.path,
            loopback=LOOPBACK_INTERFACE,
        )
        state = None
        try:
            state = Loop(
                plan,
                session=session,
                folder=folder,
                store_listener=listener,
                console=console,
                watch=see,
            ).run()
        finally:
            kept = folder.close(went_well=state is not None and went_well(state))
    console.close()
    return build_result(
        state,
        plan.layout,
        host=os.uname().nodename,
        timings=stopwatch.timings(),
        log_folder=kept,
    )


def check_program(program: Program) -> None:
    """Say what ``python`` would say of a program that cannot be opened.

    Raises:
        ProgramError: With the exit code that ``python`` would have.
    """
    if program.kind == "module":
        return
    path = program.target
    if program.kind == "command":
        _check_command(path)
        return
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "__main__.py")):
            raise ProgramError(
                f"can't find '__main__' module in '{os.path.abspath(path)}'",
                exit_code=1,
                hint="name a file in it, or give the directory a `__main__.py`",
            )
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ProgramError(
            f"can't open file '{os.path.abspath(path)}': [Errno {error.errno}] {error.strerror}",
            exit_code=2,
            hint=_nearest_file(path),
        ) from error


def _check_command(name: str) -> None:
    import shutil

    if shutil.which(name) is not None:
        return
    found = os.path.exists(name)
    raise ProgramError(
        f"`{name}` is not executable" if found else f"there is no command `{name}`",
        exit_code=126 if found else 127,  # as a shell says it
        hint=f"chmod +x {name}, or leave --no-python out" if found else None,
    )


def _nearest_file(path: str) -> str | None:
    """Return a hint with a file of a similar name, if the folder has one."""
    from difflib import get_close_matches

    folder = os.path.dirname(path) or "."
    try:
        near = get_close_matches(os.path.basename(path), os.listdir(folder), n=1, cutoff=0.7)
    except OSError:
        return None
    return f"`{os.path.normpath(os.path.join(folder, near[0]))}`?" if near else None
