"""Helpers for tests that run on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshrun.wording import count


def assert_same_on_all_ranks(
    value: Any, *, group: Any = None, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Check that all ranks have the same value; collective: every rank of the group calls it.

    Args:
        value: A tensor, a number, or any other object that can be pickled and compared; or lists,
            tuples and dicts of these.
        group: The ranks to compare; all if ``None``. ``mesh.get_group("dp")`` compares along a
            dim.
        rtol: Relative tolerance, as of ``torch.testing.assert_close``; 0 requires equality.
        atol: Absolute tolerance, likewise.

    Raises:
        AssertionError: On every rank of the group, naming the first rank that differs.
    """
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    values: list[Any] = [None] * len(ranks)
    dist.all_gather_object(values, _on_cpu(value), group=group)
    for rank, other in zip(ranks[1:], values[1:], strict=True):
        where = f"rank {rank} differs from rank {ranks[0]}"
        try:
            _assert_close(other, values[0], rtol, atol)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None


def rank_seed(seed: int, *dims: str) -> int:
    """Seed torch and return the seed; ranks with the same indices along ``dims`` share it.

    ``rank_seed(0, "dp")`` gives each ``dp`` index its own seed, which all ranks with that index
    share. Without dims, each rank gets its own.

    Args:
        seed: Different numbers never lead to the same seed, for fewer than 2**20 ranks.
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


def _assert_close(one: Any, other: Any, rtol: float, atol: float) -> None:
    """Check as ``torch.testing.assert_close`` does, but accept values of any other type too."""
    import torch

    try:
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
    except TypeError as error:
        parts: list[tuple[Any, Any]] = []
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            if one.keys() == other.keys():
                parts = [(one[key], other[key]) for key in one]
            else:
                raise AssertionError(f"keys {list(one)} != {list(other)}") from error
        elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
            if len(one) != len(other):
                sizes = (count(len(each), "value") for each in (one, other))
                raise AssertionError(" != ".join(sizes)) from error
            parts = list(zip(one, other, strict=True))
        elif one != other:
            raise AssertionError(f"{one!r} != {other!r}") from error
        for part, others in parts:
            _assert_close(part, others, rtol, atol)


def _on_cpu(value: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    def copy(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(copy, value)
