"""NVLink domains, each shared by consecutive nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

from meshrun.errors import LayoutError
from meshrun.wording import count


def split_nodes(nnodes: int, size: int) -> tuple[int, ...]:
    """Return the number of nodes in each domain if ``size`` consecutive nodes share one.

    Raises:
        LayoutError: If ``size`` is below 1 or above ``nnodes``.

    Example:
        >>> split_nodes(5, 2)
        (2, 2, 1)
    """
    if size < 1:
        raise LayoutError(f"--domain-size must be at least 1, found {size}")
    if size > nnodes:
        raise LayoutError(
            f"--domain-size {size} is more than the {count(nnodes, 'node')} of this launch",
            hint=f"use --domain-size {nnodes} if all nodes share one domain",
        )
    whole, rest = divmod(nnodes, size)
    return (size,) * whole + ((rest,) if rest else ())


def domains_of(names: Sequence[str]) -> tuple[int, ...]:
    """Return the number of nodes in each domain.

    If the nodes of a domain are not consecutive, each run of them counts as a domain: that is
    safe, but may reject a mesh that would fit.

    Args:
        names: Each node's name of its domain; "" if unknown, which makes the node its own domain.

    Returns:
        The numbers; empty if no domain is known.
    """
    if not any(names):
        return ()
    keys = (name or node for node, name in enumerate(names))
    return tuple(sum(1 for _ in nodes) for _, nodes in groupby(keys))


def shorten_domains(nodes_per_domain: Sequence[int]) -> int | list[int]:
    """Return the common size of domains, if at most the last one is smaller, else all sizes."""
    if not nodes_per_domain:
        return []
    first = nodes_per_domain[0]
    is_regular = all(nodes == first for nodes in nodes_per_domain[:-1])
    return first if is_regular and nodes_per_domain[-1] <= first else list(nodes_per_domain)


def sums_of(counts: Sequence[int], nodes_per_domain: Sequence[int]) -> tuple[int, ...]:
    """Return the sum of ``counts``, one per node, over the nodes of each domain."""
    left = iter(counts)
    return tuple(sum(islice(left, nodes)) for nodes in nodes_per_domain)
