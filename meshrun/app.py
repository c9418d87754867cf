"""What meshrun does, as functions: plan a launch, then carry it out.

A launch binds the store's socket, starts the zygote, which imports torch once, has it fork the
ranks, brings their output to the console, and ends everything when the first rank fails.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from meshrun.cluster import ClusterFacts, detect_cluster
from meshrun.errors import MeshrunError, UsageError
from meshrun.host.cores import count_cores
from meshrun.host.descriptors import has_terminal, say
from meshrun.host.detect_host import detect_host
from meshrun.host.machine import HostFacts
from meshrun.plan.plan import LaunchPlan, build_plan, settle_plan
from meshrun.plan.rendezvous_config import RendezvousConfig, plan_meeting
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import fit_nodes_to_cluster, fit_to_cluster, note_few_cores
from meshrun.supervisor.program_file import check_program

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from meshrun.console.console import Console
    from meshrun.host.child_launcher import Caller
    from meshrun.lifecycle.state import State
    from meshrun.plan.rank_env import Session
    from meshrun.protocol.events import Event, Met
    from meshrun.protocol.result import LaunchResult
    from meshrun.report.elastic_events import ElasticEvents
    from meshrun.supervisor.live import Live
    from meshrun.supervisor.loop import Watch
    from meshrun.supervisor.node_link import Meet
    from meshrun.supervisor.run_folder import RunFolder

_RENDEZVOUS = ("static", "c10d", "etcd", "etcd-v2")


def plan(
    request: LaunchRequest,
    *,
    facts: HostFacts | None = None,
    check_host: bool = True,
    cluster: ClusterFacts | None = None,
) -> LaunchPlan:
    """Decide everything about a launch; starts nothing.

    Args:
        request: What was asked for.
        facts: This machine; looked up if ``None``.
        check_host: Whether a device this machine lacks is an error; if not, this is a dry run,
            which tells of links between GPUs too.
        cluster: What the scheduler around this process said, if there is one.

    Raises:
        UsageError: If the request does not fit together, with the numbers.
    """
    _check_rendezvous(request.rendezvous.backend)
    facts = facts or detect_host(
        with_topology=request.numa_binding is not None, with_links=not check_host
    )
    planned = build_plan(request, facts, check_host=check_host)
    workers = planned.layout.nproc_per_node[planned.node_rank]
    cores = count_cores()
    told = note_few_cores(planned.request, cluster, workers=workers, bound=cores[0], cores=cores[1])
    return replace(planned, request=told)


def plan_or_decline(request: LaunchRequest, cluster: ClusterFacts | None) -> LaunchPlan:
    """Decide everything about a launch; if there can be none, the other nodes are told.

    Raises:
        UsageError: If the request does not fit together, with the numbers.
    """
    try:
        return plan(request, cluster=cluster)
    except MeshrunError as error:
        decline(request, error)
        raise


def ask_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[LaunchRequest, ClusterFacts | None]:
    """Return the request as the scheduler around this process fills it in, and what that says.

    Args:
        request: What was asked for.
        is_child: Whether a caller of launch() waits for the answer of this one process.

    Raises:
        UsageError: If the request and what the scheduler says do not fit together.
    """
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ  # one that launches is no task of the scheduler
    if is_rank or request.remote is not None:
        return request, None
    found = detect_cluster(os.environ, hostname=os.uname().nodename, terminal=has_terminal())
    may_step = found is not None and found.shell is not None and not is_child
    if found is not None and found.system == "Slurm":
        request = replace(request, sigterm_repeats=True)
    try:
        return fit_to_cluster(request, found, may_step=may_step and _has_srun()), found
    except UsageError as error:
        if found is not None and found.nnodes is None:  # elsewhere all may look well
            decline(fit_nodes_to_cluster(request, found), error)
        raise


def _has_srun() -> bool:
    import shutil

    return shutil.which("srun") is not None


def check_elsewhere(request: LaunchRequest, facts: HostFacts) -> None:
    """Check that a launch on other machines fits together, as far as it can be told from here.

    Raises:
        UsageError: If it does not, whatever devices the machines have.
    """
    counts = request.nproc_per_node
    is_open = counts is None and request.mesh is not None and request.mesh.is_inferred
    if not isinstance(counts, str) and not is_open:  # else their devices decide, over there
        build_plan(request, facts, check_host=False)


def _check_rendezvous(backend: str) -> None:
    """Check that there is such a way to meet, built into torch or plugged in."""
    if backend in _RENDEZVOUS:
        return
    from importlib.metadata import entry_points

    if not list(entry_points(group="torchrun.handlers", name=backend)):
        raise UsageError(
            f"--rdzv-backend: unknown backend `{backend}`",
            hint=f"use {', '.join(_RENDEZVOUS)}, or an entry point in the group torchrun.handlers",
        )


def launch(
    plan: LaunchPlan,
    *,
    watch: Watch | None = None,
    settled: Callable[[LaunchPlan], None] = lambda _: None,
    began_ns: int | None = None,
    paste: str | None = None,
    caller: Caller | None = None,
) -> LaunchResult:
    """Carry out a plan and wait for its end.

    Args:
        plan: What to start.
        watch: Called with every event, the state after it and the console.
        settled: Called with the plan once the nodes have met, where there are several.
        began_ns: Monotonic time at which the user's wait began; now if ``None``.
        paste: The command for other nodes, ``ENDPOINT`` standing for where they are to meet.
        caller: The program that started this launcher and uses it, if one does.

    Returns:
        How it went; nothing that was started is left, whatever happened.

    Raises:
        ProgramError: If the program cannot be opened.
        HostError: If this machine cannot hold the launch.
    """
    # What only a launch needs is imported here: a dry run is twice as fast without it.
    import secrets
    from contextlib import ExitStack

    from meshrun.console.console import Console
    from meshrun.host.leftovers import remove_forgotten
    from meshrun.host.sockets import listen_on
    from meshrun.lifecycle.outcome import build_result, went_well
    from meshrun.lifecycle.stopwatch import Stopwatch
    from meshrun.supervisor.loop import Loop

    stopwatch = Stopwatch(began_ns or time.monotonic_ns())
    console = Console()
    run_id = plan.request.rendezvous.run_id or secrets.token_hex(8)

    def see(event: Event, state: State, console: Console) -> None:
        stopwatch.see(event)
        for each in watching:
            each(event, state, console)

    def settle(plan: LaunchPlan, session: Session, met: Met) -> tuple[LaunchPlan, Session]:
        plan, session = _settle(plan, session, met)
        settled(plan)
        if events is not None:
            events.plan = plan
        _say_what_listens(plan, session, console)
        return plan, session

    with ExitStack() as stack:
        listener = None
        meeting = _inherit_listener(plan.meeting)
        with _declining(meeting):
            check_program(plan.program)
            events = _elastic_events(plan, run_id, console)
            watching = [each for each in (events, watch) if each is not None]
            if meeting is None:
                listener = stack.enter_context(listen_on(plan.store_address, plan.store_port))
            meet = _begin_meeting(plan, meeting, paste)
            folder = _run_folder(plan, run_id)
        session = _session(plan, run_id, folder, listener)
        if meet is None:
            _say_what_listens(plan, session, console)
        state = loop = None
        try:
            loop = Loop(
                plan,
                session=session,
                folder=folder,
                store_listener=listener,
                console=console,
                watch=see,
                settle=settle,
                meet=meet,
                live=_live(plan, console) if plan.request.status else None,
                caller=caller,
            )
            remove_forgotten()  # while the zygote imports torch
            state = loop.run()
        finally:
            kept = folder.close(went_well=state is not None and went_well(state))
            if loop is not None:
                loop.let_signals_through()
    result = build_result(
        state,
        loop.plan.layout,
        hosts=loop.hosts,
        timings=stopwatch.timings(),
        log_folder=kept,
        evidence=loop.evidence,
    )
    if events is not None:
        events.end(state, result)
    console.close()
    _pass_error_on(result)
    return result


def decline(request: LaunchRequest, error: MeshrunError) -> None:
    """Tell the other nodes of a launch, if there are any, why this one cannot take part."""
    try:
        meeting = plan_meeting(
            request.rendezvous,
            nnodes=request.nnodes or 1,
            node_timeout_s=request.node_timeout_s,
        )
    except UsageError:
        return
    _tell_others(_inherit_listener(meeting), error)


@contextmanager
def _declining(meeting: RendezvousConfig | None) -> Iterator[None]:
    try:
        yield
    except MeshrunError as error:
        _tell_others(meeting, error)
        raise


def _tell_others(meeting: RendezvousConfig | None, error: MeshrunError) -> None:
    is_known = meeting is not None and (meeting.host or meeting.listener is not None)
    if meeting is not None and is_known:  # else nobody knows yet where to come
        from meshrun.supervisor.join_nodes import decline

        decline(meeting, error, lambda text: say(f"meshrun: {text}"))


def _begin_meeting(
    plan: LaunchPlan, meeting: RendezvousConfig | None, paste: str | None
) -> Meet | None:
    if meeting is None:
        return None
    from meshrun.supervisor.join_nodes import begin_meeting

    return begin_meeting(plan, replace(meeting, paste=paste))


def _inherit_listener(meeting: RendezvousConfig | None) -> RendezvousConfig | None:
    """Return the meeting with the socket that whoever started this launcher listens on for it."""
    listener = os.environ.pop("MESHRUN_LISTENER", "")
    return replace(meeting, listener=int(listener)) if meeting and listener else meeting


def _run_folder(plan: LaunchPlan, run_id: str) -> RunFolder:
    from meshrun.supervisor.logs_specs import LogsPlugin
    from meshrun.supervisor.run_folder import RunFolder, check_log_dir

    request, plugin = plan.request, None
    check_log_dir(request.logs)
    if request.logs.logs_specs is not None:
        nproc = plan.layout.nproc_per_node[plan.node_rank]
        plugin = LogsPlugin(request.logs, request.console.local_ranks, nproc)
    if plan.meeting is None:
        return RunFolder(request.logs, run_id, plugin=plugin)
    # Nodes may write to one file system, and have no common name yet if none was given.
    name = request.rendezvous.run_id or ""
    return RunFolder(request.logs, name, host=os.uname().nodename, plugin=plugin)


def _session(
    plan: LaunchPlan, run_id: str, folder: RunFolder, listener: socket.socket | None
) -> Session:
    """Return what ranks are told of this launch; on several nodes, as far as it is known."""
    from meshrun.host.sockets import LOOPBACK_INTERFACE
    from meshrun.plan.rank_env import Session
    from meshrun.supervisor.timers import timer_file

    return Session(
        run_id=run_id,
        master_addr=plan.store_address,
        master_port=listener.getsockname()[1] if listener is not None else 0,
        run_folder=folder.path,
        interface=LOOPBACK_INTERFACE,
        timer_file=timer_file(os.environ, folder.path),
    )


def _settle(plan: LaunchPlan, session: Session, met: Met) -> tuple[LaunchPlan, Session]:
    """Return plan and session once the nodes have met."""
    from meshrun.host.network import interface_of

    facts = detect_host(with_topology=plan.bound_cpus is not None)
    plan = settle_plan(
        plan,
        facts,
        node_rank=met.node_rank,
        nproc_per_node=met.nproc_per_node,
        roles=met.roles,
    )
    session = replace(
        session,
        run_id=met.run_id,
        master_addr=met.store_address,
        master_port=met.store_port,
        interface=interface_of(met.own_address),
        previous=json.dumps(met.previous) if met.previous else "",
    )
    return plan, session


def _say_what_listens(plan: LaunchPlan, session: Session, console: Console) -> None:
    if plan.request.console.verbose:
        from meshrun.report.listening import describe_listening

        for line in describe_listening(plan, session, os.environ):
            console.note(line)


def _live(plan: LaunchPlan, console: Console) -> Live:
    from meshrun.report.status_view import StatusView
    from meshrun.supervisor.live import Live

    return Live(plan, console, StatusView)


def _elastic_events(plan: LaunchPlan, run_id: str, console: Console) -> ElasticEvents | None:
    """Return what tells torch-elastic's events, if anybody wants them."""
    name = plan.request.event_log_handler
    if name == "null":
        return None
    from meshrun.report.elastic_events import ElasticEvents, emit_through, load_handler

    handler = load_handler(name)
    if handler is not None:
        return ElasticEvents(plan, run_id, emit_through(handler))

    def emit(text: str) -> None:
        console.print_line(text.encode(), to_stderr=True)

    return ElasticEvents(plan, run_id, emit) if name == "console" else None


def _pass_error_on(result: LaunchResult) -> None:
    """Tell the cause to whoever runs meshrun as torch-elastic runs a worker."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and result.failures and result.failures[0].raised is not None:
        from contextlib import suppress

        from meshrun.host.whole_file import write_whole
        from meshrun.protocol.error_record import render_record

        record = render_record(result.failures[0].raised, result.exit_code)
        with suppress(MeshrunError):
            write_whole(path, record, "TORCHELASTIC_ERROR_FILE", is_private=True)
