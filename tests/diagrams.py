"""The diagrams of lifecycle.md: which phases may follow each phase."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from meshrun.lifecycle.phases import Link, NodesPhase, Phase, Stop
from meshrun.rendezvous.participant import Participation
from tests.kit import ROOT

PAGE = (ROOT / "docs" / "explanation" / "lifecycle.md").read_text()
DIAGRAMS = dict(
    zip(
        (Phase, Stop, NodesPhase, Link, Participation),
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
