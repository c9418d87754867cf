"""Who is in which group: each rank asks around along every dim of its mesh.

    meshrun --mesh 2x3 examples/groups.py
    meshrun --mesh 3x2 examples/groups.py
    meshrun --mesh replicate=2,shard=4 examples/groups.py

The ranks fill the mesh row by row. A rank is in one group for each dim: the ranks that it reaches
by changing its index on that dim alone.
"""

import torch.distributed as dist

from meshrun import current_layout, current_mesh


def ask_around(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that answer in a group."""
    answers = [-1] * group.size()
    dist.all_gather_object(answers, dist.get_rank(), group=group)
    return answers


def main() -> None:
    """Print this rank's groups, as communication finds them and as the layout says."""
    mesh, layout = current_mesh(), current_layout()
    groups = []
    for dim in range(mesh.ndim):
        found = ask_around(mesh.get_group(dim))
        assert found == list(layout.group(dim))  # this one needs no communication
        name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dim {dim}"
        groups.append(f"{name} {found}")
    print(f"rank {layout.own_rank}:", ", ".join(groups))


if __name__ == "__main__":
    main()
