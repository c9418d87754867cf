"""A user's file, checked against the types of the installed package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import meshrun
from meshrun import (
    LaunchResult,
    Layout,
    WorkerGroup,
    current_layout,
    current_mesh,
    data_shard,
    heartbeat,
    init_mesh,
    launch,
    progress,
    use_mesh,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type


def square(value: int, *, power: int = 2) -> float:
    return float(value**power)


mesh = current_mesh("dp", "tp", fallback="dp=-1,tp=1")
size: int = mesh.size()
rank: int = init_mesh({"dp": 2}, timeout=["dp=5m"]).get_local_rank("dp")
with use_mesh(mesh["dp"]) as dp:
    dims: tuple[str, ...] | None = dp.mesh_dim_names
layout: Layout = current_layout()
shard = data_shard("dp")
heartbeat()
progress(3)
result = launch("train.py", mesh="dp=2", args=["--lr", "1e-3"])
squares = launch(square, args=(3,), kwargs={"power": 3}, mesh=(2, 4))
with WorkerGroup(mesh="dp=2") as group:
    answers = group.call(square, 3, power=3)
if TYPE_CHECKING:
    assert_type(result, LaunchResult)
    assert_type(squares, list[float])
    assert_type(answers, list[float])
    assert_type(meshrun.__version__, str)
    assert_type(layout.generation, int)
launch("train.py", mesch="dp=2")  # an error of each checker
