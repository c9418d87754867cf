"""The scheduler that was detected, and what a launch here would start, as text or JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from meshrun import __version__
from meshrun.cluster import ClusterFacts
from meshrun.cluster.here import is_rank
from meshrun.errors import MeshrunError
from meshrun.host.printable import MASK, Mask, is_secret, one_line
from meshrun.plan.plan import LaunchPlan
from meshrun.plan.request import LaunchRequest
from meshrun.wording import count, listed

_NO_FACTS: dict[str, Any] = {
    "system": None, "evidence": None, "notes": (), "variables": {}, "job_id": None,
    "allocation": None,
}  # fmt: skip


class Detected(Struct, frozen=True, kw_only=True):
    """The facts that could be determined."""

    facts: ClusterFacts | None
    request: LaunchRequest
    """Completed with the facts, unless they contradict it."""
    plan: LaunchPlan | None = None
    """What would be started here; ``None`` after an error."""
    error: MeshrunError | None = None
    has_secret: bool = False


def render_detected_json(found: Detected) -> str:
    """Return the facts as one JSON object."""
    return json.dumps(_document(found), indent=2)


def render_detected(found: Detected) -> str:
    """Return the facts as lines of a name and a value."""
    rows = list(_rows(_document(found)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {one_line(text)}".rstrip() for name, text in rows)


def _document(found: Detected) -> dict[str, Any]:
    """Return the JSON as plain values."""
    facts, error, mask = found.facts, found.error, Mask(os.environ)
    return {
        "meshrun": __version__,
        "python": platform.python_version(),
        "host": os.uname().nodename,
        "in_rank": is_rank(),
        **(_NO_FACTS if facts is None else _facts(facts, mask)),
        "launch": _launch(found, found.plan) if found.plan else None,
        "error": mask.text(error.message) if error else None,
        "hint": mask.text(error.hint) if error and error.hint else None,
    }


def _facts(facts: ClusterFacts, mask: Mask) -> dict[str, Any]:
    return {
        "system": facts.system,
        "evidence": facts.evidence,
        "notes": facts.notes,
        "variables": {
            name: MASK if is_secret(name) or value == facts.secret else mask.text(value)
            for name, value in facts.variables
        },
        "job_id": facts.job_id,
        "allocation": {
            "nodes": facts.nnodes,
            "hosts": facts.hosts,
            "node_rank": facts.node_rank,
            "processes_on_node": facts.task.local_world_size if facts.task else 1,
            "process_on_node": facts.task.local_rank if facts.task else 0,
        },
    }


def _launch(found: Detected, plan: LaunchPlan) -> dict[str, Any]:
    request, config = found.request, plan.rendezvous
    step, remote = request.rendezvous.step_of, request.remote
    starter = "srun" if step else remote.access.starter or "ssh" if remote else None
    meeting: dict[str, Any] | None = None
    if config and starter is None:
        meeting = {
            "backend": config.backend,
            "host": config.host,
            "port": config.port,
            "also": [each for each in config.coordinator if each != config.host],
            "run_id": config.run_id,
            "secret": found.has_secret,
        }
    return {
        "nodes": plan.layout.nnodes,
        "least_nodes": request.rendezvous.least_nodes or plan.layout.nnodes,
        "node_rank": None if starter or (config and config.node_rank is None) else plan.node_rank,
        "workers": plan.layout.nproc_per_node,
        "device": plan.device_type,
        "starter": starter,
        "notes": [
            *plan.request.notes,
            *(note for note in plan.request.rendezvous.notes if not _repeats(note, found.facts)),
        ],
        "hosts": request.hosts,
        "meeting": meeting,
    }


def _repeats(note: str, facts: ClusterFacts | None) -> bool:
    """Whether a note only repeats the detected facts."""
    return facts is not None and note.startswith(f"{facts.system}, {facts.evidence}: node ")


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "this host", f"{found['host']}, meshrun {found['meshrun']}, Python {found['python']}"
    if found["in_rank"]:
        yield "system", "not detected: this process is a rank of another launch"
    elif found["system"] is None:
        yield "system", "none detected" if found["error"] is None else "unknown"
    else:
        yield "system", f"{found['system']}: {found['evidence']}"
    for note in found["notes"]:
        yield "note", note
    for name, value in found["variables"].items():
        yield "variable", f"{name}={value}"
    if found["allocation"] is not None:
        yield "allocation", _describe_allocation(found["allocation"])
    if found["launch"] is not None:
        yield from _launch_rows(found["launch"])
    if found["error"] is not None:
        yield "error", found["error"]
        if found["hint"]:
            yield "hint", found["hint"]
        yield "starts", "nothing"


def _describe_allocation(found: dict[str, Any]) -> str:
    nodes, here = found["nodes"], found["processes_on_node"]
    parts = ["nodes: unknown" if nodes is None else count(nodes, "node")]
    if found["hosts"]:
        parts[0] += f" ({_names(found['hosts'])})"
    if found["node_rank"] is not None:
        parts.append(f"this is node {found['node_rank']}")
    if here > 1:
        parts.append(f"process {found['process_on_node']} of {here} on this node")
    return ", ".join(parts)


def _launch_rows(launch: dict[str, Any]) -> Iterator[tuple[str, str]]:
    nodes, workers, own = launch["nodes"], launch["workers"], launch["node_rank"]
    starter, meeting = launch["starter"], launch["meeting"]
    which = f", this is node {own}" if own is not None and nodes > 1 else ""
    least = f"{launch['least_nodes']} to " if launch["least_nodes"] != nodes else ""
    yield "nodes", f"{least}{nodes}{which}"
    is_uniform = len({*workers}) == 1
    on_each = count(workers[0], "worker") if is_uniform else f"{_names(workers)} workers"
    device = launch["device"] or "the device that the program chooses"
    yield "workers", f"{on_each} on each node, on {device}" if nodes > 1 else f"{on_each}, {device}"
    for note in launch["notes"]:
        yield "note", note
    if meeting is not None:
        also = f" (also {_names(meeting['also'])})" if meeting["also"] else ""
        where = f"{meeting['host'] or 'an address of node 0'}:{meeting['port'] or 'a free port'}"
        secret = "with a secret" if meeting["secret"] else "without a secret"
        yield "rendezvous", f"{where}{also}, id {meeting['run_id'] or 'random'}, {secret}"
    elif starter is None:
        yield "rendezvous", "none: one node"
    if starter is None:
        yield "starts", f"a launcher with {count(workers[own or 0], 'worker')} on this host"
    else:
        hosts = launch["hosts"]
        where = f"each of {_names(hosts)}" if hosts else f"each of {nodes} nodes"
        yield "starts", f"a launcher on {where}, with {starter}"


def _names(names: Sequence[object]) -> str:
    return listed(names, most=16, rest=f", ... ({len(names)} in all)")
