"""The launcher of any node but node 0: connects to the coordinator and follows it."""

from __future__ import annotations

from msgspec.structs import replace

from meshrun.errors import MeshrunError, NodeLostError
from meshrun.protocol.collectives import AskTimes
from meshrun.protocol.events import (
    GenerationAborted,
    LaunchOver,
    NextBegins,
    OthersFinished,
    ShowStacks,
)
from meshrun.protocol.generation import Withdraw
from meshrun.rendezvous.attempts import Attempts
from meshrun.rendezvous.connection import Connection, close_gracefully
from meshrun.rendezvous.hub import CHECK_EVERY_S
from meshrun.rendezvous.messages import (
    Cleared,
    Decision,
    Leave,
    Message,
    Rejected,
    Waiting,
    Welcome,
)
from meshrun.rendezvous.node_phases import ConnectionPhase, ParticipantPhase
from meshrun.rendezvous.reachability import Reachability
from meshrun.rendezvous.resumption import Resumption
from meshrun.rendezvous.this_node import ThisNode

_TAKES_PART = (ParticipantPhase.RUNNING, ParticipantPhase.CLEARED)
_CONNECTS = (ParticipantPhase.JOINING, ParticipantPhase.RETURNING)
_ENDED = (ParticipantPhase.LINGERING, ParticipantPhase.OVER, ParticipantPhase.FAILED)


class Participant:
    """Any node of a launch but node 0.

    Args:
        addresses: Those of the coordinator, if known.
    """

    def __init__(self, node: ThisNode, addresses: tuple[str, ...] = ()) -> None:
        self._node, self._config, self._info = node, node.config, node.info
        self._hub, self._policy = node.hub, node.policy
        self._phase = ParticipantPhase.JOINING
        self._attempts = Attempts(node, addresses, connected=self._connected, failed=self._fail)
        self._connection: Connection | None = None
        """The connection to the coordinator, after the handshake."""
        self._resumption: Resumption | None = None
        """While the connection is interrupted."""
        self._host = ""
        """Its host name, once it has welcomed this node."""
        self._lost = ""
        """Why the last connection was lost."""
        self._withdrawal: Withdraw | None = None
        self._reach: Reachability | None = None
        self._checks = node.hub.reactor.every(CHECK_EVERY_S, self._check)

    # ---- messages of this node -------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send the coordinator a message of this node's own launch."""
        if self._connection is not None and self._phase in _TAKES_PART:
            self._connection.send(message)
        if isinstance(message, Leave):
            self._enter(ParticipantPhase.OVER)
        elif isinstance(message, Cleared) and self._phase is ParticipantPhase.RUNNING:
            self._enter(ParticipantPhase.CLEARED)
        elif isinstance(message, Cleared) and self._phase is ParticipantPhase.CUT_OFF:
            self._enter(ParticipantPhase.RETURNING)
            self._return()

    def withdraw(self, notice: Withdraw) -> None:
        """Notify the coordinator, as soon as it answers, that this node withdraws."""
        self._withdrawal = notice
        if self._connection is not None:
            self._connection.send(notice)

    @property
    def all_notified(self) -> bool:
        """Whether the coordinator has answered that notice."""
        return self._phase is ParticipantPhase.FAILED

    def _enter(self, phase: ParticipantPhase) -> None:
        if self._phase not in _ENDED:
            self._phase = phase
        if self._connection is not None:
            self._connection.can_resume = self._phase in (*_TAKES_PART, ParticipantPhase.SPARE)

    def _check(self) -> None:
        """Check whether the coordinator is silent or missing for too long."""
        if self._connection is not None:
            self._hub.activity.elsewhere_ns = self._connection.active_ns
            self._hub.reported_idle_s = self._hub.activity.idle_s(self._hub.now_ns())
            if why := self._connection.time_out_if_silent(self._config.node_timeout_s):
                self._drop(self._connection, why)
        elif self._phase in _CONNECTS:  # while connected, node 0's join timeout applies
            self._attempts.check()

    # ---- receiving -------------------------------------------------------------------------

    def _connected(self, connection: Connection, messages: list[Message]) -> None:
        self._connection = connection
        if self._reach is None and self._policy.tests_reach and not self._info.probe:
            self._reach = Reachability(connection.own_address, self._hub)
            self._info = replace(self._info, reach_port=self._reach.port)
        connection.send(self._withdrawal or self._info)
        connection.watch(lambda: self._receive(connection, connection.receive()))
        self._receive(connection, messages)

    def _receive(self, connection: Connection, messages: list[Message]) -> None:
        for message in messages:
            self._handle(connection, message)
        if connection.closed is not None:
            self._drop(connection, connection.closed)
        elif connection.phase is ConnectionPhase.INTERRUPTED:
            self._resumption = Resumption(connection, self._node, self._resumed)

    def _resumed(self, connection: Connection, messages: list[Message]) -> None:
        self._resumption = None
        if connection.is_open:
            self._hub.note("the connection to node 0 was reset and resumed")
        self._receive(connection, messages)

    def _handle(self, connection: Connection, message: Message) -> None:
        events = self._hub.events
        match message:
            case Waiting():
                if message.has_begun:
                    self._enter(self._policy.if_no_place.get(self._phase, self._phase))
                self._hub.note(message.text)
            case Rejected():
                self._fail(message.as_error())
            case Welcome() if self._withdrawal is None:
                self._welcome(connection, message)
            case AskTimes() | ShowStacks():
                events.append(message)
            case GenerationAborted() | OthersFinished() | NextBegins() | LaunchOver():
                events.append(self._follow(message))

    def _follow(self, decision: Decision) -> Decision:
        """Note what comes next; return it as an event that happens now."""
        if isinstance(decision, LaunchOver):
            has_failed = decision.exit_code != 0
            self._enter(ParticipantPhase.LINGERING if has_failed else ParticipantPhase.OVER)
        elif isinstance(decision, NextBegins):
            self._enter(ParticipantPhase.RUNNING)
        return replace(decision, at_ns=self._hub.now_ns())

    def _welcome(self, connection: Connection, welcome: Welcome) -> None:
        try:
            welcome.check(self._info, self._config.run_id)
        except MeshrunError as error:
            self._fail(error)
            return
        self._enter(ParticipantPhase.RUNNING)
        self._host = welcome.hosts[0]
        if self._reach is not None:
            after = welcome.hosts[(welcome.node_rank + 1) % len(welcome.hosts)]
            address = welcome.next_address or connection.their_address
            self._reach.probe(after, address, welcome.next_port)
        self._hub.events.append(
            welcome.joined(
                store_address=connection.their_address,
                own_address=connection.own_address,
                at_ns=self._hub.now_ns(),
            )
        )

    # ---- the end of a connection -----------------------------------------------------------

    def _drop(self, connection: Connection, why: str) -> None:
        self._connection, self._lost = None, why
        connection.close(why)
        self._end_resumption()
        if self._phase in _CONNECTS:
            self._attempts.retry(why)
            return
        if self._phase in _TAKES_PART:
            self._hub.events.append(connection.loss(0, self._host, why))
        self._enter(self._policy.if_lost.get(self._phase, self._phase))
        if self._phase is ParticipantPhase.RETURNING:
            self._return()

    def _end_resumption(self) -> None:
        resumption, self._resumption = self._resumption, None
        if resumption is not None:
            resumption.close()

    def _return(self) -> None:
        """Reconnect to an elastic launch, as nothing of the last generation is left here."""
        endpoint, within_s = self._config.endpoint, self._config.return_s
        self._hub.note(f"reconnecting to node 0 at {endpoint}, up to {within_s:.0f} s")
        self._info = replace(self._info, node_rank=None)
        who = f"node 0 ({self._host})" if self._host else "node 0"
        error = NodeLostError(
            f"{who} was lost: {self._lost}",
            hint="see the output of its launcher for why it exited; a launch cannot continue"
            " without node 0",
        )
        self._attempts.begin_again(error, self._lost)

    def _fail(self, error: MeshrunError) -> None:
        if self._connection is not None and self._phase in self._policy.committed:
            self._connection.close(error.message)  # no decision of this coordinator will follow
            return
        self._enter(ParticipantPhase.FAILED)
        self._attempts.close()
        self._hub.fail(error)

    def close(self) -> None:
        """Close the connection to the coordinator: after a failure, once that has closed it."""
        self._checks.cancel()
        self._attempts.close()
        self._end_resumption()
        if self._reach is not None:
            self._reach.close()
        if self._connection is not None:
            if self._phase is ParticipantPhase.LINGERING:
                close_gracefully([self._connection], is_last=True)
            self._connection.close("the launch has ended")
