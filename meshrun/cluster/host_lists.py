"""A script or shell that knows the hosts of its job, and that starts nothing on them by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshrun.cluster.cluster_facts import ClusterFacts


def hosts_in(path: str | None, read: Callable[[str], str]) -> tuple[str, ...]:
    """Return the hosts that a file names, each line one in its first word, each once; or none."""
    try:
        text = read(path) if path else ""
    except OSError:
        return ()
    return tuple(dict.fromkeys(line.split()[0] for line in text.splitlines() if line.strip()))


def place_of(hostname: str, hosts: Sequence[str]) -> int | None:
    """Return which of some hosts this one is, by the first labels of their names."""
    labels = [host.partition(".")[0].lower() for host in hosts]
    own = hostname.partition(".")[0].lower()
    return labels.index(own) if own in labels else None


def describe_shell(
    system: str,
    *,
    evidence: str,
    job_id: str,
    hostname: str,
    hosts: tuple[str, ...] = (),
    path: str | None = None,
    read: Callable[[str], str] | None = None,
    node_rank: int | None = None,
    starter: str = "ssh",
) -> ClusterFacts:
    """Return the facts of a shell in an allocation.

    Args:
        system: For people.
        evidence: What it was recognized by.
        job_id: Names the job.
        hostname: This machine's name.
        hosts: The hosts of the job, or:
        path: The file that names them.
        read: Reads it.
        node_rank: Which of them this is, if the system says it.
        starter: What starts a process on one of them.
    """
    hosts = hosts or (hosts_in(path, read) if read else ())
    why = "this is a script or shell of the job"
    if not hosts:
        why = (
            f"{path} cannot be read, or names no host" if path else "nothing names the job's hosts"
        )
    place = place_of(hostname, hosts)
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
