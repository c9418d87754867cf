"""The placement groups of a launch, the actor on each node, and the agents that they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from meshrun.actors import node_actor
from meshrun.actors.bundles import (
    PlacementRequest,
    Resources,
    count_placeable,
    describe_bundles,
    describe_lack,
    format_resources,
)
from meshrun.actors.relay import LOST
from meshrun.errors import HostError
from meshrun.host.folder import read_private, write_private
from meshrun.host.own_variables import CALL_FOLDER, NODE_ADDRESS
from meshrun.protocol.result import signal_name
from meshrun.ssh.remote_command import boot_command
from meshrun.wording import duration
from meshrun.worker.function import ANSWER, call_file, path_file

_DOMAIN = "ray.io/gpu-domain"
"""The label that nodes share if NVLink connects them."""
_NODE_ID = "ray.io/node-id"
_PLACING_TAKES_S = 1
"""How long an attempt to place a lost or missing node may take."""
_ALIVE_CHECKS, _ALIVE_CHECK_EVERY_S = 8, 0.25
"""How often to check whether a node that did not answer is still alive."""
_IN_USE_S = 60.0
"""How long to wait for resources that are in use by others."""
_CHUNK = 256 * 1024
_HINT = "see `ray status` for what is in use, or wait for nodes with --submit-arg timeout=10m"

Show = Callable[[int, bytes], Awaitable[None]]
"""Prints data of a stream: 1 stdout, 2 stderr."""


class NodeGroup:
    """One actor for each node of a launch.

    Args:
        ray: Ray's module, connected to the cluster.
        request: The resources that each node needs.
        call: The folder with the call that ranks make, to which their results are written.
    """

    def __init__(self, ray: Any, request: PlacementRequest, *, call: str | None) -> None:
        from ray import cloudpickle

        self._ray, self._request, self._call = ray, request, call
        cloudpickle.register_pickle_by_value(node_actor)
        self._actor = ray.remote(concurrency_groups={"out": 1})(node_actor.NodeActor)
        self._bundles = request.bundles(node["Resources"] for node in self._nodes())
        self._groups: dict[int, tuple[Any, int]] = {}
        """The placement group, and the bundle in it, of each node of the launch."""
        self._node_ids: dict[int, str] = {}
        """The cluster's id of each node of the launch, as of its last actor."""
        self._ready: dict[int, Any] = {}
        """Actors that have not run anything."""
        self._used: dict[int, Any] = {}
        self._all_groups: list[Any] = []

    @property
    def description(self) -> str:
        """The requested nodes, for people."""
        return describe_bundles(self._bundles[-self._request.min_nodes :], self._request.domain)

    # ---- placing ----------------------------------------------------------------------------

    async def place(self) -> list[tuple[str, int]]:
        """Start an actor on each node; return (name, workers) of each node.

        Raises:
            HostError: If there are too few resources.
        """
        group = self._make_group(self._bundles[: self._count_at_first()])
        limit_s = _IN_USE_S if self._request.timeout_s is None else self._request.timeout_s
        ready = asyncio.ensure_future(group.ready())
        if not (await asyncio.wait([ready], timeout=limit_s))[0]:
            raise self._lack(f" within {duration(limit_s)}")
        actors = [self._make_actor(group, bundle) for bundle in range(group.bundle_count)]
        try:
            found = await asyncio.gather(*(actor.find_node.remote() for actor in actors))
        except self._ray.exceptions.RayError as error:
            raise HostError(f"Ray cannot start an actor: {first_line(error)}") from error
        nodes = [self._node(node_id) for node_id in found]
        order = list(range(len(nodes)))
        if len(set(self._request.workers)) == 1:  # nodes are interchangeable
            order.sort(key=lambda number: _sort_key(nodes[number]))
        for number, bundle in enumerate(order):
            self._groups[number], self._ready[number] = (group, bundle), actors[bundle]
            self._node_ids[number] = found[bundle]
        later = [f"ray-{number}" for number in range(len(nodes), len(self._bundles))]
        names = _names([nodes[bundle] for bundle in order]) + later
        return list(zip(names, self._request.workers, strict=True))

    def _count_at_first(self) -> int:
        """Return the number of nodes to start with; raise HostError if the cluster is too small."""
        total = {node["NodeID"]: node["Resources"] for node in self._nodes()}
        if self._request.timeout_s is None and self._count(total) < self._request.min_nodes:
            raise self._lack("")
        return max(self._count(self._free()), self._request.min_nodes)

    def _count(self, resources: Mapping[str, Resources]) -> int:
        """Return how many nodes of the launch fit in one domain, given usable resources by id."""
        domains: dict[str, list[Resources]] = {}
        for node in self._nodes():
            label = self._label(node) if self._request.domain else "any"
            domains.setdefault(label, []).append(resources.get(node["NodeID"], {}))
        domains.pop("", None)
        strategy = self._request.strategy
        return max(
            (count_placeable(self._bundles, d, strategy) for d in domains.values()), default=0
        )

    def _label(self, node: Mapping[str, Any]) -> str:
        """Return a node's value of the label that all must share; "" if it has none."""
        return str(node.get("Labels", {}).get(self._request.domain, ""))

    def _make_group(self, bundles: Sequence[Resources], *, on_new_nodes: bool = False) -> Any:
        """Return a new placement group.

        ``on_new_nodes`` excludes the nodes of the launch.

        Raises:
            HostError: If this version of Ray does not support the request.
        """
        from ray.util import placement_group

        request, domain = self._request, self._request.domain
        options: dict[str, Any] = {"strategy": request.strategy}
        selector: dict[str, str] = {}
        if on_new_nodes and request.strategy == "STRICT_SPREAD":
            selector[_NODE_ID] = f"!in({','.join(sorted(self._node_ids.values()))})"
        if on_new_nodes and domain:
            selector[domain] = self._label(self._node(next(iter(self._node_ids.values()))))
        elif domain:
            options = {"topology_strategy": {_NODE_ID: request.strategy, domain: "STRICT_PACK"}}
        if selector:
            options["bundle_label_selector"] = [selector for _ in bundles]
        try:
            group = placement_group([dict(each) for each in bundles], **options)
        except TypeError:  # an unknown argument
            raise HostError(
                f"Ray {self._ray.__version__} cannot place nodes by their labels",
                hint="update Ray, or remove --submit-arg domain or the range of --nnodes",
            ) from None
        self._all_groups.append(group)
        return group

    def _make_actor(self, group: Any, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = dict(group.bundle_specs[bundle])
        known = {
            option: custom.pop(name)
            for name, option in (("CPU", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory"))
            if name in custom
        }
        place = PlacementGroupSchedulingStrategy(group, bundle)
        return self._actor.options(**known, resources=custom, scheduling_strategy=place).remote()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _node(self, node_id: str) -> dict[str, Any]:
        return next((node for node in self._ray.nodes() if node["NodeID"] == node_id), {})

    def _free(self) -> dict[str, Resources]:
        return dict(self._ray._private.state.available_resources_per_node())

    def _lack(self, waited: str) -> HostError:
        nodes, free = sorted(self._nodes(), key=_sort_key), self._free()
        found = [
            (name, node["Resources"], free.get(node["NodeID"], {}))
            for name, node in zip(_names(nodes), nodes, strict=True)
        ]
        if self._request.domain:
            labels = [self._label(node) or "no label" for node in nodes]
            found = [
                (f"{n} ({label})", *has) for label, (n, *has) in zip(labels, found, strict=True)
            ]
        return HostError(
            describe_lack(self.description + waited, found, self._bundles[0]), hint=_HINT
        )

    # ---- running ----------------------------------------------------------------------------

    async def run(
        self,
        number: int,
        orders: asyncio.StreamReader,
        show: Show,
        end: Callable[[int], None],
    ) -> None:
        """Run an agent on a node until it ends, in a new actor if one has run there before.

        ``number`` is the index of the node in the launch, ``orders`` the agent's stdin. Its output
        goes to ``show``, and its exit code to ``end``.
        """
        if (before := self._used.pop(number, None)) is not None:
            self._ray.kill(before)
        if number not in self._groups:
            self._groups[number] = self._make_group([self._bundles[number]], on_new_nodes=True), 0
        group, bundle = self._groups[number]
        # Not `ready()`: in older versions it runs a task, which has to start a worker first.
        if not await asyncio.to_thread(group.wait, _PLACING_TAKES_S):
            needed = format_resources(self._bundles[number])
            await show(2, f"no other node of the cluster has {needed}\n".encode())
            end(LOST)
            return
        actor = self._used[number] = self._ready.pop(number, None) or self._make_actor(
            group, bundle
        )
        feeding = None
        try:
            await self._start(actor, number)
            feeding = asyncio.create_task(_feed(actor, orders))
            read = actor.read.options(concurrency_group="out")
            while not isinstance(found := await read.remote(), int):
                for stream, data in found:
                    await show(stream, data)
            if found < 0:
                await show(2, f"its agent was killed by {signal_name(-found)}\n".encode())
            end(LOST if found < 0 else found)
            await self._collect(actor)
        except self._ray.exceptions.RayError as error:
            await show(2, f"{await self._why_lost(number, error)}\n".encode())
            end(LOST)
        finally:
            if feeding is not None:
                feeding.cancel()
            self._ray.kill(actor)

    async def _start(self, actor: Any, number: int) -> None:
        self._node_ids[number] = await actor.find_node.remote()
        node = self._node(self._node_ids[number])
        context = self._ray.get_runtime_context()
        call = None
        if self._call is not None:
            paths = (call_file(self._call), path_file(self._call))
            call = CALL_FOLDER, {os.path.basename(path): read_private(path) for path in paths}
        await actor.start.remote(
            boot_command("")[1:],
            {"RAY_ADDRESS": context.gcs_address, NODE_ADDRESS: node.get("NodeManagerAddress", "")},
            cpus=int(self._bundles[number]["CPU"]),
            workers=self._request.workers[number],
            files=call,
        )

    async def _why_lost(self, number: int, error: Exception) -> str:
        """Return why an actor failed; Ray may notice a moment later that the node is dead."""
        if not isinstance(error, getattr(self._ray.exceptions, "ActorUnavailableError", ())):
            return first_line(error)
        for _ in range(_ALIVE_CHECKS):
            if not self._node(self._node_ids.get(number, "")).get("Alive"):
                return "its node died"
            await asyncio.sleep(_ALIVE_CHECK_EVERY_S)
        return "its node does not answer"

    async def _collect(self, actor: Any) -> None:
        """Fetch the files with what ranks returned or raised."""
        if self._call is not None:
            for name in await actor.list_files.remote():
                if name.endswith(ANSWER):
                    _keep(os.path.join(self._call, name), await actor.read_file.remote(name))
        await actor.close.remote()

    def remove(self) -> None:
        """Remove the placement groups, and with them the actors."""
        for group in self._all_groups:
            self._ray.util.remove_placement_group(group)


async def _feed(actor: Any, orders: asyncio.StreamReader) -> None:
    """Pass the agent's stdin on, and close it at the end."""
    while data := await orders.read(_CHUNK):
        await actor.write.remote(data)
    await actor.write.remote(b"")


def _keep(path: str, content: bytes) -> None:
    """Write a rank's result, unless another node has brought one of a later generation."""
    with contextlib.suppress(FileNotFoundError):
        there = read_private(path)
        if pickle.loads(there)[0] > pickle.loads(content)[0]:  # noqa: S301 - our ranks wrote them
            return
    write_private(path, content)


def _sort_key(node: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a key that puts the nodes of a domain next to each other."""
    labels = node.get("Labels", {})
    return labels.get(_DOMAIN, ""), node.get("NodeManagerAddress", ""), node.get("NodeID", "")


def _names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return unique names: a machine may have several nodes, and a node several bundles."""
    plain = [str(node.get("NodeManagerHostname", "")) for node in nodes]
    ids = [
        name if plain.count(name) == 1 else f"{name}/{str(node.get('NodeID', ''))[:8]}"
        for name, node in zip(plain, nodes, strict=True)
    ]
    return [
        name if ids.count(name) == 1 else f"{name}/{ids[:at].count(name) + 1}"
        for at, name in enumerate(ids)
    ]


def first_line(error: BaseException) -> str:
    """Return the cause in the text of an error, without Ray's details and advice."""
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] != "\t"]
    if len(lines) > 1 and lines[0].startswith("The actor died unexpectedly"):
        del lines[0]
    return lines[0].strip().partition(". ")[0].rstrip(".") if lines else type(error).__name__
