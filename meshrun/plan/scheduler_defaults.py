"""Completion of a request with the facts of a scheduler. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from meshrun.cluster import ClusterFacts
from meshrun.errors import UsageError
from meshrun.host.machine import HostFacts
from meshrun.plan.hostfile import Host, is_host
from meshrun.plan.parse import format_nnodes
from meshrun.plan.rendezvous_options import C10D, STATIC
from meshrun.plan.request import LaunchRequest, RemoteHosts, Rendezvous
from meshrun.wording import count, listed

_FOUND = {
    "--rdzv-backend": "backend",
    "--node-rank": "node_rank",
    "--rdzv-id": "run_id",
    "--master-addr": "master_addr",
    "--master-port": "master_port",
}
"""The options that a scheduler may stand for, by their names in a :class:`Rendezvous`."""


def apply_cluster(request: LaunchRequest, facts: ClusterFacts | None) -> LaunchRequest:
    """Return the request, completed with the scheduler's nodes and where they meet.

    The user's options take precedence. ``sources`` and ``notes`` record what the scheduler added.

    Raises:
        UsageError: If the scheduler started several launchers on a node, or its nodes do not match
            the requested ones.
    """
    if facts is None:
        return request
    request = replace(request, sigterm_repeats=facts.repeats_sigterm)
    rendezvous = request.rendezvous
    if rendezvous.standalone:
        return request
    if facts.shell is not None:
        return _in_shell(request, facts, facts.shell)
    if request.nnodes == 1:
        return request
    _check_launchers(facts)
    if facts.is_one_of_several and request.nnodes is None:
        raise UsageError(
            f"{facts.system} started several processes, but does not tell them how many"
            f" ({facts.evidence})",
            hint=f"pass --nnodes N, with one process on each node: {facts.one_a_node}; or"
            " --nnodes 1 for a launch in each process",
            is_reported_elsewhere=bool(facts.node_rank),
        )
    nnodes = request.nnodes or facts.nnodes or 1
    if facts.nnodes is not None and (rendezvous.least_nodes or nnodes) > facts.nnodes:
        raise UsageError(
            f"--nnodes {format_nnodes(rendezvous.least_nodes, nnodes)}, but {facts.system}"
            f" allocated {facts.nnodes} ({facts.evidence})",
            hint=f"remove --nnodes: it defaults to {facts.nnodes} here",
        )
    if facts.nnodes is not None and facts.task is not None:
        nnodes = min(nnodes, facts.nnodes)  # no others can join later
    if nnodes == 1:
        alone = replace(rendezvous, least_nodes=None, notes=_note_alone(facts))
        given = 1 if rendezvous.is_elastic else request.nnodes
        return replace(request, nnodes=given, rendezvous=alone)
    return _on_several(request, facts, nnodes)


def apply_nodes_of_cluster(request: LaunchRequest, facts: ClusterFacts) -> LaunchRequest:
    """Return the request with the scheduler's nodes, even if something contradicts it."""
    if facts.shell is not None or request.nnodes == 1:
        return request
    return _on_several(request, facts, request.nnodes or 2)


def apply_hosts(request: LaunchRequest, remote: RemoteHosts) -> LaunchRequest:
    """Return the request with the given hosts as its nodes.

    Raises:
        UsageError: If an option contradicts the hosts, or only some of them have slots.
    """
    rendezvous, hosts = request.rendezvous, remote.hosts
    for option, is_given in (
        ("--standalone", rendezvous.standalone),
        (f"--node-rank {rendezvous.node_rank}", rendezvous.node_rank is not None),
        (f"--rdzv-backend {rendezvous.backend}", rendezvous.backend != STATIC),
        ("--debug-rank", request.debug_rank is not None),
    ):
        if is_given:
            raise UsageError(
                f"{option} cannot be used with a list of hosts",
                hint=f"remove {option.split()[0]}",
            )
    least, nnodes = rendezvous.least_nodes, request.nnodes or len(hosts)
    if nnodes > len(hosts) or (least is None and nnodes < len(hosts)):
        raise UsageError(
            f"--nnodes {format_nnodes(least, nnodes)} does not match {count(len(hosts), 'host')}:"
            f" {listed([host.name for host in hosts])}",
            hint="remove --nnodes, or choose hosts with --include",
        )
    found = [("--nnodes", str(nnodes), "the hosts")] if least is None else []
    nproc = request.nproc_per_node
    if nproc is None and (nproc := _slots(hosts)) is not None:
        text = str(nproc) if isinstance(nproc, int) else ",".join(map(str, nproc))
        found.append(("--nproc-per-node", text, "the hosts' slots"))
    return replace(
        request,
        nnodes=nnodes,
        nproc_per_node=nproc if least is None or not isinstance(nproc, tuple) else nproc[:nnodes],
        remote=remote,
        rendezvous=replace(rendezvous, present=len(hosts)),
        sources=(*request.sources, *found),
    )


def _slots(hosts: Sequence[Host]) -> int | tuple[int, ...] | None:
    """Return the number of workers on each host, ``None`` if unknown."""
    counts = [host.workers for host in hosts]
    known = tuple(count for count in counts if count is not None)
    if known and len(known) < len(hosts):
        one = next(host for host in hosts if host.workers is not None)
        other = next(host for host in hosts if host.workers is None)
        raise UsageError(
            f"{one.name} has {count(one.workers or 0, 'slot')}, but the number of slots of"
            f" {other.name} is unknown",
            hint=f"write {other.name}:{one.workers}, or pass --nproc-per-node",
        )
    return known[0] if len({*known}) == 1 else known or None


def _on_several(request: LaunchRequest, facts: ClusterFacts, nnodes: int) -> LaunchRequest:
    given = request.rendezvous
    if given.node_rank is None and facts.node_rank is not None and facts.node_rank >= nnodes:
        raise UsageError(
            f"--nnodes {nnodes}, but {facts.system} numbers this node {facts.node_rank},"
            f" counting from 0 ({facts.evidence})",
            hint=f"start meshrun on {nnodes} nodes, or remove --nnodes",
        )
    rendezvous = replace(
        given,
        hosts=facts.hosts[:nnodes],
        domain=facts.domain,
        backend=_backend(given),
        secret=given.secret if facts.secret is None else facts.secret,
        node_rank=facts.node_rank if given.node_rank is None else given.node_rank,
        run_id=facts.job_id if given.run_id is None else given.run_id,
    )
    port = given.master_port or facts.port
    if facts.coordinator and not given.has_address:
        first = facts.coordinator[0]
        rendezvous = replace(
            rendezvous, master_addr=first, coordinator=facts.coordinator, master_port=port
        )
    found = [("--nnodes", nnodes)] if request.nnodes is None else []
    found += [
        (option, now)
        for option, name in _FOUND.items()
        if (now := getattr(rendezvous, name)) != getattr(given, name)
    ]
    if rendezvous.backend == STATIC and not rendezvous.has_address:
        _check_address_known(facts, rendezvous.node_rank)
        rendezvous = replace(rendezvous, master_port=port)  # only this node listens
    place = "" if rendezvous.node_rank is None else f"node {rendezvous.node_rank} of "
    ignored = "".join(f"; ignored: {note}" for note in facts.notes)
    note = f"{facts.system}, {facts.evidence}: {place}{count(nnodes, 'node')}{ignored}"
    return replace(
        request,
        nnodes=nnodes,
        rendezvous=replace(rendezvous, notes=(note,)),
        sources=(*request.sources, *((name, str(value), facts.system) for name, value in found)),
    )


def _check_address_known(facts: ClusterFacts, node_rank: int | None) -> None:
    """Check that nodes without node 0's address do not each launch by themselves."""
    if facts.task is None and (node_rank == 0 or facts.job_id is None):
        return  # node 0 needs no address; without a job, this may be the only node
    names = ", ".join(name for name, _ in facts.variables)
    or_unset = f"; or unset {names} if they are left over from another job" if names else ""
    raise UsageError(
        f"{facts.system} does not tell processes the address of node 0 ({facts.evidence})",
        hint=f"pass --rdzv-endpoint HOST:PORT, with node 0's name and a free port{or_unset}",
        is_reported_elsewhere=bool(facts.task and facts.task.rank),
    )


def note_few_cores(facts: ClusterFacts | None, host: HostFacts, workers: int) -> tuple[str, ...]:
    """Return a note if the scheduler binds the workers of this node to too few cores."""
    if facts is None or facts.shell is not None or host.bound_cores >= min(workers, host.cores):
        return ()
    shared = f"{count(workers, 'worker')} to {host.bound_cores} of {count(host.cores, 'core')}"
    return (f"{facts.system} binds {shared}: {facts.more_cores.format(workers=workers)}",)


def _in_shell(request: LaunchRequest, facts: ClusterFacts, command: str) -> LaunchRequest:
    rendezvous, nnodes = request.rendezvous, request.nnodes
    if rendezvous.has_address or rendezvous.node_rank is not None:  # one of several launchers
        return request
    if facts.starter and facts.hosts:
        command = f"meshrun --nnodes {len(facts.hosts)} ..."
    if nnodes is None and (facts.nnodes or 1) > 1:
        on_all = f"--nnodes {facts.nnodes}" if facts.can_start or facts.starter else command
        note = (
            f"{facts.system}, {facts.evidence}: launching on one of {facts.nnodes} nodes;"
            f" to use all: {on_all}"
        )
        return replace(request, rendezvous=replace(rendezvous, notes=(note,)))
    if nnodes in (None, 1):
        return request
    if facts.starter and facts.hosts and facts.can_start:
        return _on_hosts_of_job(request, facts)
    if facts.can_start and not facts.starter:
        return _in_a_step(request, facts)
    why = "; ".join(facts.notes) or facts.evidence
    raise UsageError(
        f"--nnodes {nnodes} in a {facts.system} shell, which starts nothing on other nodes ({why})",
        hint="name the hosts with --hosts, or start one launcher per node"
        if facts.starter
        else f"start one launcher per node: {command}",
    )


def _in_a_step(request: LaunchRequest, facts: ClusterFacts) -> LaunchRequest:
    """Return the request for a launch in which srun starts a launcher on nodes of the job."""
    rendezvous, nnodes = request.rendezvous, request.nnodes or 1
    if rendezvous.least_nodes is not None and facts.nnodes is not None:
        nnodes = max(rendezvous.least_nodes, min(nnodes, facts.nnodes))
    note = f"{facts.system}, {facts.evidence}: srun starts a launcher on each node"
    in_step = replace(rendezvous, backend=_backend(rendezvous), step_of=facts.job_id, notes=(note,))
    return replace(request, nnodes=nnodes, rendezvous=in_step)


def _backend(rendezvous: Rendezvous) -> str:
    """Return the requested backend, or c10d instead of static for a range of nodes."""
    if rendezvous.is_elastic and rendezvous.backend == STATIC:
        return C10D
    return rendezvous.backend


def _on_hosts_of_job(request: LaunchRequest, facts: ClusterFacts) -> LaunchRequest:
    """Return the request with the hosts of a job, reached like those of ``--hosts``."""
    nnodes, place = request.nnodes or 1, facts.node_rank
    if nnodes > len(facts.hosts):
        raise UsageError(
            f"--nnodes {nnodes}, but {facts.system} allocated {len(facts.hosts)}"
            f" ({facts.evidence}): {', '.join(facts.hosts[:8])}",
            hint=f"use --nnodes {len(facts.hosts)}",
        )
    if place:
        raise UsageError(
            f"--nnodes {nnodes} on host {place} of {facts.system}'s {len(facts.hosts)}, counting"
            f" from 0 ({facts.evidence}); the launch starts on the first, {facts.hosts[0]}",
            hint="run meshrun once, in the job's script, not through a command that starts it on"
            " each host; --nnodes 1 launches on this host alone",
        )
    if wrong := next((name for name in facts.hosts if not is_host(name)), None):
        raise UsageError(
            f"{facts.system} lists `{wrong}`, which is not a host ({facts.evidence})",
            hint="name the hosts with --hosts",
        )
    hosts = tuple(Host(name) for name in facts.hosts[:nnodes])
    access = replace(request.access, starter=request.access.starter or facts.starter)
    completed = apply_hosts(request, RemoteHosts(hosts=hosts, access=access))
    note = (
        f"{facts.system}, {facts.evidence}: starting a launcher on each of {count(nnodes, 'host')}"
        f" with {access.starter}"
    )
    return replace(completed, rendezvous=replace(completed.rendezvous, notes=(note,)))


def _check_launchers(facts: ClusterFacts) -> None:
    """Check that the scheduler started one launcher per node; only one of them reports an error."""
    task, nnodes = facts.task, facts.nnodes or 1
    if task is None or (task.local_world_size == 1 and task.world_size <= nnodes):
        return
    total, here = task.world_size, task.local_world_size
    if facts.nnodes is None:
        found = f"{total} times, {here} of them on this node"
    elif nnodes == 1:
        found = f"{here} times on this node"
    elif not task.per_node or len({*task.per_node}) == 1:
        found = f"{total} times on {nnodes} nodes"
    else:
        found = f"{total} times on {nnodes} nodes ({listed(task.per_node)})"
    raise UsageError(
        f"{facts.system} started meshrun {found}, but one launcher starts all workers of a node"
        f" ({facts.evidence})",
        hint=facts.one_a_node,
        # If tasks per node differ but are unknown, only some tasks notice: one per node reports it.
        is_reported_elsewhere=bool(task.rank if task.per_node else task.local_rank),
    )


def _note_alone(facts: ClusterFacts) -> tuple[str, ...]:
    if facts.nnodes is not None:
        return ()
    which = "" if facts.node_rank is None else f"this is node {facts.node_rank}; "
    return (
        f"{facts.system}, {facts.evidence}: {which}the number of nodes is unknown, so launching"
        " on one; use --nnodes N for more",
    )
