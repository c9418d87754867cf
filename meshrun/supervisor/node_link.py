"""The loop's connection to the other nodes: reports, decisions, and a last notice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from msgspec.structs import asdict, replace

from meshrun.errors import RendezvousError
from meshrun.host.reactor import Reactor
from meshrun.layout import Layout
from meshrun.lifecycle.actions import Decide, Report
from meshrun.lifecycle.outcome import describe_end, node_outcome, why_stopped
from meshrun.lifecycle.root_cause import describe_lost_process
from meshrun.lifecycle.state import State
from meshrun.protocol.collectives import RankCalled
from meshrun.protocol.events import LaunchOver, NextBegins
from meshrun.protocol.generation import Cause, Evidence, Withdraw
from meshrun.rendezvous.messages import Cleared, Failed, Finished, Leave
from meshrun.rendezvous.peers import Peers

_SIGNALLED_LINGER_S = 1.0
_SILENT_LINGER_S = 1.0
"""How long a node lingers before it prints a note."""
_IMPORT_TAKES_S = 60.0
"""How long importing torch may take, where it is needed to notify the others."""
_LOOK_EVERY_S = 0.3
"""A callback at the end of the import would have to pass through three modules."""
_CHECK_DELIVERY_S = 0.01


class Linger:
    """The time in which a node that withdraws waits for the others, to notify them.

    A participant in ``ParticipantPhase.LINGERING`` waits for node 0 instead, which reports first.
    """

    def __init__(
        self,
        peers: Peers,
        reason: str,
        linger_s: float,
        note: Callable[[str], None],
        reactor: Reactor,
    ) -> None:
        self._peers, self._note, self._linger_s = peers, note, linger_s
        self._text = f"this node withdraws: {reason}"
        self._until = reactor.call_later(linger_s, lambda: None)
        self._import = reactor.call_later(_IMPORT_TAKES_S, lambda: None)
        reactor.every(_LOOK_EVERY_S, self._wait_for_import)
        reactor.call_later(_SILENT_LINGER_S, self._explain)

    @property
    def is_over(self) -> bool:
        """Whether all others have been notified, or time has run out."""
        return self._peers.all_notified or not self._until.is_pending

    def _wait_for_import(self) -> None:
        if self._peers.imports_torch and self._import.is_pending:
            self._until.restart(self._linger_s)

    def _explain(self) -> None:
        if not self.is_over:
            after = " after importing torch" if self._peers.imports_torch else ""
            self._note(
                f"{self._text}; waiting up to {self._linger_s:g} s{after} to notify the other nodes"
                " (Ctrl-C to exit now)"
            )


class NodeLink:
    """The link to the other nodes of a launch.

    Args:
        linger_s: How long this node lingers if it withdraws.
    """

    def __init__(
        self, peers: Peers, note: Callable[[str], None], reactor: Reactor, *, linger_s: float
    ) -> None:
        self.peers, self._note, self._linger_s = peers, note, linger_s
        self._reactor = reactor
        self._host = os.uname().nodename
        self.hosts: tuple[str, ...] = (self._host,)
        """Host names in node order, once all nodes have joined."""
        self._linger: Linger | None = None
        self._signals_before = 0
        """How many signals had arrived when it began to linger."""

    def carry_out(
        self,
        action: Report | Decide,
        state: State,
        layout: Layout,
        gather: Callable[[], Mapping[int, Evidence]],
        calls: Mapping[int, RankCalled],
    ) -> None:
        """Report to the coordinator; or, as the coordinator, send all nodes what comes next."""
        generation, now_ns = state.generation, time.monotonic_ns()
        launch = (state, layout, self.hosts, self._host)
        match action:
            case Decide(next_after=Cause() as cause):
                self.peers.send(NextBegins(generation=generation + 1, cause=cause, at_ns=now_ns))
            case Decide():
                ending = asdict(describe_end(*launch))
                self.peers.send(LaunchOver(**ending, generation=generation, at_ns=now_ns))
            case Report(what="finished"):
                self.peers.send(Finished(generation=generation))
            case Report(what="leaves"):
                self.peers.send(Leave(generation=generation, why=_why_leaving(state)))
            case Report(what="failed"):
                self.peers.send(Failed(generation=generation, outcome=node_outcome(*launch)))
            case Report(what="cleared"):
                outcome = replace(node_outcome(*launch, gather()), calls=calls)
                self.peers.send(Cleared(generation=generation, outcome=outcome))

    def begin_to_linger(self, state: State, layout: Layout) -> None:
        """Withdraw, once the launch is over here, if not all nodes had joined."""
        nodes, self._signals_before = state.nodes, len(state.signals)
        if nodes.have_joined:
            # No event tells when the others have received all.
            self._reactor.every(_CHECK_DELIVERY_S, lambda: None)
            return
        ending = describe_end(state, layout, self.hosts, "it")
        if nodes.failed is None:
            code = ending.exit_code or RendezvousError.exit_code
            self.peers.withdraw(Withdraw(host=self._host, reason=ending.headline, exit_code=code))
        linger_s = _SIGNALLED_LINGER_S if state.signals else self._linger_s
        linger_s = max(linger_s, self.peers.least_linger_s)
        self._linger = Linger(self.peers, ending.headline, linger_s, self._note, self._reactor)

    def lingers(self, state: State) -> bool:
        """Return whether to wait until the others know how or why this launch ended."""
        if len(state.signals) != self._signals_before:
            return False
        if self._linger is None or state.nodes.have_joined:
            return not self.peers.all_delivered  # the network may be cut, and heal
        return not self._linger.is_over


def _why_leaving(state: State) -> str:
    if state.signals:
        return f"it was {why_stopped(state)}"
    if state.excluded is not None:
        return f"{state.excluded.who} excludes it: {state.excluded.reason}"
    return describe_lost_process(state) or ""
