"""The phases of a launch, and the transitions between them. Pure.

A launch does not read these tables. The diagrams in docs/explanation/lifecycle.md are drawn from
them, and a test plays random histories and checks each transition against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Phase(Enum):
    """Where this node is with one generation of ranks."""

    IMPORTING = "importing"
    """The zygote imports torch; nodes may be joining."""
    WAITING = "waiting"
    """The zygote is ready, and waits for other nodes or for the end of a back-off."""
    RUNNING = "running"
    """The zygote was ordered to start the ranks."""
    CLEARING = "clearing"
    """No rank is left: the zygote ends what they left behind, or the coordinator decides."""
    ENDING = "ending"
    """The zygote was ordered to exit."""
    OVER = "over"
    """Nothing is left to wait for."""


class Stop(Enum):
    """Whether the ranks of a generation are being stopped, and how."""

    NONE = "none"
    ASKED = "asked"
    """By a signal that they may catch, or before they started."""
    KILLED = "killed"
    """By SIGKILL."""


class Gate(Enum):
    """Whether finished ranks may exit, and so close connections that their peers may need."""

    SHUT = "shut"
    ASKED = "asked"
    """The ranks of this node have finished, and wait for those of other nodes."""
    OPEN = "open"


class NodesPhase(Enum):
    """Where the nodes of a launch are with one generation, as far as this node knows."""

    MEETING = "meeting"
    RUNNING = "running"
    CLEARED = "cleared"
    """This node has reported that nothing of this generation is left on it."""
    REGROUPING = "regrouping"
    """The coordinator will start the ranks again once there are enough nodes."""
    OVER = "over"
    """The coordinator has ended the launch."""


class Link(Enum):
    """The state of this node's link to the coordinator."""

    UP = "up"
    RETURNING = "returning"
    """The connection was lost, and this node of an elastic launch tries to reconnect."""
    CUT_OFF = "cut off"
    """The coordinator is lost for good, or this node leaves the launch."""


PHASES: Mapping[Phase, Mapping[Phase, str]] = {
    Phase.IMPORTING: {
        Phase.WAITING: "the zygote is ready",
        Phase.RUNNING: "the zygote is ready, and all nodes have joined",
        Phase.CLEARING: "another node failed",
        Phase.ENDING: "a signal, or the rendezvous failed",
        Phase.OVER: "the zygote died",
    },
    Phase.WAITING: {
        Phase.RUNNING: "all nodes have joined, and the back-off has passed",
        Phase.IMPORTING: "the zygote died, and is replaced",
        Phase.CLEARING: "another node failed",
        Phase.ENDING: "a signal, or the rendezvous failed",
        Phase.OVER: "the zygote died",
    },
    Phase.RUNNING: {
        Phase.CLEARING: "the last rank ended, and another generation may follow",
        Phase.ENDING: "the last rank ended, and none follows",
        Phase.IMPORTING: "the zygote died, and is replaced",
        Phase.OVER: "the zygote died",
    },
    Phase.CLEARING: {
        Phase.RUNNING: "the next generation starts",
        Phase.WAITING: "the next generation starts after a back-off",
        Phase.IMPORTING: "the next generation needs another zygote",
        Phase.ENDING: "the launch ended",
        Phase.OVER: "the zygote died, and the coordinator has decided",
    },
    Phase.ENDING: {Phase.OVER: "the zygote ended"},
    Phase.OVER: {},
}
"""The transitions of a node, with their reasons."""

STOPS: Mapping[Stop, Mapping[Stop, str]] = {
    Stop.NONE: {Stop.ASKED: "a failure, a signal, or the end of another node's ranks"},
    Stop.ASKED: {
        Stop.KILLED: "the shutdown timeout expired, or a third signal came",
        Stop.NONE: "the next generation starts",
    },
    Stop.KILLED: {Stop.NONE: "the next generation starts"},
}
"""The transitions of the ranks of a generation."""

NODES_PHASES: Mapping[NodesPhase, Mapping[NodesPhase, str]] = {
    NodesPhase.MEETING: {
        NodesPhase.RUNNING: "all nodes have joined",
        NodesPhase.OVER: "the launch ended without this node",
    },
    NodesPhase.RUNNING: {
        NodesPhase.CLEARED: "all processes on this node ended",
        NodesPhase.REGROUPING: "all processes on all nodes ended, and ranks start again",
        NodesPhase.OVER: "the coordinator ended the launch",
    },
    NodesPhase.CLEARED: {
        NodesPhase.RUNNING: "the next generation starts",
        NodesPhase.REGROUPING: "all processes on all nodes ended, and ranks start again",
        NodesPhase.OVER: "the coordinator ended the launch",
    },
    NodesPhase.REGROUPING: {
        NodesPhase.RUNNING: "the next generation starts",
        NodesPhase.CLEARED: "this node cannot start ranks any more",
        NodesPhase.OVER: "the coordinator ended the launch",
    },
    NodesPhase.OVER: {},
}
"""The transitions of the nodes, as one node knows them."""

LINKS: Mapping[Link, Mapping[Link, str]] = {
    Link.UP: {
        Link.RETURNING: "the connection was lost, in an elastic launch",
        Link.CUT_OFF: "the coordinator was lost, or this node leaves",
    },
    Link.RETURNING: {Link.UP: "it was accepted again", Link.CUT_OFF: "it was not accepted in time"},
    Link.CUT_OFF: {},
}
"""The transitions of the link to the coordinator."""


def diagram(table: Mapping[Any, Mapping[Any, str]]) -> str:
    """Return a table as a Mermaid state diagram."""
    names = {each: each.name.lower() for each in table}
    lines = ["stateDiagram-v2", f"    [*] --> {names[next(iter(table))]}"]
    for each, follows in table.items():
        lines += [f"    {names[each]} --> {names[to]}: {why}" for to, why in follows.items()]
        lines += [] if follows else [f"    {names[each]} --> [*]"]
    return "\n".join(lines)
