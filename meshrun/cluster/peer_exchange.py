"""Facts that the processes of a job exchange if the system does not provide its nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from ipaddress import ip_interface

from msgspec import Struct
from msgspec.structs import replace

from meshrun.cluster.cluster_facts import ClusterFacts, derive_port


class Peer(Struct, frozen=True, kw_only=True):
    """What one process sends to the others."""

    machine: str
    """A unique id of the machine."""
    host: str
    addresses: tuple[str, ...]
    """Its addresses with prefix lengths: ``10.0.0.4/16``."""
    secret: str
    """A random string; rank 0's becomes the secret of the launch."""


def format_peer(peer: Peer) -> str:
    """Return a peer as one word."""
    return ";".join((peer.machine, peer.host, ",".join(peer.addresses), peer.secret))


def parse_peer(text: str) -> Peer:
    """Return a peer from its word.

    Raises:
        ValueError: If ``text`` is not a peer.
    """
    machine, host, addresses, secret = text.split(";")
    return Peer(
        machine=machine, host=host, addresses=tuple(filter(None, addresses.split(","))),
        secret=secret,
    )  # fmt: skip


def with_peers(facts: ClusterFacts, space: str, peers: Sequence[Peer]) -> ClusterFacts:
    """Return the facts of a task with its node, all nodes and where they meet.

    ``space`` is an id of the launch, unique within and between jobs; ``peers`` are ordered by rank.
    """
    task = facts.task
    if task is None or task.rank >= len(peers):
        return facts
    machines = list(dict.fromkeys(peer.machine for peer in peers))
    node_of = [machines.index(peer.machine) for peer in peers]
    counts = Counter(node_of)
    node_rank = node_of[task.rank]
    local_rank = node_of[: task.rank].count(node_rank)
    first = [next(peer for peer in peers if peer.machine == machine) for machine in machines]
    job_id = facts.job_id or space
    return replace(
        facts,
        job_id=job_id,
        nnodes=len(machines),
        node_rank=node_rank,
        hosts=tuple(peer.host for peer in first),
        coordinator=(*_addresses_for(first), first[0].host),
        port=derive_port(space),
        secret=peers[0].secret,
        task=replace(
            task,
            world_size=len(peers),
            local_rank=local_rank,
            local_world_size=counts[node_rank],
            per_node=tuple(counts[node] for node in range(len(machines))),
            in_blocks=node_of == sorted(node_of),
        ),
    )


def _addresses_for(nodes: Sequence[Peer]) -> tuple[str, ...]:
    """Return the addresses of node 0, those on the networks of most nodes first.

    An address that another node has, too, such as that of a container bridge, is not usable.
    """
    others = [text for node in nodes[1:] for text in node.addresses]
    taken = {text.partition("/")[0] for text in others}
    shared = Counter(ip_interface(text).network for text in others)
    own = [ip_interface(text) for text in nodes[0].addresses]
    usable = [each for each in own if str(each.ip) not in taken]
    usable.sort(key=lambda each: (-shared[each.network], each.version))
    return tuple(str(each.ip) for each in usable)
