"""Every call of VeDeviceMesh has a counterpart in meshrun that is right on any nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from meshrun import Layout
from meshrun.layout.spec import parse_mesh
from tests.kit import PROGRAMS, ROOT, run_meshrun

PAGE = ROOT / "docs" / "how-to" / "from-vedevicemesh.md"
METHODS = {
    "init_device_mesh", "get", "_get_tensor_parallel_mesh", "_get_data_parallel_mesh",
    "get_strategy_coordinate", "lookup_rank", "get_strategy_size", "get_local_rank",
    "get_pipeline_parallel_rank", "get_data_parallel_rank", "get_tensor_parallel_rank",
    "get_pipeline_parallel_mesh", "get_global_pipeline_parallel_meshes", "get_data_parallel_mesh",
    "get_tensor_parallel_mesh", "get_global_tensor_parallel_meshes", "is_first_stage",
    "is_last_stage", "__getitem__", "get_data_parallel_dim_groups",
    "get_tensor_parallel_dim_groups", "get_coordinate", "size", "ndim", "shape",
}  # fmt: skip
OF_ITS_DEVICE_MESH = {
    "get_submesh", "get_all_submesh", "get_mapping_rank", "get_dim_groups",
    "enforce_cpu_mesh_tensor", "DeviceMesh",
}  # fmt: skip
MESH, WORLD, RANK = "pp=2,dp=2,tp=2", 8, "rank"


def pp(rank: int) -> int:
    return rank // 4


def dp(rank: int) -> int:
    return rank // 2 % 2


def tp(rank: int) -> int:
    return rank % 2


def coordinate(rank: int) -> list[int]:
    return [pp(rank), dp(rank), tp(rank)]


def peers(rank: int, *dims: Callable[[int], int]) -> list[int]:
    """Return the ranks that have the same index as ``rank`` along these dims."""
    return [other for other in range(WORLD) if all(dim(other) == dim(rank) for dim in dims)]


def all_ranks(rank: int) -> list[int]:
    return [*range(WORLD)]


RIGHT: dict[str, Callable[[int], Any]] = {
    'init_device_mesh("cuda", (2, 2, 2))': all_ranks,
    "init_device_mesh(check_uniqueness=True)": all_ranks,
    "get()": all_ranks,
    "get(**kwargs)": all_ranks,
    "get_coordinate()": coordinate,
    "get_strategy_coordinate()": coordinate,
    "get_strategy_coordinate(rank)": lambda rank: coordinate((rank + 3) % WORLD),
    'lookup_rank("dp")': dp,
    "get_pipeline_parallel_rank()": pp,
    "get_data_parallel_rank()": dp,
    "get_tensor_parallel_rank()": tp,
    'get_strategy_size("dp")': lambda _: 2,
    "size()": lambda _: WORLD,
    "size(1)": lambda _: 2,
    "ndim": lambda _: 3,
    "shape": lambda _: [2, 2, 2],
    "get_local_rank()": lambda rank: rank,
    "get_pipeline_parallel_mesh()": lambda rank: peers(rank, dp, tp),
    "get_data_parallel_mesh()": lambda rank: peers(rank, pp, tp),
    "get_tensor_parallel_mesh()": lambda rank: peers(rank, pp, dp),
    "_get_data_parallel_mesh()": lambda rank: peers(rank, pp, tp),
    "_get_tensor_parallel_mesh()": lambda rank: peers(rank, pp, dp),
    '__getitem__("dp")': lambda rank: peers(rank, pp, tp),
    "get_global_pipeline_parallel_meshes()": lambda _: [peers(0, pp), peers(4, pp)],
    "get_global_tensor_parallel_meshes()": lambda _: [peers(r, pp, dp) for r in (0, 2, 4, 6)],
    "is_first_stage()": lambda rank: pp(rank) == 0,
    "is_last_stage()": lambda rank: pp(rank) == 1,
    "get_data_parallel_dim_groups()": lambda rank: peers(rank, pp, tp),
    "get_tensor_parallel_dim_groups()": lambda rank: peers(rank, pp, dp),
    'get_submesh(["dp", "tp"])': lambda rank: peers(rank, pp),
    'get_all_submesh("tp")': lambda _: [peers(r, pp, dp) for r in (0, 2, 4, 6)],
    'get_dim_groups("dp")': lambda rank: peers(rank, pp, tp),
    "get_mapping_rank(other)": lambda rank: [rank // 2],
}


def rows() -> dict[str, str]:
    """Return the call of meshrun for each call of VeDeviceMesh on the page."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            theirs, ours, _ = line.strip("|").split(" | ", maxsplit=2)
            found[re.findall("`([^`]+)`", theirs)[-1]] = ours.strip(" `")
    return found


def plain(value: Any) -> Any:
    return [plain(part) for part in value] if isinstance(value, (list, tuple, range)) else value


def test_the_page_has_every_method() -> None:
    named = {re.split(r"\W", theirs, maxsplit=1)[0] for theirs in rows()}

    assert named == METHODS | OF_ITS_DEVICE_MESH
    assert {theirs for theirs, ours in rows().items() if ours != "layout.to_dict()"} == set(RIGHT)


@pytest.mark.parametrize("nodes", [(8,), (4, 4), (5, 3), (2, 2, 2, 2), (1,) * 8], ids=str)
def test_the_layouts_answers_are_right_on_any_nodes(nodes: tuple[int, ...]) -> None:
    """Also if nodes have fewer workers than devices, or different numbers of them."""
    mesh = parse_mesh(MESH)
    slots = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    asked = {theirs: ours for theirs, ours in rows().items() if "layout" in ours}
    right = {**RIGHT, "get_local_rank()": lambda rank: slots[rank][1]}
    right |= dict.fromkeys(asked.keys() - RIGHT, lambda _: layouts[0].to_dict())
    layouts = [Layout(mesh=mesh, nproc_per_node=nodes, own_rank=rank) for rank in range(WORLD)]

    for layout in layouts:
        rank = layout.own_rank
        assert rank is not None
        for theirs, ours in asked.items():
            names = {"layout": layout, RANK: (rank + 3) % WORLD, "other": Layout.parse("4")}
            assert plain(eval(ours, names)) == right[theirs](rank), ours


@pytest.mark.torch
@pytest.mark.nightly
def test_every_call_is_right_in_real_ranks() -> None:
    """Including meshes and groups; every rank has the same layout."""
    asked = rows()
    ours = run_meshrun(
        "--mesh", MESH, "--device", "cpu", "--no-prefix", PROGRAMS / "evaluate.py",
        "layout.own_rank", *asked.values(),
    )  # fmt: skip
    right = {
        **RIGHT,
        **dict.fromkeys(asked.keys() - RIGHT, lambda _: Layout.parse(MESH).to_dict()),
    }

    assert ours.returncode == 0, ours.stderr
    found = sorted(json.loads(line) for line in ours.stdout.splitlines())
    assert [values[0] for values in found] == all_ranks(0)
    for rank, values in enumerate(found):
        assert dict(zip(asked, values[1:], strict=True)) == {
            theirs: right[theirs](rank) for theirs in asked
        }


def test_the_partners_of_the_next_stage_are_as_in_vedevicemesh() -> None:
    """The call below the tables matches rank for rank."""
    call = re.findall(r"`(layout\.map_to\([^`]+among=[^`]+)`", PAGE.read_text())[0]
    layouts = [
        Layout(mesh=parse_mesh(MESH), nproc_per_node=(4, 4), own_rank=rank) for rank in range(4)
    ]

    assert [eval(call, {"layout": layout}) for layout in layouts] == [[4], [5], [6], [7]]
