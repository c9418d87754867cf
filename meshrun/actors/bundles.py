"""What a launch asks of a Ray cluster: a bundle of resources for each node. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshrun.errors import UsageError
from meshrun.plan.parse import parse_choice, parse_seconds, split_words
from meshrun.wording import count

Resources = Mapping[str, float]
_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
_ACCELERATORS = {"cuda": "GPU", "xpu": "GPU", "hpu": "HPU", "npu": "NPU", "cpu": ""}
"""Ray's names of what torch's device types need; ``""`` for nothing."""
_MOST_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The placement group of a launch."""

    workers: tuple[int, ...]
    """How many ranks each node has."""
    least: int
    """How many nodes are enough."""
    accelerator: str | None
    """The resource of which each rank needs one; ``""`` if none, ``None`` for GPUs if there are
    any."""
    more: tuple[tuple[str, float], ...] = ()
    """Further resources of each node, or others than by default."""
    strategy: str = "STRICT_SPREAD"
    domain: str = ""
    """The label that all nodes have to share, if any: ``ray.io/gpu-domain``."""
    timeout_s: float | None = None
    """How long to wait for resources; ``None`` not to wait for what the cluster does not have."""

    def bundles(self, cluster: Iterable[Resources]) -> tuple[dict[str, float], ...]:
        """Return what each node needs, where the nodes of the cluster have these resources."""
        kind = self.accelerator
        if kind is None:
            kind = "GPU" if any(node.get("GPU") for node in cluster) else ""
        return tuple(
            {"CPU": float(workers), **({kind: float(workers)} if kind else {}), **dict(self.more)}
            for workers in self.workers
        )


def read_placement(
    extras: Sequence[str], *, workers: tuple[int, ...], least: int, device: str
) -> PlacementRequest:
    """Return what to ask for.

    Args:
        extras: What ``--submit-arg`` says: ``NAME=VALUE``, one or several in each.
        workers: How many ranks each node has.
        least: How many nodes are enough.
        device: A torch device type, or ``auto``.

    Raises:
        UsageError: If one cannot be read.
    """
    found: dict[str, Any] = {}
    more: dict[str, float] = {}
    for word in (word for extra in extras for word in split_words(extra, "--submit-arg")):
        name, equals, value = word.partition("=")
        where = f"--submit-arg {name}"
        if not equals or not value:
            raise UsageError(
                f"--submit-arg expects NAME=VALUE for Ray, found `{word}`",
                hint="for example --submit-arg CPU=16, --submit-arg strategy=PACK",
            )
        if name == "strategy":
            found[name] = parse_choice(value.upper(), where, _STRATEGIES)
        elif name == "domain":
            found[name] = value
        elif name == "timeout":
            found["timeout_s"] = parse_seconds(value, where)
        else:
            more[name] = _quantity(value, where)
    if device not in ("auto", *_ACCELERATORS):
        raise UsageError(f"--submit ray does not know which resource --device {device} needs")
    accelerator = None if device == "auto" else _ACCELERATORS[device]
    return PlacementRequest(
        workers=workers, least=least, accelerator=accelerator, more=tuple(more.items()), **found
    )


def _quantity(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{where} expects a number of resources, found `{text}`")
    return number


def count_placeable(bundles: Sequence[Resources], nodes: Sequence[Resources], strategy: str) -> int:
    """Return how many bundles, from the first, fit on nodes with these resources.

    Args:
        bundles: In order.
        nodes: What each node of the cluster has.
        strategy: Ray's name for how bundles are spread.
    """
    left = [dict(node) for node in nodes]
    for placed, bundle in enumerate(bundles):
        fitting = (node for node in left if all(node.get(k, 0.0) >= v for k, v in bundle.items()))
        node = next(fitting, None)
        if node is None:
            return placed
        if strategy == "STRICT_SPREAD":
            left.remove(node)
        for name, needed in bundle.items():
            node[name] = node.get(name, 0.0) - needed
    return len(bundles)


def render_placement(asked: PlacementRequest) -> str:
    """Return what would be asked of a cluster, as ``--dry-run`` prints it."""
    kind = "GPU if the cluster has any" if asked.accelerator is None else asked.accelerator
    lines = [f"placement group: {asked.strategy}, {count(len(asked.workers), 'bundle')}"]
    if asked.least < len(asked.workers):
        lines[0] += f", {asked.least} or more of them"
    if asked.domain:
        lines.append(f"  on nodes with the same {asked.domain}")
    for number, bundle in enumerate(asked.bundles(())):
        each = format_resources(bundle)
        more = f", {asked.workers[number]} {kind}" if asked.accelerator is None else ""
        lines.append(f"  node {number}: {each}{more}")
    return "\n".join([*lines, ""])


def format_resources(resources: Resources) -> str:
    """Return ``8 GPU, 16 CPU``."""
    first = sorted(resources, key=lambda name: (name == "CPU", name))
    return ", ".join(f"{resources[name]:g} {name}" for name in first)


def describe_bundles(bundles: Sequence[Resources], domain: str = "") -> str:
    """Return ``2 nodes with 8 GPU, 8 CPU each``."""
    each = " each" if len(bundles) > 1 else ""
    same = f" and the same {domain}" if domain else ""
    return f"{count(len(bundles), 'node')} with {format_resources(bundles[0])}{each}{same}"


def describe_lack(
    asked: str, nodes: Sequence[tuple[str, Resources, Resources]], names: Iterable[str]
) -> str:
    """Return why nodes cannot be had.

    Args:
        asked: What was asked for.
        nodes: (name, all resources, those that are free) of each node of the cluster.
        names: The resources that matter.
    """
    has = f"{count(len(nodes), 'node')}:" if nodes else "no node"
    lines = [f"the Ray cluster cannot provide {asked}; it has {has}"]
    names = list(names)
    for node, total, free in nodes[:_MOST_SHOWN]:
        has = format_resources({name: total.get(name, 0.0) for name in names})
        left = format_resources({name: free.get(name, 0.0) for name in names})
        lines.append(f"       {node}: {has}; free: {left}")
    if len(nodes) > _MOST_SHOWN:
        lines.append(f"       and {len(nodes) - _MOST_SHOWN} more")
    return "\n".join(lines)
