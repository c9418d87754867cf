"""What a launch requests from a Ray cluster: a bundle of resources for each node. Pure.

The process that is connected to Ray receives the request as one of the messages here, in lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from meshrun.errors import UsageError
from meshrun.plan.parse import parse_choice, parse_seconds, split_words
from meshrun.wording import count

Resources = Mapping[str, float]
_STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
_ACCELERATORS = {"cuda": "GPU", "xpu": "GPU", "hpu": "HPU", "npu": "NPU", "cpu": ""}
"""Ray's resource for each of torch's device types; ``""`` for none."""
_MOST_SHOWN = 8


class PlacementRequest(Struct, frozen=True, kw_only=True):
    """The placement group of a launch."""

    workers: tuple[int, ...]
    """The number of ranks on each node."""
    min_nodes: int
    """The number of nodes that suffices."""
    accelerator: str | None
    """The resource of which each rank needs one; ``""`` for none, ``None`` for GPUs if any."""
    resources: tuple[tuple[str, float], ...] = ()
    """The user's resources of each node, which add to the defaults or replace them."""
    strategy: str = "STRICT_SPREAD"
    domain: str = ""
    """The label that all nodes must share, if any, such as ``ray.io/gpu-domain``."""
    timeout_s: float | None = None
    """How long to wait for resources; ``None`` to wait only for those that are in use."""

    def bundles(self, cluster: Iterable[Resources]) -> tuple[dict[str, float], ...]:
        """Return what each node needs, given the resources of the cluster's nodes."""
        kind = self.accelerator
        if kind is None:
            kind = "GPU" if any(node.get("GPU") for node in cluster) else ""
        return tuple(
            {
                "CPU": float(workers),
                **({kind: float(workers)} if kind else {}),
                **dict(self.resources),
            }
            for workers in self.workers
        )


def read_placement(
    extras: Sequence[str], *, workers: tuple[int, ...], min_nodes: int, device: str
) -> PlacementRequest:
    """Return the request for a launch.

    Each of ``extras``, the values of ``--submit-arg``, has one or several ``NAME=VALUE``.

    Raises:
        UsageError: If a value cannot be parsed.
    """
    if device not in ("auto", *_ACCELERATORS):
        raise UsageError(f"--submit ray does not know which resource --device {device} needs")
    accelerator = None if device == "auto" else _ACCELERATORS[device]
    found = PlacementRequest(workers=workers, min_nodes=min_nodes, accelerator=accelerator)
    resources: dict[str, float] = {}
    for word in (word for extra in extras for word in split_words(extra, "--submit-arg")):
        name, equals, value = word.partition("=")
        where = f"--submit-arg {name}"
        if not equals or not value:
            raise UsageError(
                f"--submit-arg expects NAME=VALUE for Ray, found `{word}`",
                hint="for example --submit-arg CPU=16, --submit-arg strategy=PACK",
            )
        if name == "strategy":
            found = replace(found, strategy=parse_choice(value.upper(), where, _STRATEGIES))
        elif name == "domain":
            found = replace(found, domain=value)
        elif name == "timeout":
            found = replace(found, timeout_s=parse_seconds(value, where))
        else:
            resources[name] = _quantity(value, where)
    return replace(found, resources=tuple(resources.items()))


def _quantity(text: str, where: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{where} expects a number of resources, found `{text}`")
    return number


def count_placeable(bundles: Sequence[Resources], nodes: Sequence[Resources], strategy: str) -> int:
    """Return how many bundles, from the first one on, fit on nodes with these resources."""
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


def render_placement(request: PlacementRequest) -> str:
    """Return the request to a cluster as ``--dry-run`` prints it."""
    kind = "GPU if the cluster has any" if request.accelerator is None else request.accelerator
    lines = [f"placement group: {request.strategy}, {count(len(request.workers), 'bundle')}"]
    if request.min_nodes < len(request.workers):
        lines[0] += f", {request.min_nodes} or more of them"
    if request.domain:
        lines.append(f"  on nodes with the same {request.domain}")
    for number, bundle in enumerate(request.bundles(())):
        each = format_resources(bundle)
        gpus = f", {request.workers[number]} {kind}" if request.accelerator is None else ""
        lines.append(f"  node {number}: {each}{gpus}")
    return "\n".join([*lines, ""])


def format_resources(resources: Resources) -> str:
    """Return a text such as ``8 GPU, 16 CPU``."""
    names = sorted(resources, key=lambda name: (name == "CPU", name))
    return ", ".join(f"{resources[name]:g} {name}" for name in names)


def describe_bundles(bundles: Sequence[Resources], domain: str = "") -> str:
    """Return a text such as ``2 nodes with 8 GPU, 8 CPU each``."""
    each = " each" if len(bundles) > 1 else ""
    same = f" and the same {domain}" if domain else ""
    return f"{count(len(bundles), 'node')} with {format_resources(bundles[0])}{each}{same}"


def describe_lack(
    request: str, nodes: Sequence[tuple[str, Resources, Resources]], names: Iterable[str]
) -> str:
    """Return why a cluster cannot provide the nodes.

    Args:
        request: A description of the requested nodes.
        nodes: (name, all resources, free resources) of each node of the cluster.
        names: The resources that matter.
    """
    has = f"{count(len(nodes), 'node')}:" if nodes else "no node"
    lines = [f"the Ray cluster cannot provide {request}; it has {has}"]
    names = list(names)
    for node, total, free in nodes[:_MOST_SHOWN]:
        has = format_resources({name: total.get(name, 0.0) for name in names})
        left = format_resources({name: free.get(name, 0.0) for name in names})
        lines.append(f"       {node}: {has}; free: {left}")
    if len(nodes) > _MOST_SHOWN:
        lines.append(f"       and {len(nodes) - _MOST_SHOWN} more")
    return "\n".join(lines)


class PlaceNodes(Struct, frozen=True):
    """To Ray's process: place the nodes of a launch."""

    request: PlacementRequest
    call: str | None
    """The folder with the call that ranks make, to which their results are written."""
    grace_s: float
    """How long the launch may take to end once the launcher has closed the connection."""


class PlacementWaits(Struct, frozen=True):
    """To the launcher: the cluster has yet to free resources."""

    note: str


class PlacementFailed(Struct, frozen=True):
    """To the launcher: there is no cluster, or it cannot provide the nodes."""

    error: str
    hint: str | None


class NodesPlaced(Struct, frozen=True):
    """To the launcher: what the cluster provides."""

    hosts: list[tuple[str, int]]
    """(name, workers) of each node."""
    address: str
    """The socket for the streams of the nodes."""


Reply = PlacementWaits | PlacementFailed | NodesPlaced
