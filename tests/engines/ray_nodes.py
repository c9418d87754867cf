"""A real Ray cluster of two nodes on this machine, held by a separate process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from typing import Any

import pytest

from tests.kit import ROOT

_CORES = 2
_DOMAIN = "ray.io/gpu-domain"


class RayNodes:
    """The cluster: ``address`` is for RAY_ADDRESS, ``gpus`` how many GPUs each node claims."""

    def __init__(self, folder: str, *, gpus: int = 0, **env: str) -> None:
        self._holder = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.ray_nodes", str(gpus)],
            cwd=ROOT,
            env={**os.environ, **env, "RAY_USAGE_STATS_ENABLED": "0", "TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.address: str = ""

    def begin(self) -> bool:
        """Wait until the cluster is up; return ``False`` if Ray cannot start one here."""
        try:
            self.address = self.ask("address")
        except (RuntimeError, OSError):
            return False
        return True

    def ask(self, what: str) -> Any:
        """Send a command to the holder and return its answer; ``_hold`` lists the commands."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        print(what, file=self._holder.stdin)
        answer = self._holder.stdout.readline()
        if not answer:
            self.end()
            raise RuntimeError("the Ray cluster has ended; see stderr")
        return json.loads(answer)

    def is_idle(self) -> bool:
        """Whether all resources are free and no placement group is left."""
        return self.ask("free") == 2 * _CORES and self.ask("groups") == 0

    def end(self) -> None:
        """Stop the cluster and wait until all of its processes have ended."""
        with self._holder as holder:
            assert holder.stdin is not None
            holder.stdin.close()


@contextmanager
def start_ray(**how: Any) -> Iterator[RayNodes]:
    """Start a cluster that ends with the block."""
    if find_spec("ray") is None:
        pytest.skip("needs the package ray")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # socket paths must be short
    nodes = RayNodes(folder, **how)
    try:
        if not nodes.begin():
            pytest.skip("Ray cannot start a cluster on this machine; see stderr")
        yield nodes
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayNodes]:
    """A cluster for a whole module, whose daemons do not count as a test's processes."""
    with start_ray() as nodes:
        yield nodes


@pytest.fixture
def ray_nodes(ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch) -> RayNodes:
    """The cluster, with RAY_ADDRESS set so that launches find it."""
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    return ray_cluster


class _User:
    """An actor of another user."""

    def gpus(self) -> tuple[str, str]:
        """Return the node and this actor's GPUs on it."""
        return os.environ["RAY_RAYLET_PID"], os.environ["CUDA_VISIBLE_DEVICES"]


def _hold(gpus: int) -> None:
    """Start a cluster and execute commands from stdin until it closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints to stdout

    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group, placement_group_table

    some = {"num_cpus": _CORES, "object_store_memory": 80_000_000, "include_log_monitor": False}
    has_domains = "topology_strategy" in signature(placement_group).parameters

    def of(domain: str) -> dict[str, Any]:
        labels = {"labels": {_DOMAIN: domain}} if has_domains else {}
        return {**some, **labels, "num_gpus": gpus}

    head = {**of("one"), "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    added = [cluster.add_node(**of("two"), wait=False)]
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    users = []

    def use_gpus() -> list[tuple[str, str]]:
        how = {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": "SPREAD"}
        users.extend(ray.remote(_User).options(**how).remote() for _ in range(2))
        found: list[tuple[str, str]] = ray.get([user.gpus.remote() for user in users])
        return found

    can = {
        "address": lambda: cluster.address,
        "free": lambda: ray.available_resources().get("CPU", 0),
        "free GPUs": lambda: ray.available_resources().get("GPU", 0),
        "groups": lambda: sum(
            group["state"] != "REMOVED" for group in placement_group_table().values()
        ),
        "lose": lambda: cluster.remove_node(added.pop(), allow_graceful=False),
        "add": lambda: added.append(cluster.add_node(**of("two"), wait=False)),
        # Of the added nodes only.
        "raylets": lambda: [str(node.all_processes["raylet"][0].process.pid) for node in added],
        "has domains": lambda: has_domains,
        "use a GPU of each node": use_gpus,
    }
    for line in sys.stdin:
        print(json.dumps(can[line.rstrip()]()), file=answers)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    _hold(int(sys.argv[1]))
