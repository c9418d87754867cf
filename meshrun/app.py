"""A launch from request to result; the rooms are named in the order in which it passes them.

``ask_cluster`` completes a request with what the scheduler defines, ``plan`` turns it into a value
that a dry run prints, and ``launch`` carries that out: the supervisor starts the zygote, the zygote
forks the workers, ``lifecycle`` decides after every event, ``rendezvous`` talks to the other
nodes, and the console shows what the ranks print.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here, is_rank, with_starter
from meshrun.errors import MeshrunError, UsageError
from meshrun.host.cores import count_cores
from meshrun.host.detect_host import detect_host
from meshrun.host.machine import HostFacts
from meshrun.host.outside_devices import count_with_torch
from meshrun.plan.nic_affinity import note_no_nics
from meshrun.plan.plan import LaunchPlan, build_plan, depends_on_count
from meshrun.plan.rendezvous_config import RendezvousConfig, check_backend
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import fit_nodes_to_cluster, fit_to_cluster, note_few_cores
from meshrun.supervisor.giving_up import decline, declining, inherit_listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshrun.console.console import Console
    from meshrun.plan.rank_env import LaunchFacts
    from meshrun.protocol.caller import Caller
    from meshrun.protocol.events import Met
    from meshrun.protocol.result import LaunchResult
    from meshrun.supervisor.loop import Watch
    from meshrun.supervisor.node_link import Meet
    from meshrun.warm.client import WarmRun


def ask_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[LaunchRequest, ClusterFacts | None]:
    """Return the request completed with the scheduler's facts, and these facts.

    Args:
        request: The request.
        is_child: Whether a caller of launch() waits for the answer of this one process.

    Raises:
        UsageError: If the request and the scheduler contradict each other.
    """
    found, may_step = find_cluster(request, is_child=is_child)
    if found is not None and found.system == "Slurm":
        request = replace(request, sigterm_repeats=True)
    try:
        return fit_to_cluster(request, found, may_step=may_step), found
    except UsageError as error:
        # Elsewhere all may look well.
        if found is not None and found.nnodes is None and not found.is_one_of_several:
            decline(fit_nodes_to_cluster(request, found), error)
        raise


def find_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[ClusterFacts | None, bool]:
    """Return the scheduler's facts, and whether a launch here can start launchers on its nodes.

    A rank's scheduler is not its own.

    Raises:
        UsageError: If a variable of the scheduler is broken.
    """
    if is_rank() or request.remote is not None:
        return None, False
    asked = request.rendezvous
    says_where = bool(asked.endpoint or asked.master_addr or asked.standalone)
    found = detect_here(together=not says_where and request.nnodes != 1)
    return (found, False) if found is None or is_child else with_starter(found)


def plan(
    request: LaunchRequest,
    *,
    facts: HostFacts | None = None,
    check_host: bool = True,
    cluster: ClusterFacts | None = None,
) -> LaunchPlan:
    """Decide everything about a launch; starts nothing.

    Args:
        request: The request.
        facts: This machine; looked up if ``None``.
        check_host: Whether a device this machine lacks is an error; if not, this is a dry run,
            which shows the links between GPUs too.
        cluster: The facts of the scheduler, if there is one.

    Raises:
        UsageError: If the request is inconsistent, with the numbers.
    """
    check_backend(request.rendezvous.backend)
    facts = facts or detect_host(
        with_topology=request.numa_binding is not None,
        with_links=not check_host,
        with_nics=not check_host or request.nic_affinity,
        with_domain=bool(request.intra_domain),
    )
    if (kind := depends_on_count(request)) is not None:
        facts = count_with_torch(facts, kind, request.own_preload)
    planned = build_plan(request, facts, check_host=check_host)
    workers = planned.layout.nproc_per_node[planned.node_rank]
    cores = count_cores()
    request = note_few_cores(
        planned.request, cluster, workers=workers, bound=cores[0], cores=cores[1]
    )
    request = replace(request, notes=(*request.notes, *note_no_nics(planned)))
    return replace(planned, request=request)


def plan_or_decline(request: LaunchRequest, cluster: ClusterFacts | None) -> LaunchPlan:
    """Decide everything about a launch; if it is impossible, tell the other nodes.

    Raises:
        UsageError: If the request is inconsistent, with the numbers.
        HostError: If its GPUs were to be checked, and one failed.
        NodeExcludedError: If this node has failed too often.
    """
    from meshrun.report.check_node import check_node

    try:
        planned = plan(request, cluster=cluster)
        check_node(planned)
        return planned
    except MeshrunError as error:
        decline(request, error)
        raise


def launch(
    plan: LaunchPlan,
    *,
    watch: Watch | None = None,
    planned: Callable[[LaunchPlan], None] = lambda _: None,
    began_ns: int | None = None,
    paste: str | None = None,
    caller: Caller | None = None,
) -> LaunchResult:
    """Carry out a plan and wait for it to finish.

    Args:
        plan: What to start.
        watch: Called with every event, the state after it and the console.
        planned: Called with the plan once all of several nodes have joined.
        began_ns: Monotonic time at which the user's wait began; now if ``None``.
        paste: The command for other nodes, with ``ENDPOINT`` in place of the endpoint.
        caller: The program that started this launcher and uses it, if one does.

    Returns:
        The result; no process that was started is left.

    Raises:
        ProgramError: If the program cannot be opened.
        HostError: If this machine cannot run the launch.
    """
    # What only a launch needs is imported here: a dry run is twice as fast without it.
    import secrets
    from contextlib import ExitStack

    from meshrun.console.console import Console
    from meshrun.host.leftovers import remove_forgotten
    from meshrun.host.sockets import listen_on
    from meshrun.lifecycle.outcome import build_result, went_well
    from meshrun.lifecycle.stopwatch import Stopwatch
    from meshrun.protocol.error_record import pass_error_on
    from meshrun.report.listening import note_listening
    from meshrun.report.watchers import make_observers, make_watchers
    from meshrun.supervisor.launch_facts import complete, facts_at_start
    from meshrun.supervisor.loop import Loop
    from meshrun.supervisor.program_file import check_program
    from meshrun.supervisor.run_folder import make_run_folder

    stopwatch = Stopwatch(began_ns or time.monotonic_ns())
    console = Console(is_json=plan.request.console.is_json)
    run_id = plan.request.rendezvous.run_id or secrets.token_hex(8)

    with ExitStack() as stack:
        listener = None
        with declining(rendezvous := inherit_listener(plan.rendezvous)):
            check_program(plan.program)
            watchers = make_watchers(plan, run_id, console)
            if rendezvous is None:
                listener = stack.enter_context(listen_on(plan.store_address, plan.store_port))
            meet = _meet_nodes(plan, rendezvous, paste)
            folder = make_run_folder(plan, run_id)
        facts = facts_at_start(plan, run_id, folder, listener)
        if meet is None:
            note_listening(plan, facts, console)

        def complete_plan(
            plan: LaunchPlan, facts: LaunchFacts, met: Met
        ) -> tuple[LaunchPlan, LaunchFacts]:
            plan, facts = complete(plan, facts, met)
            planned(plan)
            for watcher in watchers:
                watcher.replan(plan)
            note_listening(plan, facts, console)
            return plan, facts

        state = loop = None
        try:
            loop = Loop(
                plan,
                facts=facts,
                folder=folder,
                store_listener=listener,
                console=console,
                watch=[stopwatch.see, *watchers, *([watch] if watch is not None else [])],
                complete=complete_plan,
                meet=meet,
                observers=make_observers(plan, console, watchers),
                caller=caller,
                warm=_warm(plan, console),
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
    for watcher in watchers:
        watcher.end(state, result)
    console.close()
    console.wait_for_readers(loop.readers_have_s)
    pass_error_on(result)
    return result


def _meet_nodes(
    plan: LaunchPlan, rendezvous: RendezvousConfig | None, paste: str | None
) -> Meet | None:
    if rendezvous is None:
        return None
    from meshrun.supervisor.join_nodes import meet_nodes

    return meet_nodes(plan, replace(rendezvous, paste=paste))


def _warm(plan: LaunchPlan, console: Console) -> WarmRun | None:
    idle_s = plan.request.warm_idle_s
    if idle_s is None:
        return None
    from meshrun.warm.client import WarmRun

    return WarmRun(plan.program, plan.request.preload, idle_s=idle_s, note=console.note)
