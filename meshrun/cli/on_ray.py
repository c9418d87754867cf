"""``--submit ray``: a launch on nodes of a Ray cluster, for which this process waits."""

from __future__ import annotations

import os

from msgspec.structs import replace

from meshrun.actors.bundles import read_placement, render_placement
from meshrun.actors.ray_cluster import RayCluster
from meshrun.cli.options import Options
from meshrun.cli.submit_job import check_job
from meshrun.errors import UsageError
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.stderr import note
from meshrun.host.visibility import CUDA, HIP, OUTSIDE_TORCH, ROCR, XPU
from meshrun.plan.plan import build_plan
from meshrun.plan.request import LaunchRequest
from meshrun.plan.scheduler_defaults import apply_hosts
from meshrun.protocol.caller import Invocation
from meshrun.report.plan_output import print_text
from meshrun.supervisor.program_file import check_program
from meshrun.worker.function import PROGRAM

_INCOMPATIBLE = (
    Options.image, Options.submit_patch, Options.ssh, Options.launcher, Options.include,
    Options.exclude,
)  # fmt: skip
_CONNECT_TIMEOUT_S = 60.0
"""How long a node may take to answer, as it first has to start an interpreter with Ray."""
_DEVICES = (CUDA, HIP, ROCR, XPU, *OUTSIDE_TORCH)
"""Variables that Ray sets on each node; their values here do not apply there."""


def launch_on_ray(options: Options, request: LaunchRequest, invocation: Invocation) -> int:
    """Launch on nodes of a Ray cluster, or print the request to it; return the exit code.

    Raises:
        UsageError: If an option makes no sense with Ray.
        HostError: If there is no cluster, or it cannot provide the nodes.
    """
    from meshrun.cli.on_hosts import launch_on_hosts

    check_job(options, "ray")
    for row in _INCOMPATIBLE:
        if options.is_typed(row):
            raise UsageError(f"--submit ray cannot be used with {row.flag}")
    least = request.rendezvous.least_nodes
    request = replace(request, nnodes=request.nnodes or 1)
    # The facts about this machine and its scheduler do not apply to the cluster.
    fixed = replace(request, rendezvous=replace(request.rendezvous, least_nodes=None))
    plan = build_plan(fixed, UNKNOWN_HOST, check_host=False)
    placement = read_placement(
        options.submit_arg,
        workers=plan.layout.nproc_per_node,
        min_nodes=least or plan.layout.nnodes,
        device=request.device,
    )
    if options.dry_run:
        print_text(render_placement(placement), options.output)
        return 0
    check_program(request.program)
    is_call = invocation.caller is not None and request.program.target == PROGRAM
    grace_s = request.shutdown_timeout_s + request.node_timeout_s
    cluster = RayCluster(call=request.program.args[-1] if is_call else None, grace_s=grace_s)
    try:
        access = request.access
        if not options.is_typed(Options.connect_timeout):
            access = replace(access, connect_timeout_s=_CONNECT_TIMEOUT_S)
        remote = cluster.place(placement, access, note)
        for name in _DEVICES:
            os.environ.pop(name, None)
        return launch_on_hosts(options, apply_hosts(request, remote))
    finally:
        cluster.close()
