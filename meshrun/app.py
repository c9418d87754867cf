"""A launch from request to result.

``cli/`` turns a command line, or a call of ``meshrun.launch()`` in ``api/``, into a request, and
calls these functions:

1. ``ask_cluster``: ``cluster/`` detects a scheduler, whose facts complete the request.
2. ``plan``: ``host/`` reads the facts about this machine, and ``plan/`` and ``layout/`` decide
   everything about the launch. The result is a value, which a dry run prints.
3. ``launch`` carries out this plan. ``supervisor/`` starts a zygote (``zygote/``), or gets one from
   a server (``warm/``). The zygote imports torch and forks the ranks (``worker/``), which build the
   mesh (``mesh/``) and run the program. Their messages are in ``protocol/``. After each event,
   ``lifecycle/`` decides what happens next. ``rendezvous/`` connects the launchers of all nodes,
   ``console/`` prints the output of the ranks, and ``report/`` reports progress and the end.
   ``supervisor/loop.py`` receives Ctrl-C and other signals, ``lifecycle/local.py`` decides on them.

``ssh/`` starts launchers on other hosts, ``actors/`` on nodes of a Ray cluster, and ``submit/`` by
a job of a scheduler. ``check/`` evaluates the measurements of ``--check``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.errors import MeshrunError, UsageError
from meshrun.host.stderr import note
from meshrun.plan.plan import LaunchPlan, build_plan
from meshrun.plan.rank_env import note_no_nics
from meshrun.plan.rendezvous_config import check_backend
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import apply_cluster, note_few_cores
from meshrun.plan.surroundings import read_cluster_facts, read_host_facts
from meshrun.supervisor.withdraw import inherit_listener, withdraw, withdraw_in_cluster, withdrawing

if TYPE_CHECKING:
    from meshrun.console.console import Console
    from meshrun.protocol.caller import Invocation
    from meshrun.protocol.result import LaunchResult
    from meshrun.supervisor.watcher import Watcher


def ask_cluster(
    request: LaunchRequest, *, is_child: bool = False
) -> tuple[LaunchRequest, ClusterFacts | None]:
    """Return the request completed with the scheduler's facts, and these facts.

    A child is a launcher for whose result a caller of ``launch()`` waits.

    Raises:
        UsageError: If the request and the scheduler contradict each other.
    """
    found = read_cluster_facts(request, is_child=is_child)
    try:
        return apply_cluster(request, found), found
    except UsageError as error:
        withdraw_in_cluster(request, found, error)
        raise


def plan(
    request: LaunchRequest, *, check_host: bool = True, cluster: ClusterFacts | None = None
) -> LaunchPlan:
    """Decide everything about a launch, without starting it.

    With ``check_host``, which a dry run omits, it is an error if this machine lacks devices or is
    unfit for ranks, and the other nodes are notified of any error.

    Raises:
        UsageError: If the request is inconsistent, with the numbers.
        HostError: If this machine refuses what the request needs, or has a faulty GPU.
        NodeExcludedError: If this node has failed too often.
    """
    try:
        check_backend(request.rendezvous.backend)
        facts = read_host_facts(request, check_host=check_host)
        planned = build_plan(request, facts, check_host=check_host)
        if check_host and (request.check_gpus or request.node_history is not None):
            from meshrun.report.node_history import check_node

            check_node(planned, note)
    except MeshrunError as error:
        if check_host:
            withdraw(request.rendezvous, request.nnodes, error)
        raise
    few_cores = note_few_cores(cluster, facts, planned.layout.nproc_per_node[planned.node_rank])
    notes = (*request.notes, *few_cores, *note_no_nics(planned))
    return replace(planned, request=replace(planned.request, notes=notes))


def launch(
    plan: LaunchPlan,
    console: Console,
    *,
    invocation: Invocation,
    watchers: Sequence[Watcher],
    report: Callable[[LaunchResult], object],
) -> LaunchResult:
    """Carry out a plan, and wait until all processes have ended.

    Args:
        plan: What to start.
        console: Shows what ranks print.
        invocation: How this launcher was started.
        watchers: Follow the launch, in addition to those that the plan requires.
        report: Reports the end to the user, before the other nodes exit with an error.

    Raises:
        ProgramError: If the program cannot be opened.
        HostError: If this machine cannot run the launch.
    """
    # Imported here because a dry run, which needs none of it, is twice as fast without it.
    from contextlib import ExitStack

    from meshrun.host.folder import remove_stale_folders
    from meshrun.host.network import listen_on
    from meshrun.report.watchers import make_watchers
    from meshrun.supervisor.loop import Loop
    from meshrun.supervisor.program_file import check_program
    from meshrun.supervisor.run_folder import make_run_folder

    run_id = plan.request.rendezvous.run_id or os.urandom(8).hex()
    config, listener, rendezvous = inherit_listener(plan.rendezvous), None, None
    with ExitStack() as stack:
        with withdrawing(config):
            check_program(plan.program)
            watchers = [*make_watchers(plan, run_id, console), *watchers]
            if config is None:
                listener = stack.enter_context(listen_on(plan.store_address, plan.store_port))
            else:
                from meshrun.supervisor.node_link import prepare_rendezvous

                rendezvous = prepare_rendezvous(config)
            folder = make_run_folder(plan, run_id)
            stack.callback(folder.close, went_well=False)
            loop = Loop(
                plan,
                run_id=run_id,
                folder=folder,
                store_listener=listener,
                console=console,
                invocation=invocation,
                watchers=watchers,
                rendezvous=rendezvous,
            )
        remove_stale_folders()  # while the zygote imports torch
        result = loop.run()
    report(result)
    loop.close_nodes()
    return result
