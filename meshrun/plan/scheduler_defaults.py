"""Completes a request with the facts of a scheduler. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshrun.cluster import ClusterFacts
from meshrun.errors import UsageError
from meshrun.plan.hostfile import Host
from meshrun.plan.parse import format_nnodes
from meshrun.plan.request import LaunchRequest, Reach, Remote, Rendezvous
from meshrun.wording import count


def fit_to_cluster(
    request: LaunchRequest, facts: ClusterFacts | None, *, may_step: bool = False
) -> LaunchRequest:
    """Return the request with the nodes, and where they meet, as the scheduler says.

    What the user said counts first; what was found is in ``sources``, and in ``notes`` for people.

    Args:
        request: What the user said.
        facts: What the scheduler said; ``None`` without one.
        may_step: Whether a shell of an allocation can start launchers on its nodes.

    Raises:
        UsageError: If the scheduler started more than one launcher on a node, or on other nodes
            than were asked for.
    """
    if facts is None:
        return request
    asked, request = request.rendezvous, replace(request, sigterm_repeats=facts.repeats_sigterm)
    if asked.standalone:
        return request
    if facts.shell is not None:
        return _in_shell(request, facts, facts.shell, may_step)
    if request.nnodes == 1:
        return request
    _check_launchers(facts)
    if facts.is_one_of_several and request.nnodes is None:
        error = UsageError(
            f"{facts.system} started several processes, but tells none of them how many"
            f" ({facts.evidence})",
            hint=f"pass --nnodes N, with one process on each node: {facts.one_a_node}; or"
            " --nnodes 1 for a launch in each process",
        )
        error.is_told = bool(facts.node_rank)
        raise error
    nnodes = request.nnodes or facts.nnodes or 1
    if facts.nnodes is not None and (asked.least_nodes or nnodes) > facts.nnodes:
        raise UsageError(
            f"--nnodes {format_nnodes(asked.least_nodes, nnodes)}, but {facts.system} allocated"
            f" {facts.nnodes} ({facts.evidence})",
            hint=f"remove --nnodes: it defaults to {facts.nnodes} here",
        )
    if facts.nnodes is not None and facts.task is not None:
        nnodes = min(nnodes, facts.nnodes)  # others cannot come later
    if nnodes == 1:
        alone = replace(asked, least_nodes=None, notes=_note_alone(facts))
        given = request.nnodes if asked.least_nodes is None else 1
        return replace(request, nnodes=given, rendezvous=alone)
    return _on_several(request, facts, nnodes)


def fit_nodes_to_cluster(request: LaunchRequest, facts: ClusterFacts) -> LaunchRequest:
    """Return where the nodes meet as the scheduler says, although something does not fit."""
    if facts.shell is not None or request.nnodes == 1:
        return request
    return _on_several(request, facts, request.nnodes or 2)


def fit_to_hosts(request: LaunchRequest, remote: Remote) -> LaunchRequest:
    """Return the request with the hosts that are to be launched on as its nodes.

    Raises:
        UsageError: If an option says something else of nodes, or only some hosts have slots.
    """
    asked, hosts = request.rendezvous, remote.hosts
    for option, is_given in (
        ("--standalone", asked.standalone),
        (f"--node-rank {asked.node_rank}", asked.node_rank is not None),
        (f"--rdzv-backend {asked.backend}", asked.backend != "static"),
        ("--debug-rank", request.debug_rank is not None),
    ):
        if is_given:
            raise UsageError(
                f"{option} cannot be used with a list of hosts",
                hint=f"remove {option.split()[0]}",
            )
    least, nnodes = asked.least_nodes, request.nnodes or len(hosts)
    if nnodes > len(hosts) or (least is None and nnodes < len(hosts)):
        names = ", ".join(host.name for host in hosts[:8])
        raise UsageError(
            f"--nnodes {format_nnodes(least, nnodes)} does not match {count(len(hosts), 'host')}:"
            f" {names}{(', ...' if len(hosts) > 8 else '')}",
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
        rendezvous=replace(asked, present=len(hosts)),
        sources=(*request.sources, *found),
    )


def _slots(hosts: Sequence[Host]) -> int | tuple[int, ...] | None:
    """Return the workers of each host, ``None`` if nothing is said of them."""
    counts = [host.workers for host in hosts]
    known = tuple(count for count in counts if count is not None)
    if known and len(known) < len(hosts):
        one = next(host for host in hosts if host.workers is not None)
        other = next(host for host in hosts if host.workers is None)
        raise UsageError(
            f"{one.name} has {one.workers} slots, but the number of slots of {other.name} is"
            " unknown",
            hint=f"write {other.name}:{one.workers}, or pass --nproc-per-node",
        )
    return known[0] if len({*known}) == 1 else known or None


def _on_several(request: LaunchRequest, facts: ClusterFacts, nnodes: int) -> LaunchRequest:
    asked = request.rendezvous
    if asked.node_rank is None and facts.node_rank is not None and facts.node_rank >= nnodes:
        raise UsageError(
            f"--nnodes {nnodes}, but {facts.system} numbers this node {facts.node_rank},"
            f" counting from 0 ({facts.evidence})",
            hint=f"start meshrun on {nnodes} nodes, or remove --nnodes",
        )
    found: list[tuple[str, str]] = []
    if request.nnodes is None:
        found.append(("--nnodes", str(nnodes)))
    changes: dict[str, object] = {"hosts": facts.hosts[:nnodes], "domain": facts.domain}
    changes["backend"] = _backend(asked)
    if changes["backend"] != asked.backend:
        found.append(("--rdzv-backend", _backend(asked)))
    if facts.secret is not None:
        changes["secret"] = facts.secret
    if asked.node_rank is None and facts.node_rank is not None:
        changes["node_rank"] = facts.node_rank
        found.append(("--node-rank", str(facts.node_rank)))
    if asked.run_id is None and facts.job_id is not None:
        changes["run_id"] = facts.job_id
        found.append(("--rdzv-id", facts.job_id))
    if not (asked.endpoint or asked.master_addr) and facts.head:
        port = asked.master_port or facts.port
        changes.update(master_addr=facts.head[0], coordinators=facts.head, master_port=port)
        found.append(("--master-addr", facts.head[0]))
        if asked.master_port is None and port is not None:
            found.append(("--master-port", str(port)))
    elif not (asked.endpoint or asked.master_addr) and changes["backend"] == "static":
        _check_meeting(facts, changes.get("node_rank", asked.node_rank))
        changes["master_port"] = asked.master_port or facts.port  # of the only one that listens
    node_rank = changes.get("node_rank", asked.node_rank)
    place = "" if node_rank is None else f"node {node_rank} of "
    notes = "".join(f"; ignored: {note}" for note in facts.notes)
    changes["notes"] = (f"{facts.system}, {facts.evidence}: {place}{count(nnodes, 'node')}{notes}",)
    return replace(
        request,
        nnodes=nnodes,
        rendezvous=replace(asked, **changes),  # type: ignore[arg-type]
        sources=(*request.sources, *((name, value, facts.system) for name, value in found)),
    )


def _check_meeting(facts: ClusterFacts, node_rank: object) -> None:
    """Check that nodes that know no address of the first one are not many launches of one."""
    if facts.task is None and node_rank == 0:
        return  # the others know its address
    if facts.task is None and facts.job_id is None:
        return
    error = UsageError(
        f"{facts.system} tells processes no address of the first node ({facts.evidence})",
        hint="pass --rdzv-endpoint HOST:PORT, with the first node's name and a free port"
        + _if_stale(facts),
    )
    error.is_told = bool(facts.task and facts.task.rank)
    raise error


def _if_stale(facts: ClusterFacts) -> str:
    names = ", ".join(name for name, _ in facts.variables)
    return f"; or unset {names} if they are left over from another job" if names else ""


def note_few_cores(
    request: LaunchRequest, facts: ClusterFacts | None, *, workers: int, bound: int, cores: int
) -> LaunchRequest:
    """Return the request with a note if workers share fewer cores than there are.

    Args:
        request: What was asked for.
        facts: What the scheduler says, if there is one.
        workers: How many are started on this node.
        bound: On how many cores this process was put, and they with it.
        cores: How many the machine has.
    """
    if facts is None or facts.shell is not None or bound >= min(workers, cores):
        return request
    asked = request.rendezvous
    shared = f"{count(workers, 'worker')} to {bound} of {count(cores, 'core')}"
    line = f"{facts.system} binds {shared}: {facts.more_cores.format(workers=workers)}"
    return replace(request, rendezvous=replace(asked, notes=(*asked.notes, line)))


def _in_shell(
    request: LaunchRequest, facts: ClusterFacts, command: str, may_step: bool
) -> LaunchRequest:
    asked = request.rendezvous
    says_where = asked.endpoint or asked.master_addr or asked.node_rank is not None
    if facts.starter and facts.hosts:
        command = f"meshrun --nnodes {len(facts.hosts)} ..."
    if (request.nnodes or 1) > 1 and not says_where:
        if facts.starter and facts.hosts and may_step:
            return _on_hosts_of_job(request, facts)
        if may_step:
            return _in_a_step(request, facts)
        why = "; ".join(facts.notes) or facts.evidence
        raise UsageError(
            f"--nnodes {request.nnodes} in a {facts.system} shell, which starts nothing on"
            f" other nodes ({why})",
            hint="name the hosts with --hosts, or start one launcher per node"
            if facts.starter
            else f"start one launcher per node: {command}",
        )
    if request.nnodes is None and not says_where and (facts.nnodes or 1) > 1:
        note = f"{facts.system}, {facts.evidence}: launching on one of {facts.nnodes} nodes;"
        on_all = f"--nnodes {facts.nnodes}" if may_step or facts.starter else command
        return replace(request, rendezvous=replace(asked, notes=(f"{note} to use all: {on_all}",)))
    return request


def _in_a_step(request: LaunchRequest, facts: ClusterFacts) -> LaunchRequest:
    """Return the request with the nodes of the job on which srun is to start a launcher."""
    asked, nnodes = request.rendezvous, request.nnodes or 1
    if asked.least_nodes is not None and facts.nnodes is not None:
        nnodes = max(asked.least_nodes, min(nnodes, facts.nnodes))
    note = f"{facts.system}, {facts.evidence}: srun starts a launcher on each node"
    rendezvous = replace(asked, backend=_backend(asked), step_of=facts.job_id, notes=(note,))
    return replace(request, nnodes=nnodes, rendezvous=rendezvous)


def _backend(asked: Rendezvous) -> str:
    """Return the rendezvous that was asked for, or the one in which nodes may come and go."""
    is_fixed = asked.least_nodes is None or asked.backend != "static"
    return asked.backend if is_fixed else "c10d"


def _on_hosts_of_job(request: LaunchRequest, facts: ClusterFacts) -> LaunchRequest:
    """Return the request with the hosts of a job, which meshrun reaches as those of ``--hosts``."""
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
    hosts = tuple(Host(name) for name in facts.hosts[:nnodes])
    reach = replace(request.reach, starter=request.reach.starter or facts.starter)
    fitted = fit_to_hosts(request, remote_of(reach, hosts))
    note = (
        f"{facts.system}, {facts.evidence}: starting a launcher on each of {count(nnodes, 'host')}"
        f" with {reach.starter}"
    )
    return replace(fitted, rendezvous=replace(fitted.rendezvous, notes=(note,)))


def remote_of(reach: Reach, hosts: tuple[Host, ...]) -> Remote:
    """Return hosts with the options for connecting to them."""
    return Remote(
        hosts=hosts,
        starter=reach.starter,
        ssh=reach.ssh,
        connect_timeout_s=reach.connect_timeout_s,
        export=reach.export,
    )


def _check_launchers(facts: ClusterFacts) -> None:
    """Check that there is one launcher a node, on this one and all others; say it once."""
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
        counts = ", ".join(map(str, task.per_node[:8])) + (", ..." if nnodes > 8 else "")
        found = f"{total} times on {nnodes} nodes ({counts})"
    error = UsageError(
        f"{facts.system} started meshrun {found}, but one launcher starts all workers of a node"
        f" ({facts.evidence})",
        hint=facts.one_a_node,
    )
    # Where the counts of nodes differ and are not known, some tasks may not notice.
    error.is_told = bool(task.rank if task.per_node else task.local_rank)
    raise error


def _note_alone(facts: ClusterFacts) -> tuple[str, ...]:
    if facts.nnodes is not None:
        return ()
    which = "" if facts.node_rank is None else f"this is node {facts.node_rank}; "
    return (
        f"{facts.system}, {facts.evidence}: {which}the number of nodes is unknown, so launching"
        " on one; use --nnodes N for more",
    )
