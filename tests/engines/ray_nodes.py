"""A real Ray cluster of two nodes on this machine, which a process of its own holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest

from tests.kit import ROOT

_CORES = 2
_DOMAIN = "ray.io/gpu-domain"


class RayNodes:
    """The cluster; ``address`` is what RAY_ADDRESS has to be."""

    def __init__(self, folder: str) -> None:
        self._holder = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.ray_nodes"],
            cwd=ROOT,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.address: str = ""

    def begin(self) -> bool:
        """Wait until it is there; ``False`` if Ray cannot start one here."""
        try:
            self.address = self.ask("address")
        except (RuntimeError, OSError):
            return False
        return True

    def ask(self, what: str) -> Any:
        """Have something done, or return what is there: see ``_hold``."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        print(what, file=self._holder.stdin)
        answer = self._holder.stdout.readline()
        if not answer:
            self.end()
            raise RuntimeError("the Ray cluster has ended; see what it said on stderr")
        return json.loads(answer)

    def is_idle(self) -> bool:
        """Whether all of its resources are free, and no placement group is left."""
        return self.ask("free") == 2 * _CORES and self.ask("groups") == 0

    def end(self) -> None:
        """End it, and wait until nothing of it is left."""
        with self._holder as holder:
            assert holder.stdin is not None
            holder.stdin.close()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayNodes]:
    """Give a cluster, whose daemons are none of a test's own."""
    if find_spec("ray") is None:
        pytest.skip("needs the package ray")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # names of sockets are short
    nodes = RayNodes(folder)
    try:
        if not nodes.begin():
            pytest.skip("Ray starts no cluster on this machine; what it said is on stderr")
        yield nodes
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ray_nodes(ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    """Give the cluster to a test whose launches find it."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    return ray_cluster


def _hold() -> None:
    """Start a cluster and do what stdin says until it ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where Ray prints

    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group, placement_group_table

    some = {"num_cpus": _CORES, "object_store_memory": 80_000_000, "include_log_monitor": False}
    has_domains = "topology_strategy" in signature(placement_group).parameters

    def of(domain: str) -> dict[str, Any]:
        return {**some, "labels": {_DOMAIN: domain}} if has_domains else some

    head = {**of("one"), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    added = [cluster.add_node(**of("two"), wait=False)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    for line in sys.stdin:
        answer: object = None
        if line == "address\n":
            answer = cluster.address
        elif line == "free\n":
            answer = ray.available_resources().get("CPU", 0)
        elif line == "groups\n":
            table = placement_group_table().values()
            answer = sum(group["state"] != "REMOVED" for group in table)
        elif line == "lose\n":
            cluster.remove_node(added.pop(), allow_graceful=False)
        elif line == "add\n":
            added.append(cluster.add_node(**of("two"), wait=False))
        elif line == "raylets\n":  # of the nodes that were added
            answer = [str(node.all_processes["raylet"][0].process.pid) for node in added]
        elif line == "has domains\n":
            answer = has_domains
        print(json.dumps(answer), file=answers)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    _hold()
