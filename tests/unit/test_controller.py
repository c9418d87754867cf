"""Launches on hosts whose agents are played: what happens to a host, and how the launch ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.ssh.controller import Controller
from meshrun.ssh.host_phases import ControllerPhase, HostPhase
from meshrun.ssh.host_session import HostSession
from tests.diagrams import check_phases, unseen
from tests.kit import SILENT, killed_launcher, lost_host
from tests.played_hosts import OF_A_HOST, OF_NO_HOST, Event, play

TURN: Event = (None, "a turn")
ALL_ANSWER: list[Event] = [*((host, "answers") for host in range(3)), TURN, TURN]
"""The beginning of a launch on three hosts, whose launchers have started then."""
ANY = st.one_of(
    st.tuples(st.integers(0, 2), st.sampled_from(OF_A_HOST)),
    st.tuples(st.none(), st.sampled_from(OF_NO_HOST)),
)
KILLED = killed_launcher()
GONE = "ssh failed without a message; the process it started may have been killed"
HISTORIES: list[tuple[str, list[Event], str, str]] = [
    ("3", [(1, "cannot serve")], "RendezvousError: host host1: no", ""),
    ("3", [*ALL_ANSWER], "code 0", ""),
    ("3", [*ALL_ANSWER, (1, "is killed")], f"HostLost: {lost_host('host1')}{KILLED}",
     f"{lost_host('host1')}{KILLED}"),
    ("3", [*ALL_ANSWER, (0, "is stopped early")],
     f"HostLost: {lost_host('host0')}{killed_launcher('SIGTERM')}",
     f"{lost_host('host0')}{killed_launcher('SIGTERM')}"),
    ("3", [*ALL_ANSWER, (1, "cannot launch")], "HostError: host host1: no room", ""),
    ("3", [*ALL_ANSWER, (1, "freezes"), (None, "4 s")],
     f"HostLost: {lost_host('host1')}{SILENT} 4 s",
     f"{lost_host('host1')}{SILENT} 4 s"),
    ("3", [*ALL_ANSWER, (0, "finishes"), (1, "vanishes")],
     f"HostLost: {lost_host('host1')}{GONE}", f"{lost_host('host1')}{GONE}"),
    ("3", [*ALL_ANSWER, (None, "SIGTERM")], "stopped by 15", ""),
    ("3", [*ALL_ANSWER, (None, "SIGQUIT")], "code 0", ""),
    ("1:3", [*ALL_ANSWER, (1, "is killed")], "code 0", f"continuing without host host1: {KILLED}"),
    ("1:3", [*ALL_ANSWER, (1, "cannot launch"), TURN, (None, "20 s")], "code 0",
     "continuing without host host1: no room"),
    ("1:3", [*ALL_ANSWER, (1, "is unfit")], "code 0", "continuing without host host1: bad"),
    ("1:3", [*ALL_ANSWER, (0, "finishes"), (1, "vanishes")], "code 0",
     f"{lost_host('host1')}{GONE}"),
    ("1:3", [*ALL_ANSWER, (0, "finishes"), (1, "is stopped early")], "code 0", ""),
    ("1:3", [*ALL_ANSWER, (0, "cannot launch")], "HostError: host host0: no room", ""),
    ("1:3", [*ALL_ANSWER, (None, "SIGQUIT"), (0, "is killed"), TURN, *ALL_ANSWER], "code 0",
     f"{lost_host('host0')}{KILLED}"),
    ("1:3", [*ALL_ANSWER, (0, "is unfit"), (1, "is stopped"), (2, "is stopped"), TURN,
             (1, "cannot serve"), (2, "cannot serve")],
     "RendezvousError: cannot use 3 of 3 hosts, but 1 is required\n       host0: bad\n"
     "       host1: no\n       host2: no", f"{lost_host('host0')}bad"),
]  # fmt: skip
"""Launches on three hosts: ``--nnodes``, events, the end, and the output."""


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare each change of a phase with its diagram."""
    check_phases(monkeypatch, Controller, HostSession)


@pytest.mark.parametrize(("nnodes", "events", "outcome", "said"), HISTORIES)
def test_how_a_launch_ends(nnodes: str, events: list[Event], outcome: str, said: str) -> None:
    """A host that is not needed is only reported."""
    played = play(events, nnodes=nnodes)

    assert (played.outcome, played.text) == (outcome, said and f"meshrun: {said}\n")


@given(st.sampled_from(["3", "1:3", "2:3"]), st.booleans(), st.lists(ANY, max_size=20))
def test_every_launch_ends(nnodes: str, has_begun: bool, events: list[Event]) -> None:
    """Whatever happens; each connection ends, and phases follow each other as in the diagrams."""
    play([*ALL_ANSWER, *events] if has_begun else events, nnodes=nnodes)


def test_each_transition_occurs() -> None:
    """Every arrow of the diagrams is one of a launch."""
    for nnodes, events, _, _ in HISTORIES:
        play(events, nnodes=nnodes)

    assert unseen(ControllerPhase) == unseen(HostPhase) == []
