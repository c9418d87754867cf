"""A layout agrees with torch's own DeviceMesh, for every rank of random meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrun.layout import Flatten, Layout, View
from meshrun.layout.spec import MeshSpec

pytestmark = pytest.mark.torch
JOINED, VIEW, LONGEST_WORLD = "joined", "view", 24
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: name not in (JOINED, VIEW, "rank", "local_rank")
)


@st.composite
def meshes(draw: st.DrawFn, longest_world: int = LONGEST_WORLD) -> MeshSpec:
    """Meshes of up to four named dims, some of size 1."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        room = longest_world // math.prod(sizes)
        sizes.append(draw(st.integers(1, min(room, 6))))
    labels = draw(st.lists(names, min_size=len(sizes), max_size=len(sizes), unique=True))
    return MeshSpec(sizes=tuple(sizes), mesh_dim_names=tuple(labels))


@st.composite
def layouts(draw: st.DrawFn, longest_world: int = LONGEST_WORLD) -> Layout:
    """Layouts on nodes of any size, with a view, and a joined dim if the mesh has two dims."""
    mesh = draw(meshes(longest_world))
    world_size = mesh.known_size
    workers = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    joinable = [
        dims
        for count in range(2, mesh.ndim + 1)
        for dims in itertools.combinations(mesh.mesh_dim_names or (), count)
    ]
    dims = draw(st.sampled_from(joinable)) if joinable else ()
    return Layout(
        mesh=mesh,
        nproc_per_node=(workers,) * (world_size // workers),
        flattens=(Flatten(name=JOINED, dims=dims),) if dims else (),
        views=(View(name=VIEW, mesh=draw(factorizations(world_size))),),
    )


@st.composite
def factorizations(draw: st.DrawFn, world_size: int) -> MeshSpec:
    """Meshes with so many ranks and with unique names of dims."""
    sizes = []
    for _ in range(draw(st.integers(0, 2))):
        left = world_size // math.prod(sizes)
        sizes.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
    sizes.append(world_size // math.prod(sizes))
    labels = tuple(f"{VIEW}_of_this_mesh_{place}" for place in range(len(sizes)))
    return MeshSpec(sizes=tuple(sizes), mesh_dim_names=labels)


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Be this rank in a world of fake process groups."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_dim(layout: Layout, dim: str | int, rank: int, mesh: Any) -> None:
    """Compare one dim of a layout with torch's mesh of that dim, as seen by one rank."""
    import torch.distributed as dist

    members = dist.get_process_group_ranks(mesh.get_group())
    place = mesh.get_local_rank()

    assert list(layout.group(dim, rank)) == members
    assert layout.dim_rank(dim, rank) == place
    assert layout.size(dim) == mesh.size() == len(members)
    assert layout.source(dim, rank) == members[0]
    assert layout.neighbor(dim, 1, rank, wrap=True) == members[(place + 1) % len(members)]
    assert layout.is_first(dim, rank) == (place == 0)
    assert layout.is_last(dim, rank) == (place == len(members) - 1)


@settings(max_examples=settings().max_examples // 5)
@given(layouts())
def test_every_rank_has_the_place_that_its_mesh_gives_it(layout: Layout) -> None:
    """Coordinates, groups and ranks in dims, joined dims and views."""
    from torch.distributed.device_mesh import init_device_mesh

    dims = layout.mesh_dim_names or ()
    for rank in range(layout.world_size):
        with fake_world(rank, layout.world_size):
            mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=dims)
            assert layout.coordinate(rank) == tuple(mesh.get_coordinate())
            assert layout.rank(mesh.get_coordinate()) == rank
            assert layout.shape == dict(zip(dims, mesh.shape, strict=True))
            for index, dim in enumerate(dims):
                check_dim(layout, dim, rank, mesh[dim])
                check_dim(layout, index, rank, mesh[dim])
            for flatten in layout.flattens:
                check_dim(layout, flatten.name, rank, mesh[flatten.dims]._flatten(flatten.name))
            for view in layout.views:
                of_view = view.mesh.mesh_dim_names or ()
                world = init_device_mesh("cpu", (layout.world_size,), mesh_dim_names=("world",))
                other = world._unflatten(0, view.mesh.sizes, of_view)
                at = tuple(layout.dim_rank(dim, rank) for dim in of_view)
                assert at == tuple(other.get_coordinate())
                for dim in of_view:
                    check_dim(layout, dim, rank, other[dim])


@given(layouts(longest_world=400))
def test_all_groups_are_rows_of_torchs_tensor(layout: Layout) -> None:
    """A dim's groups are the rows of arange(world) along that dim."""
    import torch

    names = layout.mesh_dim_names or ()
    tensor = torch.arange(layout.world_size).view(layout.sizes)
    expected = {dim: rows(tensor, [names.index(dim)]) for dim in names}
    for flatten in layout.flattens:
        expected[flatten.name] = rows(tensor, [names.index(dim) for dim in flatten.dims])
    for view in layout.views:
        other = torch.arange(layout.world_size).view(view.mesh.sizes)
        for place, dim in enumerate(view.mesh.mesh_dim_names or ()):
            expected[dim] = rows(other, [place])

    for dim, groups in expected.items():
        assert [list(group) for group in layout.groups(dim)] == groups
        for group in groups:
            for place, rank in enumerate(group):
                assert layout.dim_rank(dim, rank) == place
                assert list(layout.group(dim, rank)) == group
        crossing = sum(rank_nodes(layout, group) > 1 for group in groups)
        assert layout.count_crossing(dim) == crossing


def rows(tensor: Any, dims: list[int]) -> list[list[int]]:
    """Return the groups of ranks along some dims, sorted by first rank."""
    rest = [dim for dim in range(tensor.dim()) if dim not in dims]
    size = math.prod(tensor.shape[dim] for dim in dims)
    found = tensor.permute(*rest, *dims).reshape(-1, size)
    return sorted(found.tolist())


def rank_nodes(layout: Layout, group: list[int]) -> int:
    """Return the number of nodes that a group of ranks is on."""
    return len({rank // layout.nproc_per_node[0] for rank in group})


@given(meshes(longest_world=200))
def test_a_mesh_without_groups_agrees_too(mesh: MeshSpec) -> None:
    """The coordinates of all ranks of a larger mesh, and the ranks with one index fixed."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    layout = Layout(mesh=mesh, nproc_per_node=(mesh.known_size,))
    tensor = torch.arange(mesh.known_size).view(mesh.sizes)
    for rank in range(mesh.known_size):
        theirs = DeviceMesh(
            "cpu", tensor, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False, _rank=rank
        )
        assert layout.coordinate(rank) == tuple(theirs.get_coordinate())
        assert layout.rank(theirs.get_coordinate()) == rank
    for place, dim in enumerate(layout.shape):
        for index in range(layout.size(dim)):
            fixed = tensor.select(place, index).flatten().tolist()
            assert list(layout.ranks(**{dim: index})) == sorted(fixed)
