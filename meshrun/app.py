"""A launch from request to result.

``cli/run.py`` calls these functions, for the command line and for ``meshrun.launch()``.
``ask_cluster`` completes a request with the scheduler's facts, ``plan`` turns it into a value that
a dry run prints, and ``launch`` carries out this plan: the supervisor starts the zygote, the zygote
forks the workers, ``lifecycle`` decides after every event, ``rendezvous`` talks to the other
nodes, and the console shows what the ranks print. ``supervisor/loop.py`` runs all of it.
``worker/bootstrap.py`` is what a rank does before the program.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import detect_here, for_caller, is_rank, with_starter
from meshrun.errors import HostError, MeshrunError, UsageError
from meshrun.host.cores import count_cores, may_bind
from meshrun.host.detect_host import detect_host
from meshrun.host.exclusion import node_name
from meshrun.host.outside_devices import count_with_torch
from meshrun.host.shortage import REFUSED
from meshrun.host.stderr import note
from meshrun.plan.nic_affinity import note_no_nics
from meshrun.plan.plan import LaunchPlan, build_plan, depends_on_count, depends_on_gpus
from meshrun.plan.rendezvous_config import check_backend
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import fit_nodes_to_cluster, fit_to_cluster, note_few_cores
from meshrun.supervisor.decline import decline, inherit_listener, tell_others
from meshrun.worker.sys_path import first_path

if TYPE_CHECKING:
    from meshrun.console.console import Console
    from meshrun.protocol.caller import Invocation
    from meshrun.protocol.result import LaunchResult
    from meshrun.supervisor.watcher import Watcher


def ask_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[LaunchRequest, ClusterFacts | None]:
    """Return the request completed with the scheduler's facts, and these facts.

    Raises:
        UsageError: If the request and the scheduler contradict each other.
    """
    found, may_step = find_cluster(request, is_child=is_child)
    try:
        return fit_to_cluster(request, found, may_step=may_step), found
    except UsageError as error:
        # On other nodes, there may be no contradiction.
        if found is not None and found.nnodes is None and not found.is_one_of_several:
            decline(fit_nodes_to_cluster(request, found), error)
        raise


def find_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[ClusterFacts | None, bool]:
    """Return the scheduler's facts, and whether a launch here can start launchers on its nodes.

    In a rank there are none: its variables describe the launch that it belongs to. A child, for
    whose result a caller of launch() waits, starts none on other nodes.

    Raises:
        UsageError: If a variable of the scheduler cannot be parsed.
    """
    if is_rank() or request.remote is not None:
        return None, False
    knows_where = request.rendezvous.has_address or request.rendezvous.standalone
    found = detect_here(collective=not knows_where and request.nnodes != 1)
    if found is None:
        return None, False
    return (for_caller(found), False) if is_child else with_starter(found)


def plan(
    request: LaunchRequest,
    *,
    check_host: bool = True,
    cluster: ClusterFacts | None = None,
) -> LaunchPlan:
    """Decide everything about a launch, without starting it.

    Missing devices are an error if ``check_host``, which a dry run does not request.

    Raises:
        UsageError: If the request is inconsistent, with the numbers.
    """
    check_backend(request.rendezvous.backend)
    facts = detect_host(
        with_gpus=not check_host or depends_on_gpus(request),
        with_topology=request.numa_binding is not None,
        with_links=not check_host,
        with_nics=not check_host or request.nic_affinity,
        with_domain=bool(request.intra_domain),
    )
    if (kind := depends_on_count(request)) is not None:
        facts = count_with_torch(facts, kind, request.own_preload, first_path(request.program))
    planned = build_plan(request, facts, check_host=check_host)
    workers = planned.layout.nproc_per_node[planned.node_rank]
    bound, cores = count_cores()
    few_cores = note_few_cores(cluster, workers=workers, bound=bound, cores=cores)
    notes = (*request.notes, *few_cores, *note_no_nics(planned))
    return replace(planned, request=replace(planned.request, notes=notes))


def plan_or_decline(request: LaunchRequest, cluster: ClusterFacts | None) -> LaunchPlan:
    """Decide everything about a launch; if that fails, tell the other nodes.

    Raises:
        UsageError: If the request is inconsistent, with the numbers.
        HostError: If ``--check-gpus`` found a faulty GPU.
        NodeExcludedError: If this node has failed too often.
    """
    try:
        planned = plan(request, cluster=cluster)
        _check_node(planned)
        return planned
    except MeshrunError as error:
        decline(request, error)
        raise


def _check_node(plan: LaunchPlan) -> None:
    """Check that this node is fit for ranks, as far as options request it."""
    request = plan.request
    path, most = request.node_history, request.max_node_failures
    if path is not None and most is not None:
        from meshrun.report.node_history import check_own_history

        check_own_history(path, most)
    if request.numa_binding is not None and not may_bind():
        raise HostError(
            f"--numa-binding {request.numa_binding}: this machine does not let processes choose"
            " their CPUs: sched_setaffinity(2) is not permitted",
            hint=f"{REFUSED}; or remove --numa-binding",
        )
    if not request.check_gpus:
        return
    from meshrun.supervisor.check_gpus import examine_gpus

    try:
        examine_gpus(plan, note)
    except HostError as error:
        if path is not None:
            from meshrun.report.node_history import record_failure

            run_id = request.rendezvous.run_id or ""
            record_failure(path, node_name(os.environ), run_id, error.message, note)
        raise


def launch(
    plan: LaunchPlan,
    console: Console,
    *,
    invocation: Invocation,
    watchers: Sequence[Watcher],
    join_command: str | None,
    report: Callable[[LaunchResult], object],
) -> LaunchResult:
    """Carry out a plan, and wait until all processes have ended.

    Args:
        plan: What to start.
        console: Shows what ranks print.
        invocation: How this launcher was started.
        watchers: Follow the launch, in addition to those that the plan requires.
        join_command: The command for other nodes, with ``ENDPOINT`` in place of the endpoint.
        report: Reports the end to the user, before the other nodes exit with an error.

    Raises:
        ProgramError: If the program cannot be opened.
        HostError: If this machine cannot run the launch.
    """
    # Imported here because a dry run, which needs none of it, is twice as fast without it.
    from contextlib import ExitStack

    from meshrun.host.leftovers import remove_stale_folders
    from meshrun.host.sockets import listen_on
    from meshrun.protocol.error_record import forward_error
    from meshrun.report.watchers import make_watchers
    from meshrun.supervisor.loop import Loop
    from meshrun.supervisor.program_file import check_program
    from meshrun.supervisor.run_folder import make_run_folder

    run_id = plan.request.rendezvous.run_id or os.urandom(8).hex()
    listener = meeting = None
    with ExitStack() as stack:
        config = inherit_listener(plan.rendezvous)
        try:
            check_program(plan.program)
            watchers = [*make_watchers(plan, run_id, console), *watchers]
            if config is None:
                listener = stack.enter_context(listen_on(plan.store_address, plan.store_port))
            else:
                from meshrun.supervisor.join_nodes import prepare_meeting

                meeting = prepare_meeting(replace(config, join_command=join_command))
            folder = make_run_folder(plan, run_id)
            stack.callback(folder.close, went_well=False)
        except MeshrunError as error:
            tell_others(config, error)
            raise
        loop = Loop(
            plan,
            run_id=run_id,
            folder=folder,
            store_listener=listener,
            console=console,
            invocation=invocation,
            watchers=watchers,
            meeting=meeting,
        )
        remove_stale_folders()  # while the zygote imports torch
        result = loop.run()
    console.close()
    console.wait_for_readers(loop.reader_timeout_s)
    if invocation.caller is None:
        forward_error(result)
    report(result)
    loop.part()
    return result
