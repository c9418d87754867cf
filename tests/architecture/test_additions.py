"""A scheduler, an exit code or a message takes one addition, which shows everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from msgspec import Struct

from meshrun import app
from meshrun.cluster import Surroundings, detect, platforms
from meshrun.errors import MeshrunError, SpecError, UsageError
from meshrun.protocol.events import AllJoined
from meshrun.protocol.generation import Trouble
from meshrun.protocol.packing import Line
from meshrun.rendezvous import messages
from meshrun.rendezvous.running_generation import RunningGeneration
from tests import schedulers
from tests.kit import ROOT
from tests.parties import Parties, info
from tests.plans import request_of
from tests.schedulers import FILES

REAL = [env for name, env in vars(schedulers).items() if name.isupper() and isinstance(env, dict)]
HOSTNAMES = ("here", "mnist-worker-1", "job-worker-1")
"""Those of pods are in their variables."""


def test_the_examples_of_additions_apply() -> None:
    """The context and removed lines of the page's diffs are in the files that they name."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    looked_up = 0
    for block in re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        text = ""
        for line in block.splitlines():
            if line.startswith(" # "):
                text = (ROOT / line[3:].partition(",")[0]).read_text()
            elif not line.startswith("+"):
                assert f"\n{line[1:]}\n" in text, line
                looked_up += 1
    assert looked_up


def missing_systems(*environments: dict[str, str]) -> set[str]:
    """Return the systems that start processes in these environments but not in the reference."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    table = page.partition("## How nodes are detected")[2]
    listed = re.findall(r"^\| ([^|]+)", table, re.MULTILINE)
    found = set()
    for env, hostname, detector in product(environments, HOSTNAMES, detect.DETECTORS):
        with suppress(UsageError):
            facts = detector(Surroundings(env, hostname=hostname, read=FILES.__getitem__))
            found |= {facts.system} if facts else set()
    assert found
    return {system for system in found if not any(system in row for row in listed)}


def test_a_scheduler_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan covers its nodes and names it as their source; a gap in the reference is noticed."""
    assert missing_systems(*REAL) == set()

    page = (ROOT / "docs" / "contributing.md").read_text()
    added = page.partition(" # meshrun/cluster/platforms.py\n")[2].partition("\n #")[0]
    names = dict(vars(platforms))
    exec(added.replace("\n+", "\n")[1:], names)
    monkeypatch.setattr(detect, "DETECTORS", (names["detect_nomad"], *detect.DETECTORS))
    monkeypatch.setenv("NOMAD_HOSTS", "a1 a2 a3")
    monkeypatch.setenv("NOMAD_ALLOC_INDEX", "1")
    assert missing_systems({"NOMAD_HOSTS": "a1"}) == {"Nomad"}
    asked = request_of(nproc_per_node=(1,))
    request, cluster = app.ask_cluster(asked)
    plan = app.plan(request, check_host=False, cluster=cluster)

    assert (plan.layout.nnodes, plan.node_rank) == (3, 1)
    assert plan.rendezvous is not None
    assert plan.rendezvous.host == "a1"
    assert {system for _, _, system in plan.request.sources} == {"Nomad"}


def errors(kind: type[MeshrunError] = MeshrunError) -> Iterator[type[MeshrunError]]:
    """Yield every error class."""
    yield kind
    for each in kind.__subclasses__():
        yield from errors(each)


def missing_codes() -> set[int]:
    """Return the exit codes of errors that are missing from the reference."""
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    return {each.exit_code for each in errors() if f"\n| {each.exit_code} |" not in page}


def test_an_exit_code_is_one_row() -> None:
    """Every error's exit code is in the reference and reaches other nodes; a gap is noticed."""
    assert missing_codes() == set()
    own = {each for each in errors() if each.__module__ == MeshrunError.__module__} - {SpecError}
    assert {type(Trouble.of(each("it failed")).as_error()) for each in own} == own

    class QuotaError(MeshrunError):
        exit_code = 250

    assert missing_codes() == {250}
    del QuotaError


def test_a_message_is_one_class(monkeypatch: pytest.MonkeyPatch, parties: Parties) -> None:
    """It reaches its reader; decoding checks its fields and escapes their text."""

    class Drain(Struct, frozen=True, kw_only=True):
        generation: messages.Generation
        why: Line

    monkeypatch.setattr(messages, "Message", messages.Message | Drain)
    Drain.__module__ = __name__
    received: list[object] = []
    monkeypatch.setattr(
        RunningGeneration, "receive", lambda *arguments: received.append(arguments[-1])
    )
    coordinator, participant = parties.coordinator(2), parties.participant(info("node1"))
    parties.until(lambda: coordinator.received(AllJoined) and participant.received(AllJoined))
    drain: Any = Drain(generation=0, why="maintenance\x1b[2J")
    participant.send(drain)
    parties.until(lambda: Drain(generation=0, why=r"maintenance\x1b[2J") in received)

    text = messages.encode(drain)
    with pytest.raises(messages.MessageError):
        messages.decode(text.replace(b"why", b"who"))
