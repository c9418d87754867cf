"""The placement group, the actor on each of its nodes, and what runs there."""

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
from meshrun.actors.way import LOST
from meshrun.host.folder import open_private
from meshrun.protocol.result import signal_name
from meshrun.ssh.remote_command import ADDRESS, boot_command
from meshrun.wording import duration
from meshrun.worker.function import FOLDER_VARIABLE, call_file, path_file

_DOMAIN = "ray.io/gpu-domain"
"""The label that nodes share if NVLink connects them."""
_NODE_ID = "ray.io/node-id"
_ROOM_S = 1
"""How long a node that was lost, or not there at first, may take to be found when it is tried."""
_ASKED, _ASKED_AFTER_S = 8, 0.25
"""How often, and after how long, it is asked whether a node still lives that did not answer."""
_IN_USE_S = 60.0
"""How long resources may be in use by others."""
_CHUNK = 256 * 1024
_RESULT = ".pkl"
_HINT = "see `ray status` for what is in use, or wait for nodes with --submit-arg timeout=10m"

Show = Callable[[int, bytes], Awaitable[None]]
"""Takes a piece of a stream: 1 stdout, 2 stderr."""


class Refused(Exception):
    """Ray cannot do what is asked for."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class NodeGroup:
    """One actor for each node of a launch.

    Args:
        ray: The module, connected.
        asked: What each node needs.
        call: The folder with a call for the ranks to make, which takes their answers.
    """

    def __init__(self, ray: Any, asked: PlacementRequest, *, call: str | None) -> None:
        from ray import cloudpickle

        self._ray, self._asked, self._call = ray, asked, call
        cloudpickle.register_pickle_by_value(node_actor)
        self._actor = ray.remote(concurrency_groups={"out": 1})(node_actor.NodeActor)
        self._bundles = asked.bundles(node["Resources"] for node in self._nodes())
        self._groups: dict[int, tuple[Any, int]] = {}
        """The placement group of each node of the launch, and its bundle there."""
        self._places: dict[int, str] = {}
        """The id of the node in the cluster that each is, or was last."""
        self._ready: dict[int, Any] = {}
        """Actors that nothing has run in."""
        self._used: dict[int, Any] = {}
        self._made: list[Any] = []
        """All placement groups."""

    @property
    def description(self) -> str:
        """What is asked for, for people."""
        return describe_bundles(self._bundles[-self._asked.least :], self._asked.domain)

    # ---- placing ----------------------------------------------------------------------------

    async def place(self) -> list[tuple[str, int]]:
        """Have an actor on each node; return (name, workers) of each.

        Raises:
            Refused: If there are too few resources.
        """
        group = self._make_group(self._bundles[: self._count_at_first()])
        limit_s = _IN_USE_S if self._asked.timeout_s is None else self._asked.timeout_s
        if not await _within(group.ready(), limit_s):
            raise self._lack(f" within {duration(limit_s)}")
        actors = [self._make_actor(group, bundle) for bundle in range(group.bundle_count)]
        try:
            found = await asyncio.gather(*(actor.find_node.remote() for actor in actors))
        except self._ray.exceptions.RayError as error:
            raise Refused(f"Ray cannot start an actor: {first_line(error)}") from error
        nodes = [self._node(node_id) for node_id in found]
        order = list(range(len(nodes)))
        if len(set(self._asked.workers)) == 1:  # any node may be any
            order.sort(key=lambda number: _place_of(nodes[number]))
        for number, bundle in enumerate(order):
            self._groups[number], self._ready[number] = (group, bundle), actors[bundle]
            self._places[number] = found[bundle]
        later = [f"ray-{number}" for number in range(len(nodes), len(self._bundles))]
        names = _names([nodes[bundle] for bundle in order]) + later
        return list(zip(names, self._asked.workers, strict=True))

    def _count_at_first(self) -> int:
        """Return on how many nodes to start.

        Raises:
            Refused: If the cluster is too small.
        """
        total = {node["NodeID"]: node["Resources"] for node in self._nodes()}
        if self._asked.timeout_s is None and self._count(total) < self._asked.least:
            raise self._lack("")
        return max(self._count(self._free()), self._asked.least)

    def _count(self, having: Mapping[str, Resources]) -> int:
        """Return for how many nodes of the launch there are these resources, in one domain."""
        domains: dict[str, list[Resources]] = {}
        for node in self._nodes():
            label = self._label(node) if self._asked.domain else "any"
            domains.setdefault(label, []).append(having.get(node["NodeID"], {}))
        domains.pop("", None)
        strategy = self._asked.strategy
        return max(
            (count_placeable(self._bundles, d, strategy) for d in domains.values()), default=0
        )

    def _label(self, node: Mapping[str, Any]) -> str:
        """Return the domain of a node that has to be that of all; "" if it has none."""
        return str(node.get("Labels", {}).get(self._asked.domain, ""))

    def _make_group(self, bundles: Sequence[Resources], *, apart: bool = False) -> Any:
        """Return a new placement group.

        Args:
            bundles: What each of its nodes needs.
            apart: Whether these may not be nodes of the launch.

        Raises:
            Refused: If this Ray cannot make one as it was asked for.
        """
        from ray.util import placement_group

        asked, how = self._asked, dict[str, Any](strategy=self._asked.strategy)
        selector: dict[str, str] = {}
        if apart and asked.strategy == "STRICT_SPREAD":
            selector[_NODE_ID] = f"!in({','.join(sorted(self._places.values()))})"
        if apart and asked.domain:
            selector[asked.domain] = self._label(self._node(next(iter(self._places.values()))))
        elif asked.domain:
            how = {"topology_strategy": {_NODE_ID: asked.strategy, asked.domain: "STRICT_PACK"}}
        if selector:
            how["bundle_label_selector"] = [selector for _ in bundles]
        try:
            self._made.append(made := placement_group([dict(each) for each in bundles], **how))
        except TypeError:  # an argument that it does not know
            raise Refused(
                f"Ray {self._ray.__version__} cannot place nodes by their labels",
                "update Ray, or remove --submit-arg domain or the range of --nnodes",
            ) from None
        return made

    def _make_actor(self, group: Any, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        more = dict(group.bundle_specs[bundle])
        known = {
            option: more.pop(name)
            for name, option in (("CPU", "num_cpus"), ("GPU", "num_gpus"), ("memory", "memory"))
            if name in more
        }
        place = PlacementGroupSchedulingStrategy(group, bundle)
        return self._actor.options(**known, resources=more, scheduling_strategy=place).remote()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _node(self, node_id: str) -> dict[str, Any]:
        return next((node for node in self._ray.nodes() if node["NodeID"] == node_id), {})

    def _free(self) -> dict[str, Resources]:
        return dict(self._ray._private.state.available_resources_per_node())

    def _lack(self, waited: str) -> Refused:
        nodes, free = self._nodes(), self._free()
        found = [
            (name, node["Resources"], free.get(node["NodeID"], {}))
            for name, node in zip(_names(nodes), nodes, strict=True)
        ]
        if self._asked.domain:
            labels = [self._label(node) or "no label" for node in nodes]
            found = [
                (f"{n} ({label})", *has) for label, (n, *has) in zip(labels, found, strict=True)
            ]
        asked = self.description + waited
        return Refused(describe_lack(asked, found, self._bundles[0]), _HINT)

    # ---- running ----------------------------------------------------------------------------

    async def run(
        self,
        number: int,
        orders: asyncio.StreamReader,
        show: Show,
        end: Callable[[int], None],
    ) -> None:
        """Run an agent on a node until it ends, in a new actor if the former is of no use.

        Args:
            number: The place of the node in the launch.
            orders: What the agent is to read.
            show: Takes what it writes.
            end: Takes its exit code.
        """
        if (before := self._used.pop(number, None)) is not None:
            self._ray.kill(before)
        if number not in self._groups:
            self._groups[number] = self._make_group([self._bundles[number]], apart=True), 0
        group, bundle = self._groups[number]
        # Not `ready()`, which is a task in older versions, and takes a worker's start.
        if not await asyncio.to_thread(group.wait, _ROOM_S):
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
        self._places[number] = await actor.find_node.remote()
        node = self._node(self._places[number])
        context = self._ray.get_runtime_context()
        await actor.start.remote(
            boot_command("")[1:],
            {"RAY_ADDRESS": context.gcs_address, ADDRESS: node.get("NodeManagerAddress", "")},
            cpus=int(self._bundles[number]["CPU"]),
            workers=self._asked.workers[number],
            files=None if self._call is None else (FOLDER_VARIABLE, _call_in(self._call)),
        )

    async def _why_lost(self, number: int, error: Exception) -> str:
        """Return why an actor is of no use, which Ray may find out a moment later."""
        if not isinstance(error, getattr(self._ray.exceptions, "ActorUnavailableError", ())):
            return first_line(error)
        for _ in range(_ASKED):
            if not self._node(self._places.get(number, "")).get("Alive"):
                return "its node died"
            await asyncio.sleep(_ASKED_AFTER_S)
        return "its node does not answer"

    async def _collect(self, actor: Any) -> None:
        """Fetch what ranks returned or raised."""
        if self._call is not None:
            for name in await actor.list_files.remote():
                if name.endswith(_RESULT) and name != os.path.basename(call_file("")):
                    _keep(os.path.join(self._call, name), await actor.read_file.remote(name))
        await actor.close.remote()

    def remove(self) -> None:
        """Give all resources back, whatever runs."""
        for group in self._made:
            self._ray.util.remove_placement_group(group)


async def _feed(actor: Any, orders: asyncio.StreamReader) -> None:
    """Pass on what an agent is to read, and that nothing follows."""
    while data := await orders.read(_CHUNK):
        await actor.write.remote(data)
    await actor.write.remote(b"")


def _call_in(folder: str) -> dict[str, bytes]:
    """Return the files of a call."""
    contents = {}
    for path in (call_file(folder), path_file(folder)):
        with open(path, "rb", opener=open_private) as file:
            contents[os.path.basename(path)] = file.read()
    return contents


def _keep(path: str, content: bytes) -> None:
    """Write a rank's answer, unless there is one of a later generation, from another node."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=open_private) as file:
        if pickle.load(file)[0] > pickle.loads(content)[0]:  # noqa: S301 - our ranks wrote them
            return
    with open(f"{path}.part", "wb", opener=open_private) as part:
        part.write(content)
    os.replace(part.name, path)


async def _within(work: Awaitable[object], limit_s: float) -> bool:
    """Whether something is done within so many seconds."""
    done, _ = await asyncio.wait([asyncio.ensure_future(work)], timeout=limit_s)
    return bool(done)


def _place_of(node: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what nodes are sorted by: those of one domain follow each other."""
    labels = node.get("Labels", {})
    return labels.get(_DOMAIN, ""), node.get("NodeManagerAddress", ""), node.get("NodeID", "")


def _names(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each; a machine may have several nodes, and a node several bundles."""
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
    """Return what an error says of its cause, without Ray's names of things and its advice."""
    lines = [line for line in str(error).splitlines() if line.strip() and line[0] != "\t"]
    if len(lines) > 1 and lines[0].startswith("The actor died unexpectedly"):
        del lines[0]
    return lines[0].strip().partition(". ")[0].rstrip(".") if lines else type(error).__name__
