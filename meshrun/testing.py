"""Helpers for tests that run on the ranks of a mesh."""

from __future__ import annotations

from typing import Any


def assert_same_on_all_ranks(
    value: Any, *, group: Any = None, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Check that all ranks have the same value; collective: every rank of the group calls it.

    Args:
        value: A tensor, or lists, tuples and dicts of tensors and numbers; or any other object that
            can be pickled and compared.
        group: The ranks that compare; all if ``None``. ``mesh.get_group("dp")`` compares along a
            dim.
        rtol: How far numbers may be apart, as of ``torch.testing.assert_close``; equal if 0.
        atol: The same.

    Raises:
        AssertionError: On every rank of the group alike, with the first rank that differs.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    values: list[Any] = [None] * len(ranks)
    dist.all_gather_object(values, _on_cpu(value), group=group)
    for rank, other in zip(ranks[1:], values[1:], strict=True):
        where = f"rank {rank} differs from rank {ranks[0]}"
        try:
            torch.testing.assert_close(other, values[0], rtol=rtol, atol=atol, equal_nan=True)
        except TypeError:  # no numbers
            assert other == values[0], f"{where}: {other!r} != {values[0]!r}"  # noqa: S101
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None


def rank_seed(seed: int, *dims: str) -> int:
    """Seed torch alike on ranks that differ in no dim but others; return that seed.

    ``rank_seed(0, "dp")`` gives each ``dp`` index a seed of its own, which all ranks with that
    index share; without dims, each rank has its own.

    Args:
        seed: Seeds with different numbers share none, for fewer than 2**20 ranks.
        *dims: Names of the mesh's dims.

    Raises:
        MeshError: If the mesh has no such dim.
    """
    import torch

    from meshrun.mesh.current_layout import current_layout

    layout = current_layout()
    index = 0 if dims else layout.own_rank or 0
    for dim in dims:
        index = index * layout.size(dim) + layout.dim_rank(dim)
    chosen = seed << 20 | index
    torch.manual_seed(chosen)
    return chosen


def _on_cpu(value: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    def copy(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(copy, value)
