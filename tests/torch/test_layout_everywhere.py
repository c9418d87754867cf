"""current_layout() and data_shard() return the same in every process of a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from meshrun import Layout
from tests.kit import PROGRAMS, run_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch
FLATTEN, VIEWS = "all=dp+tp", "moe:first=1,ep=4"
DERIVED = {"MESHRUN_FLATTEN": FLATTEN, "MESHRUN_VIEW": VIEWS}


def expected(layout: Layout, rank: int, shard: tuple[int, int]) -> dict[str, Any]:
    """Return what ``layout_facts.py`` prints in a rank of this layout and in its children."""
    derived = [flatten.name for flatten in layout.flattens]
    derived += [dim for view in layout.views for dim in view.mesh.mesh_dim_names or ()]
    dims = [*layout.shape, *derived]
    return {
        "rank": rank,
        "layout": layout.to_dict(),
        "coordinate": list(layout.coordinate(rank)),
        "label": layout.label(rank),
        "slot": list(layout.slot(rank)),
        "groups": {dim: list(layout.group(dim, rank)) for dim in dims},
        "dim_ranks": {dim: layout.dim_rank(dim, rank) for dim in dims},
        "shard": list(shard),
    }


def python(*words: str | os.PathLike[str], **env: str) -> list[dict[str, Any]]:
    """Run this interpreter and return the JSON lines that it prints, by rank."""
    result = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return sorted(map(json.loads, result.stdout.splitlines()), key=lambda found: found["rank"])


@pytest.mark.parametrize("methods", ordinary(["fork", "fork spawn forkserver"], "fork"))
def test_a_rank_and_its_children_have_the_same_layout(methods: str) -> None:
    """DataLoader workers of each start method, and a child that does not import torch."""
    ours = run_meshrun(
        "--mesh", "dp=2,tp=2", "--device", "cpu", "--no-prefix",
        PROGRAMS / "layout_facts_below.py", *methods.split(), env=DERIVED,
    )  # fmt: skip
    layout = Layout.parse("dp=2,tp=2", flatten=[FLATTEN], views=[VIEWS])

    assert ours.returncode == 0, ours.stderr
    found = sorted(
        map(json.loads, ours.stdout.splitlines()), key=lambda line: line["here"][0]["rank"]
    )
    assert len(found) == layout.world_size
    for rank, facts in enumerate(found):
        right = expected(layout, rank, (layout.coordinate(rank).dp, 2))
        assert facts["here"] == [right]
        assert facts["child"] == [{**right, "torch": False}]
        for method in methods.split():
            assert facts[method] == [right, right], method
    for tp in range(2):
        read = [sample for rank in layout.ranks(tp=tp) for sample in found[rank]["samples"]]
        assert sorted(read) == list(range(24))
    for group in layout.groups("tp"):
        assert found[group[0]]["samples"] == found[group[1]]["samples"]


def test_ranks_without_a_mesh_read_different_data() -> None:
    """The layout has nodes and ranks, and every rank has its own shard."""
    ours = run_meshrun("--nproc-per-node", "2", "--no-prefix", PROGRAMS / "layout_facts.py")
    layout = Layout.parse(None, nproc_per_node=2)

    assert ours.returncode == 0, ours.stderr
    found = sorted(map(json.loads, ours.stdout.splitlines()), key=lambda facts: facts["rank"])
    for facts in found:
        del facts["torch"]  # meshrun itself imports it
    assert found == [expected(layout, rank, (rank, 2)) for rank in range(2)]


@pytest.mark.nightly
def test_torchruns_ranks_have_the_same_layout() -> None:
    """With MESHRUN_MESH set, and the open size computed from WORLD_SIZE."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=4", PROGRAMS / "layout_facts.py")
    layout = Layout.parse("dp=2,tp=2", flatten=[FLATTEN], views=[VIEWS])

    found = python(*torchrun, MESHRUN_MESH="dp=-1,tp=2", **DERIVED)
    assert found == [
        {**expected(layout, rank, (rank // 2, 2)), "torch": False} for rank in range(4)
    ]


@pytest.mark.parametrize("spec", ["dp=-1,tp=1", "1x1", None])
def test_a_plain_python_is_a_launch_of_one_rank(spec: str | None) -> None:
    """Only MESHRUN_MESH is needed, and only for the dims."""
    env = {} if spec is None else {"MESHRUN_MESH": spec, "MESHRUN_DATA_DIMS": "0"}
    if spec == "dp=-1,tp=1":
        del env["MESHRUN_DATA_DIMS"]
    layout = Layout.parse(spec and spec.replace("-1", "1"), nproc_per_node=1)

    right = {**expected(layout, 0, (0, 1)), "torch": False}
    assert python(PROGRAMS / "layout_facts.py", **env) == [right]


def test_two_nodes_of_torchrun_are_two_nodes() -> None:
    """The slot is torchrun's node and local rank, from its variables alone."""
    layout = Layout.parse("dp=2,tp=2", nnodes=2)
    for rank in range(4):
        node, local = divmod(rank, 2)
        found = python(
            PROGRAMS / "layout_facts.py", MESHRUN_MESH="dp=2,tp=2", RANK=str(rank), WORLD_SIZE="4",
            LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(local), GROUP_RANK=str(node), GROUP_WORLD_SIZE="2",
        )  # fmt: skip
        assert found == [{**expected(layout, rank, (rank // 2, 2)), "torch": False}]
