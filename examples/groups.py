"""Which ranks form which group, on any mesh.

    meshrun --mesh 2x3 examples/groups.py
    meshrun --mesh 3x2 examples/groups.py
    meshrun --mesh replicate=2,shard=4 examples/groups.py

Ranks fill the mesh row by row. A rank is in one group per dim: the ranks whose coordinates differ
from its own on that dim alone.
"""

import torch.distributed as dist

from meshrun import current_layout, current_mesh


def gather_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a group, as each of them reports itself."""
    ranks = [-1] * group.size()
    dist.all_gather_object(ranks, dist.get_rank(), group=group)
    return ranks


def main() -> None:
    """Print this rank's groups, and check that the layout names the same ranks."""
    mesh, layout = current_mesh(), current_layout()
    groups = []
    for dim in range(mesh.ndim):
        ranks = gather_ranks(mesh.get_group(dim))
        assert ranks == list(layout.group(dim))  # which needs no communication
        name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dim {dim}"
        groups.append(f"{name} {ranks}")
    print(f"rank {layout.own_rank}:", ", ".join(groups))


if __name__ == "__main__":
    main()
