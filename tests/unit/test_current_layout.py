"""The layout that the environment describes, and contradictory environments."""

from __future__ import annotations

import json

import pytest

from meshrun import Layout, MeshError, current_layout

TORCHRUN = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "mesh", "counts", "own_rank"),
    [
        ({}, None, (1,), 0),
        ({"MESHRUN_MESH": "dp=-1,tp=1"}, "dp=1,tp=1", (1,), 0),
        ({"WORLD_SIZE": "8", "RANK": "3"}, None, (8,), 3),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "3"}, None, (4, 4), 3),
        ({**TORCHRUN, "MESHRUN_MESH": "dp=-1,tp=4", "RANK": "7"}, "dp=2,tp=4", (4, 4), 7),
        ({**TORCHRUN, "MESHRUN_MESH": "-1"}, "8", (4, 4), None),
        ({**TORCHRUN, "MESHRUN_NPROC_PER_NODE": "4"}, None, (4, 4), None),
        ({**TORCHRUN, "MESHRUN_NPROC_PER_NODE": "6,2"}, None, (6, 2), None),
        ({"MESHRUN_NPROC_PER_NODE": "6,2", "MESHRUN_MESH": "8"}, "8", (6, 2), None),
    ],
)
def test_variables_make_a_layout(
    environ: dict[str, str],
    variables: dict[str, str],
    mesh: str | None,
    counts: tuple[int, ...],
    own_rank: int | None,
) -> None:
    """Variables of meshrun, of torchrun on one node and two, of a scheduler, and none."""
    environ.update(variables)
    layout = current_layout()

    assert layout.to_dict()["mesh"] == mesh
    assert (layout.nproc_per_node, layout.own_rank) == (counts, own_rank)


def test_joined_dims_and_views_need_a_mesh(environ: dict[str, str]) -> None:
    """Without a mesh they may be leftovers, so they are not an error."""
    environ.update(MESHRUN_FLATTEN="all=dp+tp", MESHRUN_VIEW="v:a=-1")
    without = current_layout()
    environ.update(MESHRUN_MESH="dp=1,tp=-1", MESHRUN_GENERATION="2")

    assert (without.flattens, without.views) == ((), ())
    assert current_layout() == Layout.parse("dp=1,tp=1", flatten="all=dp+tp", views="v:a=1")
    assert current_layout().generation == 2


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"MESHRUN_MESH": "dp=2,tp=4"},
            "MESHRUN_MESH `dp=2,tp=4` needs 8 ranks, but the environment has 1",
        ),
        (
            {**TORCHRUN, "MESHRUN_MESH": "dp=-1,tp=3"},
            "MESHRUN_MESH `dp=-1,tp=3` needs a multiple of 3 ranks, but the environment has 8",
        ),
        (
            {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"},
            "conflicting numbers of ranks: WORLD_SIZE=6, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2",
        ),
        (
            {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"},
            "conflicting numbers of ranks: WORLD_SIZE=6, LOCAL_WORLD_SIZE=4",
        ),
        (
            {"WORLD_SIZE": "2", "MESHRUN_NPROC_PER_NODE": "4", "MESHRUN_MESH": "dp=4"},
            "conflicting numbers of ranks: WORLD_SIZE=2, MESHRUN_NPROC_PER_NODE=4",
        ),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE must be from 1 to 10,000,000, found `0`",
        ),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be from 1 to 10,000,000, found `0`"),
        (
            {"MESHRUN_NPROC_PER_NODE": "4,-1"},
            "MESHRUN_NPROC_PER_NODE must be from 0 to 10,000,000, found `-1`",
        ),
        (
            {**TORCHRUN, "RANK": "8"},
            "the environment does not describe a launch: rank 8 is outside a world of 8",
        ),
        ({"RANK": "x"}, "RANK must be a whole number, found `x`"),
        (
            {"MESHRUN_MESH": "dp="},
            "the environment does not describe a launch: missing size",
        ),
        (
            {"MESHRUN_MESH": "dp=-1", "MESHRUN_VIEW": "v:a=2,b=-1"},
            "the environment does not describe a launch: view `v` needs a multiple of 2"
            " workers, but the mesh has 1",
        ),
    ],
)
def test_a_contradiction_is_an_error(
    environ: dict[str, str], variables: dict[str, str], message: str
) -> None:
    """A MeshError with the numbers, and never a guess."""
    environ.update(variables)

    with pytest.raises(MeshError) as caught:
        current_layout()
    assert caught.value.message.startswith(message)


def test_the_previous_layout(environ: dict[str, str]) -> None:
    """Its variable holds JSON, and is empty in the first generation."""
    before = Layout.parse("dp=3,tp=1", nnodes=3, nproc_per_node=[1, 1, 1])
    environ.update(MESHRUN_MESH="2x1", WORLD_SIZE="2", MESHRUN_GENERATION="5")
    environ["MESHRUN_PREVIOUS"] = json.dumps({**before.to_dict(), "generation": 4})
    previous = current_layout().previous
    environ["MESHRUN_PREVIOUS"] = ""

    assert previous == before
    assert previous.generation == 4
    assert current_layout().previous is None


@pytest.mark.parametrize("text", ["[1", "[1]", "{}", '{"nproc_per_node": "x", "mesh": 3}'])
def test_a_broken_previous_layout_is_an_error(environ: dict[str, str], text: str) -> None:
    """Like any other broken variable."""
    environ["MESHRUN_PREVIOUS"] = text

    with pytest.raises(MeshError, match="does not describe a launch"):
        current_layout()
