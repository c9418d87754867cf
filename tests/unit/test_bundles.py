"""What a launch requests from a Ray cluster, and whether it fits."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import cloudpickle
import pytest

from meshrun.actors import node_actor
from meshrun.actors.bundles import (
    PlacementRequest,
    count_placeable,
    describe_bundles,
    describe_lack,
    read_placement,
    render_placement,
)
from meshrun.errors import UsageError


def read(*extras: str, workers: tuple[int, ...] = (8, 8), **more: Any) -> PlacementRequest:
    return read_placement(extras, **{"workers": workers, "min_nodes": 2, "device": "auto", **more})


@pytest.mark.parametrize(
    ("extras", "device", "cluster", "bundle"),
    [
        ((), "auto", {"CPU": 64.0}, {"CPU": 8.0}),
        ((), "auto", {"CPU": 64.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 8.0}),
        ((), "cpu", {"CPU": 64.0, "GPU": 4.0}, {"CPU": 8.0}),
        ((), "cuda", {}, {"CPU": 8.0, "GPU": 8.0}),
        ((), "npu", {}, {"CPU": 8.0, "NPU": 8.0}),
        (("CPU=96 memory=1e9", "special=0.5"), "cuda", {},
         {"CPU": 96.0, "GPU": 8.0, "memory": 1e9, "special": 0.5}),
        (("GPU=4",), "cuda", {}, {"CPU": 8.0, "GPU": 4.0}),
    ],
)  # fmt: skip
def test_what_a_node_needs(
    extras: tuple[str, ...], device: str, cluster: dict[str, float], bundle: dict[str, float]
) -> None:
    """A CPU and a device for each rank, unless ``--submit-arg`` says otherwise."""
    assert read(*extras, device=device).bundles([cluster]) == (bundle, bundle)


def test_how_nodes_are_placed() -> None:
    """Each on a host of its own, unless ``strategy`` or ``domain`` says otherwise."""
    asked = read("strategy=pack domain=ray.io/gpu-domain", "timeout=5m")

    assert read().strategy == "STRICT_SPREAD"
    assert (asked.strategy, asked.domain, asked.timeout_s) == ("PACK", "ray.io/gpu-domain", 300.0)
    assert render_placement(asked) == (
        "placement group: PACK, 2 bundles\n"
        "  on nodes with the same ray.io/gpu-domain\n"
        "  node 0: 8 CPU, 8 GPU if the cluster has any\n"
        "  node 1: 8 CPU, 8 GPU if the cluster has any\n"
    )
    assert "2 bundles, 1 or more of them" in render_placement(read(min_nodes=1))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ("CPU", "NAME=VALUE"),
        ("CPU=", "NAME=VALUE"),
        ("CPU=many", "found `many`"),
        ("CPU=-1", "found `-1`"),
        ("CPU=nan", "found `nan`"),
        ("'", "cannot read"),
        ("strategy=PACKED", "did you mean `PACK`"),
        ("timeout=soon", "timeout"),
    ],
)
def test_what_cannot_be_parsed_is_rejected(extra: str, why: str) -> None:
    """The error names the word."""
    with pytest.raises(UsageError, match="--submit-arg") as raised:
        read(extra)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("nodes", "strategy", "number"),
    [
        ([8, 8], "STRICT_SPREAD", 2),
        ([16], "STRICT_SPREAD", 1),
        ([16], "PACK", 2),
        ([4, 4, 4, 4], "PACK", 0),
        ([7, 8], "STRICT_SPREAD", 1),
        ([], "PACK", 0),
    ],
)
def test_how_many_nodes_there_are(nodes: list[int], strategy: str, number: int) -> None:
    """A bundle fits on one node, and shares it with others only if the strategy allows it."""
    bundle = {"CPU": 1.0, "GPU": 8.0}
    having = [{"CPU": 64.0, "GPU": float(gpus)} for gpus in nodes]

    assert count_placeable([bundle, bundle], having, strategy) == number


def test_too_few_nodes_are_reported_with_numbers() -> None:
    """What was requested, what each node has, and how much of that is free."""
    bundle = {"CPU": 8.0, "GPU": 8.0}
    nodes = [(f"n{number}", {"CPU": 64.0}, {"CPU": 0.5}) for number in range(10)]

    text = describe_lack(describe_bundles([bundle] * 2), nodes, bundle)
    first, second, *_, last = text.splitlines()
    assert first == (
        "the Ray cluster cannot provide 2 nodes with 8 GPU, 8 CPU each; it has 10 nodes:"
    )
    assert second == "       n0: 0 GPU, 64 CPU; free: 0 GPU, 0.5 CPU"
    assert last == "       and 2 more"
    assert describe_lack("it", [], bundle).endswith("it has no node")


def test_an_actor_is_created_on_a_node_that_lacks_meshrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process then reports that."""
    cloudpickle.register_pickle_by_value(node_actor)
    pickled = cloudpickle.dumps(node_actor.NodeActor)
    cloudpickle.unregister_pickle_by_value(node_actor)
    for name in [name for name in sys.modules if name.partition(".")[0] == "meshrun"]:
        monkeypatch.setitem(sys.modules, name, None)

    assert pickle.loads(pickled)().read() == 0
