"""--submit ray and meshrun.ray.launch() on a real Ray cluster of two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import meshrun
import meshrun.ray
from tests.engines.ray_nodes import RayNodes, start_ray
from tests.kit import PROGRAMS, run_meshrun, start_meshrun, wait_until
from tests.nvml import card

pytestmark = pytest.mark.slow
ON_RAY = ("--submit", "ray", "--nnodes", "2", "--nproc-per-node", "2")
DOMAIN = ("--submit-arg", "domain=ray.io/gpu-domain")
SAY = """\
import os, signal, sys
rank = os.environ["RANK"]
if rank == sys.argv[1]:
    raise ValueError("the loss is nan")
signal.pause()
"""


def wait_until_idle(nodes: RayNodes) -> None:
    """Wait until all of Ray's resources are free again."""
    wait_until(nodes.is_idle, lambda: f"{nodes.ask('free')} free, {nodes.ask('groups')} groups")


def find(words: str) -> list[psutil.Process]:
    """Return the processes whose command line contains these words."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if words in " ".join(each.info["cmdline"] or ())
    ]


def below(process: psutil.Process, words: str) -> psutil.Process:
    """Return the descendant of a process whose command line contains these words."""
    return next(
        each for each in process.children(recursive=True) if words in " ".join(each.cmdline())
    )


@pytest.mark.torch
def test_a_function_on_all_nodes(ray_nodes: RayNodes) -> None:
    """The mesh spans the nodes, large return values arrive, and resources are freed."""

    def add_up(base: int) -> tuple[int, dict[str, int], str, bytes]:
        import torch
        import torch.distributed as dist

        mesh = meshrun.current_mesh()
        total = torch.tensor([base + dist.get_rank()])
        dist.all_reduce(total)
        place = {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names}
        node = os.environ["RAY_RAYLET_PID"]
        return int(total), place, node, bytes(1 << 20)

    found = meshrun.ray.launch(add_up, args=[10], nnodes=2, mesh="dp=2,tp=2")
    totals, places, nodes, values = zip(*found, strict=True)

    assert totals == (46,) * 4
    assert [(place["dp"], place["tp"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {len(value) for value in values} == {1 << 20}
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_a_failure_on_one_node_is_the_one_cause(
    fake_torch: object, ray_nodes: RayNodes, tmp_path: Path
) -> None:
    """It is reported once, and its exit code is passed on."""
    program = tmp_path / "fails.py"
    program.write_text(SAY)
    result = run_meshrun(*ON_RAY, program, "3")

    assert result.returncode == 1
    assert result.stderr.count("error:") == 1, result.stderr
    assert "error: rank 3 raised ValueError: the loss is nan" in result.stderr
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_an_interrupt_ends_all(fake_torch: object, ray_nodes: RayNodes, tmp_path: Path) -> None:
    """Ranks get SIGINT and end within the grace period, and the placement group is removed."""
    with start_meshrun(*ON_RAY, PROGRAMS / "wait.py", folder=tmp_path) as running:
        running.wait_for("up", 4)
        assert ray_nodes.ask("free") == 0
        running.signal(signal.SIGINT)
        assert running.wait() == 128 + signal.SIGINT, running.stderr
    assert "stopped by Ctrl-C" in running.stderr
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_a_job_that_is_stopped_ends_in_order(
    fake_torch: object, ray_nodes: RayNodes, tmp_path: Path
) -> None:
    """``ray job stop`` sends SIGTERM to every process of a job and SIGKILL 3 s later."""
    with start_meshrun(*ON_RAY, PROGRAMS / "wait.py", folder=tmp_path) as running:
        running.wait_for("up", 4)
        own = psutil.Process(running.process.pid)
        for each in (*own.children(recursive=True), own):
            each.send_signal(signal.SIGTERM)
        assert running.wait() == 128 + signal.SIGTERM, running.stderr
    assert "SIGTERM: stopping 2 ranks" in running.stderr
    assert "lost" not in running.stderr
    assert "connected to Ray" not in running.stderr
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_launchers_may_share_a_node(fake_torch: object, ray_nodes: RayNodes) -> None:
    """Each has its own node name."""
    one = ("--submit", "ray", "--nnodes", "2", "--nproc-per-node", "1")
    result = run_meshrun(*one, "--submit-arg", "strategy=PACK", PROGRAMS / "echo.py")

    assert result.returncode == 0, result.stderr
    assert "out 0" in result.stdout
    assert "out 1" in result.stdout
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("who", "ends"),
    [
        ("", (137, "")),
        ("controller", (71, "was killed by SIGKILL")),
        ("ray-driver", (69, "the process that is connected to it was lost")),
        ("ray::NodeActor", (69, "Ray failed: The actor")),
        ("agent", (69, "its agent was killed")),
    ],
)
def test_whichever_process_is_killed_nothing_is_left(
    fake_torch: object, ray_nodes: RayNodes, tmp_path: Path, who: str, ends: tuple[int, str]
) -> None:
    """The launch reports what was lost, and Ray's resources are freed."""
    others = [*find("ray::NodeActor"), *find("meshrun agent")]  # of earlier tests, about to exit
    with start_meshrun(*ON_RAY, PROGRAMS / "wait.py", "children", folder=tmp_path) as running:
        running.wait_for("up", 4)
        own = psutil.Process(running.process.pid)
        elsewhere = {"": [own], "ray::NodeActor": find(who), "agent": find("meshrun agent")}
        victims = elsewhere.get(who) or [below(own, who)]
        next(each for each in victims if each not in others).kill()
        assert running.wait() == ends[0], running.stderr
    assert ends[1] in running.stderr
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--nnodes", "3"), r"provide 3 nodes with 2 CPU each; it has 2 nodes:\n.*2 CPU"),
        (("--device", "cuda"), "provide 2 nodes with 2 GPU, 2 CPU each"),
        (("--submit-arg", "special=1"), "with 1 special, 2 CPU each"),
        (DOMAIN, r"2 CPU each and the same ray.io/gpu-domain; it has 2 nodes:\n.*\(one\): 2 CPU"),
    ],
)
def test_too_few_resources_start_nothing(
    fake_torch: Path, ray_nodes: RayNodes, words: tuple[str, ...], why: str
) -> None:
    """The error gives what was requested and what the cluster has."""
    if words == DOMAIN and not ray_nodes.ask("has domains"):
        pytest.skip("needs a Ray that places bundles by labels")
    result = run_meshrun(*ON_RAY, *words, PROGRAMS / "wait.py")

    assert result.returncode == 71
    assert re.search(f"error: the Ray cluster .*{why}", result.stderr), result.stderr
    assert not fake_torch.exists()
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "cannot connect to a Ray cluster at 127.0.0.1:1: "),
        ("ray://127.0.0.1:10001", "--submit ray needs HOST:PORT of a cluster, found `ray://"),
    ],
)
def test_a_missing_cluster_is_reported(
    fake_torch: Path, ray_cluster: RayNodes, address: str, why: str
) -> None:
    """The error comes at once and names the address."""
    result = run_meshrun(*ON_RAY, PROGRAMS / "wait.py", env={"RAY_ADDRESS": address})

    assert result.returncode == 71
    assert f"error: {why}" in result.stderr


@pytest.mark.nightly
def test_what_a_function_raises_is_raised_here(fake_torch: object, ray_nodes: RayNodes) -> None:
    """With the rank's traceback; for a script, its result is returned."""

    def fail() -> None:
        if os.environ["RANK"] == "2":
            raise KeyError("weights")
        signal.pause()

    with pytest.raises(KeyError, match="weights") as raised:
        meshrun.ray.launch(fail, nnodes=2, nproc_per_node=2)
    result = meshrun.ray.launch(PROGRAMS / "affinity.py", nnodes=2, nproc_per_node=2)

    assert "in fail" in str(raised.value.__cause__)
    assert (result.exit_code, result.failures) == (0, ())
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_all_nodes_share_a_label(fake_torch: object, ray_nodes: RayNodes, tmp_path: Path) -> None:
    """Only nodes of one NVLink domain are used, also to replace a lost node."""
    if not ray_nodes.ask("has domains"):
        pytest.skip("needs a Ray that places bundles by labels")
    program = tmp_path / "where.py"
    program.write_text(
        "import os, signal\nprint('up', os.environ['RAY_RAYLET_PID'], flush=True)\nsignal.pause()\n"
    )
    ray_nodes.ask("add")
    wait_until(lambda: ray_nodes.ask("free") == 6, lambda: f"{ray_nodes.ask('free')} free")
    with start_meshrun(*ON_RAY, *DOMAIN, "--nnodes", "1:2", program, folder=tmp_path) as running:
        for at_first, what in ((0, ""), (4, "lose"), (6, "add")):
            _ = ray_nodes.ask(what) if what else None
            now = 2 if what == "lose" else 4
            running.wait_for("up", at_first + now)
            used = re.findall(r"up (\d+)", running.stdout)[at_first:]
            assert sorted(set(used)) == sorted(ray_nodes.ask("raylets"))
        running.signal(signal.SIGTERM)
        assert running.wait() == 143, running.stderr
    ray_nodes.ask("lose")
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_a_lost_node_is_replaced(fake_torch: object, ray_nodes: RayNodes, tmp_path: Path) -> None:
    """With a range of nodes, the launch continues and uses another node once there is one."""
    words = (*ON_RAY, "--nnodes", "1:2", PROGRAMS / "wait.py")
    with start_meshrun(*words, folder=tmp_path) as running:
        running.wait_for("up", 4)
        ray_nodes.ask("lose")
        running.wait_for("up", 6)
        ray_nodes.ask("add")
        running.wait_for("up", 10)
        running.signal(signal.SIGTERM)
        assert running.wait() == 143, running.stderr
    assert "continuing without host" in running.stderr
    assert "runs with" in running.stderr
    wait_until_idle(ray_nodes)


@pytest.mark.nightly
def test_ranks_have_the_gpus_that_ray_gives_their_node(
    fake_torch: object,
    fake_nvml: Callable[[list[Any]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not overlap with the GPUs that another program on the cluster uses."""
    fake_nvml([card(f"GPU-{bus}", bus) for bus in range(3)])
    with start_ray(gpus=3, PYTHONPATH="") as nodes:
        monkeypatch.setenv("RAY_ADDRESS", nodes.address)
        used = dict(nodes.ask("use a GPU of each node"))
        result = run_meshrun(
            *ON_RAY, "--export", "FAKE_*", "--no-prefix", PROGRAMS / "environment.py"
        )
        wait_until(lambda: nodes.ask("free GPUs") == 4, lambda: f"{nodes.ask('free GPUs')} free")

    assert result.returncode == 0, result.stderr
    ranks = [json.loads(line) for line in result.stdout.splitlines()]
    given = {one["RAY_RAYLET_PID"]: one["CUDA_VISIBLE_DEVICES"] for one in ranks}
    assert sorted(one["RANK"] for one in ranks) == ["0", "1", "2", "3"]
    assert given.keys() == used.keys()
    for node, gpus in given.items():
        assert sorted([*gpus.split(","), used[node]]) == ["0", "1", "2"]
