"""What nodes report of their ranks arrives unchanged, and in the coordinator's time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import HostError, MeshrunError, RendezvousError, SpecError, UsageError
from meshrun.layout import solve_layout
from meshrun.layout.spec import parse_mesh
from meshrun.lifecycle.outcome import node_outcome
from meshrun.lifecycle.phases import Stop
from meshrun.lifecycle.state import State
from meshrun.protocol.events import NextBegins
from meshrun.protocol.generation import Cause, Evidence, NodeOutcome, RankState, Trouble
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import Resize
from meshrun.rendezvous.messages import Cleared, decode, encode

LAYOUT = solve_layout(parse_mesh("dp=4"), nproc_per_node=4)
NS = st.integers(0, 10**18)
TEXT = st.text(st.characters(categories=("L", "N", "P")), max_size=12)
RAISED = st.builds(
    RankRaised, rank=st.just(0), at_ns=NS, kind=TEXT, message=TEXT, traceback=TEXT,
    shown=st.booleans(),
)  # fmt: skip
RANKS = st.builds(
    RankState,
    pid=st.integers(1, 2**22),
    joined=st.booleans(),
    ready_ns=st.none() | NS,
    raised=st.none() | RAISED,
    finished_ns=st.none() | NS,
    left_ns=st.none() | NS,
    exited=st.builds(
        RankExited, rank=st.just(0), pid=st.just(1), wait_status=st.just(256), at_ns=NS
    ),
    asked_to_end_ns=st.none() | NS,
)
CAUSES = st.builds(
    Cause, rank=st.none() | st.integers(0, 9), description=TEXT, raised=st.none() | RAISED,
    ran_s=st.none() | st.floats(0, 1e6), at_ns=NS, step=st.none() | NS, place=TEXT,
    is_failure=st.booleans(),
    resize=st.none() | st.builds(
        Resize, generation=st.integers(0, 9), left=st.just(("a",)), joined=st.just(()),
        shapes=TEXT, mesh=TEXT, hosts=st.just(("b", "c")),
    ),
)  # fmt: skip


def travelled(outcome: NodeOutcome, ahead_ns: int = 0) -> NodeOutcome:
    """Return an outcome as a coordinator receives it; the clock of the node may be ahead."""
    arrived = decode(encode(Cleared(generation=0, outcome=outcome)), ahead_ns)
    assert isinstance(arrived, Cleared)
    return arrived.outcome


def outcome_of(ranks: dict[int, RankState], **known: Any) -> NodeOutcome:
    state = State(shutdown_timeout_s=30.0, ranks=ranks, **known)
    return travelled(
        node_outcome(
            state, LAYOUT, ["a"], "a",
            evidence={rank: Evidence(last_lines=("x",), why="w") for rank in ranks},
        )
    )  # fmt: skip


@given(st.lists(RANKS, min_size=1, max_size=4))
def test_failed_ranks_arrive_as_they_were(ranks: list[RankState]) -> None:
    """With their times, exceptions and wait statuses."""
    told = outcome_of(dict(enumerate(ranks)))

    assert told.ranks == dict(enumerate(ranks))
    assert not told.is_well


def test_ranks_that_succeeded_are_not_reported() -> None:
    """Except the first to leave, which may have caused others' lost connections."""
    well = RankExited(rank=0, pid=1, wait_status=0, at_ns=9)
    ranks = {rank: RankState(pid=1, finished_ns=9 - rank, exited=well) for rank in range(3)}
    told = outcome_of(ranks, stop=Stop.KILLED)

    assert told.ranks == {2: ranks[2]}
    assert (told.is_well, told.killed, told.signum) == (True, True, 0)


def test_evidence_arrives_for_failed_ranks_alone() -> None:
    died = RankState(pid=1, exited=RankExited(rank=0, pid=1, wait_status=9, at_ns=1))
    well = RankState(pid=1, exited=RankExited(rank=0, pid=1, wait_status=0, at_ns=1))

    assert outcome_of({2: well, 3: died}).evidence == {3: Evidence(last_lines=("x",), why="w")}


@given(CAUSES)
def test_a_cause_arrives_as_it_was(cause: Cause) -> None:
    """Every node then reports a restart in the same words."""
    arrived = decode(encode(NextBegins(generation=1, cause=cause, at_ns=0)))
    assert isinstance(arrived, NextBegins)

    assert arrived.cause == cause


def test_an_error_keeps_its_class_message_and_exit_code() -> None:
    own = MeshrunError("x")
    own.exit_code = 126
    for error in (HostError("no room", hint="make some"), RendezvousError("gone"), own):
        trouble = travelled(NodeOutcome(trouble=Trouble.of(error))).trouble
        assert trouble is not None
        arrived = trouble.as_error()

        assert type(arrived) is type(error)
        assert (arrived.message, arrived.hint) == (error.message, error.hint)
        assert arrived.exit_code == error.exit_code
    assert type(Trouble.of(SpecError("x", "dp=", 3)).as_error()) is UsageError
    assert (
        type(Trouble(message="x", hint=None, exit_code=1, kind="Exit").as_error()) is MeshrunError
    )


@given(ranks=st.lists(RANKS, min_size=1, max_size=3), by_ns=st.integers(-(10**15), 10**15))
def test_only_times_are_shifted(ranks: list[RankState], by_ns: int) -> None:
    """Every time moves by the same amount, and a shift back restores it."""
    before = outcome_of(dict(enumerate(ranks)))
    after = travelled(before, -by_ns)

    for rank, state in before.ranks.items():
        moved = after.ranks[rank]
        assert moved.exited is not None
        assert state.exited is not None
        assert moved.exited.at_ns == state.exited.at_ns + by_ns
        for name in ("ready_ns", "finished_ns", "left_ns", "asked_to_end_ns"):
            old, new = getattr(state, name), getattr(moved, name)
            assert (old is None and new is None) or new == old + by_ns
        assert (moved.pid, moved.exited.wait_status) == (state.pid, state.exited.wait_status)
        assert (moved.raised and moved.raised.at_ns) == (
            state.raised and state.raised.at_ns + by_ns
        )
    assert travelled(after, by_ns) == before


@given(CAUSES, st.integers(-(10**15), 10**15))
def test_a_cause_is_shifted_too(cause: Cause, by_ns: int) -> None:
    """Together with its exception."""
    moved = decode(encode(NextBegins(generation=1, cause=cause, at_ns=0)), -by_ns)
    assert isinstance(moved, NextBegins)

    assert moved.cause.at_ns == cause.at_ns + by_ns
    if cause.raised is not None and moved.cause.raised is not None:
        assert moved.cause.raised.at_ns == cause.raised.at_ns + by_ns
    back = decode(encode(moved), by_ns)
    assert isinstance(back, NextBegins)
    assert back.cause == cause
