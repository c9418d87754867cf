"""The diagrams of lifecycle.md: which phases may follow each phase."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import pytest

from meshrun.lifecycle.phases import ExitBarrier, Link, NodesPhase, Phase, Stop
from meshrun.lifecycle.state import State
from meshrun.rendezvous.node_phases import (
    ConnectionPhase,
    CoordinatorPhase,
    EndpointPhase,
    ParticipantPhase,
)
from meshrun.ssh.host_phases import AgentPhase, ControllerPhase, HostPhase
from tests.kit import ROOT

PAGE = (ROOT / "docs" / "explanation" / "lifecycle.md").read_text()
DIAGRAMS = dict(
    zip(
        (
            *(Phase, Stop, ExitBarrier, NodesPhase, Link),
            *(ConnectionPhase, CoordinatorPhase, ParticipantPhase, EndpointPhase),
            *(ControllerPhase, HostPhase, AgentPhase),
        ),
        re.findall(r"```mermaid\nstateDiagram-v2\n(.+?)```", PAGE, re.DOTALL),
        strict=True,
    )
)


def transitions(kind: type[Enum]) -> dict[Any, set[Any]]:
    """Return what may follow each phase, according to its diagram; each arrow has a reason."""
    follows: dict[Any, set[Any]] = {each: set() for each in kind}
    for before, after in re.findall(r"(\w+) --> (\w+): \w", DIAGRAMS[kind]):
        follows[kind[before.upper()]].add(kind[after.upper()])
    return follows


FOLLOWS = {kind: transitions(kind) for kind in DIAGRAMS}

SEEN: set[tuple[Enum, Enum]] = set()
"""The changes of phases that were checked in this test."""


def unseen(kind: type[Enum]) -> list[tuple[Enum, Enum]]:
    """Return the arrows of a diagram that no change of a phase has followed in this test."""
    arrows = ((before, after) for before, follows in FOLLOWS[kind].items() for after in follows)
    return [arrow for arrow in arrows if arrow not in SEEN]


def check_step(before: State, after: State) -> None:
    """Compare the changes of a launch's phases by one event with their diagrams."""
    pairs: list[tuple[Enum, Enum]] = [
        (before.phase, after.phase),
        (before.stop, after.stop),
        (before.exit_barrier, after.exit_barrier),
        (before.nodes.phase, after.nodes.phase),
        (before.nodes.link, after.nodes.link),
    ]
    for old, new in pairs:
        assert new is old or new in FOLLOWS[type(old)][old], (old, new)
        SEEN.add((old, new))


def check_phases(monkeypatch: pytest.MonkeyPatch, *owners: type) -> None:
    """Compare each change of a phase of these classes' objects with its diagram."""
    SEEN.clear()

    def set_checked(self: object, name: str, value: object) -> None:
        before = getattr(self, name, value)
        if isinstance(value, Enum) and value is not before:
            assert value in FOLLOWS[type(value)][before], (before, value)
            SEEN.add((before, value))
        object.__setattr__(self, name, value)

    for owner in owners:
        monkeypatch.setattr(owner, "__setattr__", set_checked)
