"""Detection for this process: the only module of ``cluster`` that reads its surroundings.

If the system does not provide the nodes of a job, its processes exchange facts about them.
"""

from __future__ import annotations

import os
import select
import time
from functools import partial
from types import NoneType

from msgspec.structs import replace

from meshrun.cluster.cluster_facts import ClusterFacts, Surroundings
from meshrun.cluster.detect import detect_cluster
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import has_terminal
from meshrun.host.entry_points import call, entry_points, load
from meshrun.host.named_files import read_small
from meshrun.host.network import addresses_in_networks
from meshrun.host.sysfs import boot_id

PLUG_INS = "meshrun.clusters"
"""The group of entry points that name detectors."""
_FACTS = (ClusterFacts, NoneType)
_MOST_ADDRESSES = 12
_LONGEST_VALUE = 1000
"""PMI's own limit is 1024."""
_PEERS_TAKE_S = 60.0
"""How long to wait for the other processes of the job."""


def detect_here(*, collective: bool) -> ClusterFacts | None:
    """Return the facts of the scheduler or launcher that started this process.

    It is ``collective`` if every process of the job calls it, so that they may exchange what the
    system does not provide.

    Raises:
        UsageError: If a variable or a plug-in is invalid.
    """
    facts = detect_cluster(
        Surroundings(os.environ, os.uname().nodename, has_terminal(), read_small),
        plug_ins=tuple(
            partial(call, PLUG_INS, name, load(PLUG_INS, name, value), returns=_FACTS)
            for name, value in entry_points(PLUG_INS).items()
        ),
    )
    is_one_of_several = facts is not None and facts.task is not None and facts.task.world_size > 1
    if facts is None or not collective or facts.coordinator or not is_one_of_several:
        return facts
    return _ask_peers(facts)


def is_rank() -> bool:
    """Return whether this process is a rank: a launch by a rank is not a task of the scheduler."""
    return var.TORCH_RUN_ID in os.environ


def with_starter(facts: ClusterFacts) -> ClusterFacts:
    """Return the facts of a shell of an allocation with a command that starts launchers."""
    import shutil

    if facts.shell is None:
        return facts
    if not facts.starter:
        return replace(facts, can_start=shutil.which(facts.step_starter) is not None)
    starter = facts.starter if shutil.which(facts.starter) else "ssh"
    return replace(facts, starter=starter, can_start=True)


def for_caller(facts: ClusterFacts) -> ClusterFacts:
    """Return the facts for a program that calls launch(), which the user starts on each node.

    Such a launch starts none on other nodes.
    """
    shell, one_a_node = (
        text.replace("meshrun ...", "python ...") for text in (facts.shell or "", facts.one_a_node)
    )
    return replace(facts, shell=shell or None, one_a_node=one_a_node)


def _ask_peers(facts: ClusterFacts) -> ClusterFacts:
    """Return the facts with the nodes that all processes of the job exchange, if they can."""
    import secrets

    from meshrun.cluster.peer_exchange import Peer, format_peer, parse_peer, with_peers

    host = os.uname().nodename
    own = Peer(
        machine=f"{boot_id()}/{host}",
        host=host,
        addresses=tuple(text for _, text in addresses_in_networks())[:_MOST_ADDRESSES],
        secret=secrets.token_hex(32),
    )
    found = _exchange_by_pmi(format_peer(own))
    if found is None:
        return facts
    space, words = found
    try:
        return with_peers(facts, space, [parse_peer(word) for word in words])
    except ValueError:
        return facts


def _exchange_by_pmi(value: str) -> tuple[str, list[str]] | None:
    """Return the name of the job's key space and each process's value, by rank; a collective.

    Return ``None`` if there is no process manager, or it does not answer.

    ``init`` and ``finalize`` are left to the program, as MPI can be initialized only once. Intel's
    Hydra, unlike others, treats a process that exits without ``finalize`` after a request as
    failed.

    Source:
        PMI-1's wire protocol, as served by Hydra and Flux (Flux RFC 13).
    """
    try:
        fd, rank, size = (int(os.environ[f"PMI_{name}"]) for name in ("FD", "RANK", "SIZE"))
    except (KeyError, ValueError):
        return None
    if len(value) > _LONGEST_VALUE or set(value) & set(" \n="):
        return None
    manager = _Manager(
        fd, time.monotonic() + _PEERS_TAKE_S, is_strict="I_MPI_HYDRA_UUID" in os.environ
    )
    try:
        return manager.exchange(rank, size, value)
    except (OSError, ValueError, KeyError, EOFError):
        return None


class _Manager:
    """The process manager at the other end of a descriptor."""

    def __init__(self, fd: int, deadline: float, *, is_strict: bool) -> None:
        self._fd, self._deadline, self._is_strict = fd, deadline, is_strict

    def exchange(self, rank: int, size: int, value: str) -> tuple[str, list[str]]:
        space = self._ask("cmd=get_my_kvsname")["kvsname"]
        # Several launches of one script use different keys.
        turn = 0
        while self._get(space, turn, rank) is not None:
            turn += 1
        self._ask(f"cmd=put kvsname={space} key=meshrun-{turn}-{rank} value={value}")
        self._ask("cmd=barrier_in")
        values = [self._get(space, turn, each) or "" for each in range(size)]
        if self._is_strict:
            self._ask("cmd=finalize")
        return f"{space}.{turn}", values

    def _get(self, space: str, turn: int, rank: int) -> str | None:
        got = self._ask(f"cmd=get kvsname={space} key=meshrun-{turn}-{rank}")
        return got["value"] if got.get("rc", "0") == "0" else None

    def _ask(self, line: str) -> dict[str, str]:
        os.write(self._fd, f"{line}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                raise TimeoutError
            data = os.read(self._fd, 4096)
            if not data:
                raise EOFError
            answer += data
        pairs = (word.partition("=") for word in answer.decode(errors="replace").split())
        return {name: text for name, _, text in pairs}
