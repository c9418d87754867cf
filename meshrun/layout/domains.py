"""NVLink domains: which consecutive nodes share one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice

from meshrun.errors import LayoutError
from meshrun.wording import count


def split_nodes(nnodes: int, size: int) -> tuple[int, ...]:
    """Return the nodes of each domain where ``size`` consecutive ones share it.

    Raises:
        LayoutError: If a domain would have no node, or more than there are.

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
    """Return the nodes of each domain by what every node says that its domain is called.

    A node that does not know is a domain of its own. So is every stretch of nodes if those of a
    domain do not follow each other, which is never wrong, but may refuse what would fit.

    Returns:
        Nothing if no node knows.
    """
    if not any(names):
        return ()
    told = (name or node for node, name in enumerate(names))
    return tuple(sum(1 for _ in nodes) for _, nodes in groupby(told))


def shorten_domains(nodes_per_domain: Sequence[int]) -> int | list[int]:
    """Return the size of all domains if only the last one may be smaller, else each of them."""
    if not nodes_per_domain:
        return []
    first = nodes_per_domain[0]
    is_regular = all(nodes == first for nodes in nodes_per_domain[:-1])
    return first if is_regular and nodes_per_domain[-1] <= first else list(nodes_per_domain)


def sums_of(counts: Sequence[int], nodes_per_domain: Sequence[int]) -> tuple[int, ...]:
    """Return what the nodes of each domain have together, of what each node has."""
    left = iter(counts)
    return tuple(sum(islice(left, nodes)) for nodes in nodes_per_domain)
