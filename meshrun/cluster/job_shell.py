"""Scripts and shells of an allocation whose scheduler lists the hosts but starts no tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings
from meshrun.host.host_names import first_label


def hosts_in(path: str | None, read: Callable[[str], str]) -> tuple[str, ...]:
    """Return the distinct first words of a file's lines; none if it cannot be read."""
    try:
        text = read(path) if path else ""
    except OSError:
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def place_of(hostname: str, hosts: Sequence[str]) -> int | None:
    """Return the index of this host, comparing the first labels of names; ``None`` if absent."""
    labels = [first_label(host) for host in hosts]
    own = first_label(hostname)
    return labels.index(own) if own in labels else None


def describe_shell(
    system: str,
    here: Surroundings,
    *,
    evidence: str,
    job_id: str,
    hosts: tuple[str, ...] = (),
    path: str | None = None,
    node_rank: int | None = None,
    starter: str = "ssh",
) -> ClusterFacts:
    """Return the facts of a shell in an allocation.

    Args:
        system: Name of the scheduler.
        here: The surroundings of this process.
        evidence: How it was recognized.
        job_id: An id of the job.
        hosts: The hosts of the job; if empty, they are read from ``path``.
        path: The file that lists the hosts.
        node_rank: Index of this host, used if ``hosts`` does not contain it.
        starter: The command that starts a process on a host.
    """
    hosts = hosts or hosts_in(path, here.read)
    why = "this is a script or shell of the job"
    if not hosts:
        why = (
            f"{path} cannot be read, or names no host" if path else "nothing names the job's hosts"
        )
    place = place_of(here.hostname, hosts)
    return ClusterFacts(  # noqa: S604 - starts nothing
        system=system,
        evidence=evidence,
        job_id=job_id,
        nnodes=len(hosts) or None,
        node_rank=place if place is not None else node_rank,
        hosts=hosts,
        notes=(why,),
        shell="meshrun --nnodes N ...",
        starter=starter,
    )
