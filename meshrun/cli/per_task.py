"""``--per-task``: the scheduler starts a process per rank, and each process becomes its rank."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from meshrun.cli.options import MESH, PROGRAM, Options
from meshrun.cluster import ClusterFacts, Task
from meshrun.errors import MeshrunError, UsageError
from meshrun.host import rank_variables as var
from meshrun.layout.environment import format_layout
from meshrun.plan.group_options import format_group_options
from meshrun.plan.request import LaunchRequest
from meshrun.plan.surroundings import read_cluster_facts
from meshrun.start import own_command
from meshrun.supervisor.program_file import check_program

if TYPE_CHECKING:
    from meshrun.protocol.caller import Invocation

_ALLOWED = (Options.per_task, Options.nproc_per_node, Options.nnodes)
"""Options that are allowed in addition to those of the mesh and the program."""
_NEEDS_LAUNCHER = (
    Options.gpus, Options.place, Options.no_python, Options.preload, Options.start_method,
)  # fmt: skip
"""Options of the mesh and the program that need a launcher."""


def run_task_as_rank(options: Options, request: LaunchRequest, invocation: Invocation) -> NoReturn:
    """Run the program in this process, as the rank that the scheduler assigned to it.

    Raises:
        UsageError: If no scheduler started a process per rank, or an option needs a launcher.
        MeshError: If the ranks of a node are not consecutive, or nothing says where ranks meet.
    """
    from meshrun import app
    from meshrun.mesh.scheduler_task import join_as

    _check(options, invocation)
    facts = read_cluster_facts(request)
    task = facts.task if facts is not None else None
    if facts is None or task is None:
        found = f"{facts.system}, {facts.evidence}" if facts else "no scheduler"
        raise UsageError(
            f"--per-task requires a scheduler that starts a process per rank, found {found}",
            hint="for example: srun --ntasks-per-node=8 meshrun --per-task ...; without"
            " --per-task, meshrun starts the ranks of a node itself",
        )
    try:
        check_program(request.program)
        plan = app.plan(_sized(request, facts, task), check_host=False)
    except MeshrunError as error:
        error.is_reported_elsewhere = task.rank > 0
        raise
    if request.mesh is not None:
        groups = format_group_options(request.groups)
        os.environ.update({**format_layout(plan.layout), **groups, var.DEVICE: request.device})
    join_as(facts, task)
    when = request.mesh_init if request.mesh is not None else "lazy"
    words = own_command("task", when, *request.program.words)
    os.execv(words[0], words)


def _check(options: Options, invocation: Invocation) -> None:
    if invocation.caller is not None:
        raise UsageError(
            f"{Options.per_task.flag} cannot be used with launch(), which starts ranks itself",
            hint="without launch(), meshrun.init_mesh() makes each process of the scheduler a rank",
        )
    for row in options.given_for_launch():
        is_allowed = row in _ALLOWED or (
            row.panel in (MESH, PROGRAM) and row not in _NEEDS_LAUNCHER
        )
        if options.is_typed(row) and not is_allowed:
            raise UsageError(
                f"--per-task cannot be used with {row.flag}: there is no launcher around the ranks",
                hint=f"remove {row.flag}, or start one launcher per node without --per-task",
            )


def _sized(request: LaunchRequest, facts: ClusterFacts, task: Task) -> LaunchRequest:
    """Return the request with the nodes and ranks that the scheduler has started."""
    counts = task.per_node or (task.world_size,)  # one node if the scheduler does not say
    for flag, requested, found in (
        ("--nnodes", request.nnodes, facts.nnodes),
        ("--nproc-per-node", request.nproc_per_node, task.local_world_size),
    ):
        if requested is not None and found is not None and requested not in (found, counts):
            raise UsageError(
                f"{flag} {requested}, but {facts.system} started {found} ({facts.evidence})",
                hint=f"remove {flag}: with --per-task the scheduler decides",
            )
    rendezvous = replace(request.rendezvous, master_addr="0.0.0.0")  # noqa: S104 - only in the plan
    return replace(request, nnodes=len(counts), nproc_per_node=counts, rendezvous=rendezvous)
