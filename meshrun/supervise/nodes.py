"""What this launch tells the other nodes, and hears of them; for the loop."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Literal

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.events import FromNodes
from meshrun.layout import Layout
from meshrun.nodes.messages import Begin, Failed, Finished, GaveUp, Idle, Leave, Over, Where
from meshrun.nodes.peers import Peers
from meshrun.supervise.actions import Decide, Tell
from meshrun.supervise.blame import describe_failure, describe_lost_process
from meshrun.supervise.evidence import Evidence
from meshrun.supervise.known import Cause, State
from meshrun.supervise.outcome import decide, find_trouble, headline, why_stopped
from meshrun.supervise.outcome_json import cause_to_json, outcome_to_json
from meshrun.wire import Negotiate

LEAVE_NS = 5_000_000_000
"""How long a node that will not take part tries to tell the others so."""
_SIGNALLED_LEAVE_NS = 1_000_000_000

Meet = Callable[
    [
        selectors.BaseSelector,
        Callable[[str], None],
        Callable[[str], None],
        Callable[[Negotiate, list[int]], None],
    ],
    "Nodes",
]
"""Begins to meet the others: given the selector, what notes a line, what shows where ranks are,
and what has the zygote begin torch's rendezvous."""


class Nodes:
    """The other nodes of a launch."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._host = os.uname().nodename
        self.hosts: tuple[str, ...] = (self._host,)
        """In node order, once they have met."""
        self._leave_by_ns: int | None = None
        self._signals_before = 0

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`look` has something to do."""
        times = (self.peers.next_look_ns, self._leave_by_ns)
        return min((at for at in times if at is not None), default=None)

    def look(self) -> Iterator[FromNodes]:
        """Do what is due, and yield what has happened."""
        self.peers.look()
        yield from self.peers.news()

    def carry_out(
        self,
        action: Tell | Decide,
        state: State,
        layout: Layout,
        gather: Callable[[], Mapping[int, Evidence]],
    ) -> None:
        """Tell the head how it stands here; or, as the head, tell all what comes next."""
        if isinstance(action, Decide):
            self._decide(action.next_after, state, layout)
        else:
            self._tell(action.what, state, layout, gather() if action.what == "idle" else {})

    def _tell(
        self,
        what: Literal["failed", "finished", "idle", "leaves"],
        state: State,
        layout: Layout,
        evidence: Mapping[int, Evidence],
    ) -> None:
        if what == "finished":
            self.peers.tell(Finished(generation=state.generation))
            return
        if what == "leaves":
            why = describe_lost_process(state) or ""
            if state.signals:
                why = f"it was {why_stopped(state)}"
            self.peers.tell(Leave(generation=state.generation, why=why))
            return
        outcome = outcome_to_json(
            state,
            headline=headline(state, layout, self.hosts, self._host),
            failure=_failure(state, self._host),
            trouble=_trouble(state, self._host),
            evidence=evidence,
        )
        kind = Failed if what == "failed" else Idle
        self.peers.tell(kind(generation=state.generation, outcome=outcome))

    def _decide(self, next_after: Cause | None, state: State, layout: Layout) -> None:
        if next_after is not None:
            generation = state.generation + 1
            self.peers.tell(Begin(generation=generation, cause=cause_to_json(next_after)))
        else:
            decision = decide(state, layout, self.hosts, self._host)
            self.peers.tell(Over(**asdict(decision)))

    def ask_where(self, why: str) -> None:
        """Have the other nodes print where their ranks are."""
        self.peers.tell(Where(why=why))

    def takes_leave(self, state: State, layout: Layout) -> bool:
        """Whether others are still to be told why this launch ended before all had met."""
        known = state.abroad
        if known is None or known.is_met:
            return False
        now_ns = time.monotonic_ns()
        if self._leave_by_ns is None:
            self._signals_before = len(state.signals)
            self._leave_by_ns = now_ns + (_SIGNALLED_LEAVE_NS if state.signals else LEAVE_NS)
            if known.failed is None:
                decision = decide(state, layout, self.hosts, "it")
                code = decision.exit_code or RendezvousError.exit_code
                self.peers.give_up(
                    GaveUp(host=self._host, reason=decision.headline, exit_code=code)
                )
        is_patient = len(state.signals) == self._signals_before
        return is_patient and now_ns < self._leave_by_ns and not self.peers.is_through

    def close(self) -> None:
        """Have what was said arrive, and let go."""
        self.peers.close()


def _failure(state: State, host: str) -> str:
    what = describe_failure(state)
    return f"on {host}, {what}" if state.lost_process and not state.hung else what or ""


def _trouble(state: State, host: str) -> MeshrunError | None:
    if state.broken is not None:
        broken = MeshrunError(state.broken.text.rstrip().rpartition("\n")[2])
        broken.exit_code = state.broken.exit_code
        return broken
    return find_trouble(state, host)
