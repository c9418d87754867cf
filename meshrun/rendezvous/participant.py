"""The launcher of any node but node 0: connects to the coordinator and follows it."""

from __future__ import annotations

import errno
import os
import socket
import time

from msgspec.structs import replace

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.host.printable import one_line
from meshrun.plan.rendezvous_config import fallback_port, format_endpoint
from meshrun.protocol.collectives import AskTimes
from meshrun.protocol.events import (
    GenerationAborted,
    LaunchOver,
    NextBegins,
    NodeLost,
    OthersFinished,
)
from meshrun.protocol.from_zygote import GaveUp
from meshrun.rendezvous.connection import BEAT_S, Connection
from meshrun.rendezvous.deadline import Deadline
from meshrun.rendezvous.dialer import Dialer
from meshrun.rendezvous.handshake import ParticipantHandshake, Translated
from meshrun.rendezvous.messages import (
    Cleared,
    Decision,
    Leave,
    Message,
    Refused,
    Waiting,
    Welcome,
    Where,
)
from meshrun.rendezvous.reachability import Reachability
from meshrun.rendezvous.this_node import ThisNode

_RETRY_S = 0.5
_FIRST_GREETING_S = 3.0
_GREETING_S = 10.0
"""How long node 0 may take to send its greeting, the second one after an attempt without it, and
how long for each answer after that."""
_REFUSED_LONG_S = 10.0
"""After this long, node 0 was not merely started a little later."""
_SILENT = "it accepts connections but does not answer"
_FOREIGN_S = 5.0
"""How long another launch may answer at the endpoint: an earlier one may still be ending."""


class Participant:
    """Any node of a launch but node 0.

    Args:
        addresses: Those of the coordinator, if known; otherwise its name is looked up before each
            attempt, as it may take a while to appear.
    """

    def __init__(self, node: ThisNode, addresses: tuple[str, ...] = ()) -> None:
        self._config, self._info, self._secret = node.config, node.info, node.secret
        self._hub, self._where, self._beat_s = node.hub, node.where, node.beat_s
        reactor = node.hub.reactor
        self._dialer = Dialer(self._config.host or "", addresses, reactor, self._dialed)
        self._connection: Connection | None = None
        self._handshake = ParticipantHandshake(node.secret)
        """That of the last connection."""
        self._is_redirected = False
        """Whether what answers has said that another address is its own, which is tried first."""
        self._failed_attempt = "no answer yet"
        """Why the last attempt to reach the coordinator failed."""
        self._refused: Deadline | None = None
        """Since when every attempt was refused: the machine is up, but nothing listens."""
        self._noted = ""
        self._deadline = self._hub.deadline(node.config.timeout_s)
        self._next_try = reactor.call_at(time.monotonic_ns(), self._try, skips=False)
        self._end_of_wait = reactor.call_at(None, self._drop_without_answer, skips=False)
        self._beats = reactor.every(BEAT_S, self._beat)
        self._gave_up: GaveUp | None = None
        self._foreign: Deadline | None = None
        """How long something other than our coordinator may answer at the endpoint."""
        self._is_known = False
        """Whether the coordinator has answered on this connection."""
        self._uses_fallback = False
        """Whether it tries the port on which node 0 reports that the endpoint's port is taken."""
        self._met = self._over = self._failed = False
        self._is_spare = False
        self._has_ranks = False
        """Whether something of the last generation may be left here."""
        self._lost = ""
        """Why the coordinator was lost, while this node of an elastic launch reconnects."""
        self._reach: Reachability | None = None
        self._coordinator_host = ""

    # ---- messages of this node -------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Send the coordinator a message of this node's own launch."""
        if isinstance(message, Cleared):
            self._has_ranks = False
            if self._lost:
                self._reconnect()
        if self._connection is not None and self._met:
            self._connection.send(message)
        if isinstance(message, Leave):
            self._over = True

    def give_up(self, notice: GaveUp) -> None:
        """Notify the coordinator, as soon as it answers, that this node will not take part."""
        self._gave_up = notice
        if self._connection is not None:
            self._connection.send(notice)

    @property
    def all_notified(self) -> bool:
        """Whether the coordinator has answered that notice."""
        return self._failed

    def _beat(self) -> None:
        """Send a heartbeat, and check whether the coordinator is silent or missing for too long."""
        if self._connection is not None and self._connection.is_open:
            self._hub.activity.elsewhere_ns = self._connection.active_ns
            self._connection.beat(idle_s=self._hub.activity.idle_s)
            if why := self._connection.give_up_if_silent(self._config.node_timeout_s):
                self._drop(why)
        elif not (self._met or self._failed):  # while connected, node 0's join timeout applies
            self._check_deadlines()

    def _check_deadlines(self) -> None:
        if self._lost and self._has_ranks:
            return  # this node's own ranks end first
        place = self._config.endpoint
        if self._deadline.is_over:
            self._fail(
                RendezvousError(
                    f"cannot join node 0 at {place} within {self._deadline.timeout_s:.0f} s:"
                    f" {self._failed_attempt}",
                    hint=self._hint(),
                )
            )
        elif self._deadline.note_is_due():
            is_long = self._refused is not None and self._refused.is_over
            doubt = "; its launcher has not started yet or has exited" if is_long else ""
            self._hub.note(
                f"waiting for node 0 at {place}: {self._failed_attempt}{doubt} ({self._deadline})"
            )

    def _hint(self) -> str:
        """Return what may be wrong if node 0 was never reached."""
        if self._dialer.own:
            return (
                f"{self._dialer.own} is an address of this machine, which is not node 0: set"
                " --rdzv-endpoint to an address of the node with --node-rank 0"
            )
        if self._refused is not None:
            return (
                "check that node 0's launcher is running, and that the name resolves to the same"
                " machine on every node"
            )
        return (
            "check that meshrun was started there, that this node can reach the port, and that the"
            " name resolves to the same machine on every node"
        )

    def _hint_of_foreign(self) -> str:
        """Return what may be wrong if something else than node 0 seems to answer."""
        if _SILENT in self._failed_attempt:
            return (
                "node 0's launcher may be stopped or slow, and a longer --node-timeout waits longer"
                " for it; or another program is using the port"
            )
        return (
            "another program or launch may be using the port; check that --rdzv-id"
            f"{self._own_id()} and MESHRUN_SECRET are the same on every node"
        )

    def _own_id(self) -> str:
        given = self._config.run_id
        return f" (here {one_line(given, 80)})" if given else ""

    # ---- connecting ------------------------------------------------------------------------

    def _try(self) -> None:
        if self._met or self._failed:
            return
        if self._foreign is not None and self._foreign.is_over:
            self._fail(
                RendezvousError(
                    f"cannot join node 0 at {self._config.endpoint}: {self._failed_attempt}",
                    hint=self._hint_of_foreign(),
                )
            )
            return
        self._uses_fallback = self._foreign is not None and not self._uses_fallback
        self._dialer.dial(self._port)

    @property
    def _port(self) -> int:
        return fallback_port(self._secret) if self._uses_fallback else self._config.port or 0

    def _dialed(self, connected: socket.socket | None, why: str) -> None:
        if connected is not None:
            self._connected(connected)
        elif self._dialer.address:
            self._not_connected(why or "no answer")
        else:
            self._try_later(f"the name `{self._config.host}` does not resolve: {why}")

    def _connected(self, connection: socket.socket) -> None:
        greeting_s = _GREETING_S if self._foreign is not None else _FIRST_GREETING_S
        self._end_of_wait.restart(greeting_s)
        # It has proved nothing yet, so its word is followed once, not from address to address.
        address = "" if self._is_redirected else self._dialer.address
        self._handshake = ParticipantHandshake(self._secret, address)
        self._connection = Connection(connection, self._handshake, self._hub, beat_s=self._beat_s)
        if self._reach is None and not self._config.is_elastic and not self._info.probe:
            self._reach = Reachability(self._connection.own_address, self._hub)
            self._info = replace(self._info, reach_port=self._reach.port)
        self._connection.send(self._gave_up or self._info)
        self._connection.watch(self._on_ready)

    def _not_connected(self, why: str, *, foreign_s: float | None = None) -> None:
        if self._lost and why == os.strerror(errno.ECONNREFUSED):
            who = f"node 0 ({self._coordinator_host})" if self._coordinator_host else "node 0"
            self._fail(
                RendezvousError(
                    f"{who} was lost: {self._lost}",
                    hint="see the output of its launcher for why it exited; a launch cannot"
                    " continue without node 0",
                )
            )
            return
        if self._uses_fallback:  # usually, nothing listens there
            self._try_later(self._failed_attempt)
            return
        if why != os.strerror(errno.ECONNREFUSED):
            self._refused = None
        else:
            self._refused = self._refused or self._hub.deadline(_REFUSED_LONG_S)
            if (refused_s := self._refused.waited_s) >= 1:
                why += f" for {refused_s:.0f} s"
        if foreign_s is None:
            self._foreign = None
        elif self._foreign is None or self._foreign.timeout_s != foreign_s:
            self._foreign = self._hub.deadline(foreign_s)
        place = format_endpoint(self._dialer.address, self._port)
        if self._dialer.own == self._dialer.address:
            why += ", and the address belongs to this machine"
        self._try_later(why if place == self._config.endpoint else f"{place}: {why}")

    def _drop_without_answer(self) -> None:
        """End a connection whose other end does not answer like a launcher."""
        if self._connection is None or self._connection.is_open:
            return
        if self._handshake.is_answered:
            self._drop(f"its answer takes more than {_GREETING_S:g} s")
        else:
            self._drop(_SILENT, foreign_s=self._config.node_timeout_s)

    def _try_later(self, why: str) -> None:
        self._failed_attempt = why
        self._end_of_wait.cancel()
        self._next_try.restart(_RETRY_S)

    # ---- receiving -------------------------------------------------------------------------

    def _on_ready(self) -> None:
        connection = self._connection
        if connection is None:
            return
        for message in connection.receive():
            self._receive(message)
        if connection.is_open:
            self._end_of_wait.cancel()
            self._is_known, self._is_redirected, self._foreign = True, False, None
        elif connection.closed is None:  # it has begun to answer
            self._end_of_wait.restart(_GREETING_S)
        if isinstance(connection.handshake_error, Translated):
            self._connect_directly(connection.handshake_error.address)
        elif connection.closed is not None:
            self._drop(connection.closed)

    def _connect_directly(self, own: str) -> None:
        """Connect to the coordinator's own address, or else through the translated one again."""
        self._connection, self._is_redirected = None, True
        self._dialer.prefer(own)
        self._end_of_wait.cancel()
        self._next_try.move(time.monotonic_ns())

    def _wait(self, message: Waiting) -> None:
        if message.has_begun and not self._met:
            self._is_spare, self._lost = True, ""
        self._hub.note(message.text)

    def _receive(self, message: Message) -> None:
        events = self._hub.events
        match message:
            case Waiting():
                self._wait(message)
            case Refused():
                self._fail(message.as_error())
            case Welcome() if self._gave_up is None:
                self._welcome(message)
            case AskTimes():
                events.append(message)
            case Where():
                self._where(message.why)
            case GenerationAborted() | OthersFinished() | NextBegins() | LaunchOver():
                events.append(self._follow(message))

    def _follow(self, decision: Decision) -> Decision:
        """Note what comes next; return it as an event that happens now."""
        self._over |= isinstance(decision, LaunchOver)
        if isinstance(decision, NextBegins):
            self._take_part()
        return replace(decision, at_ns=time.monotonic_ns())

    def _welcome(self, welcome: Welcome) -> None:
        assert self._connection is not None  # noqa: S101 - it came over this connection
        try:
            welcome.check(self._info, self._config.run_id)
        except MeshrunError as error:
            self._fail(error)
            return
        self._take_part()
        self._met = True
        self._coordinator_host = welcome.hosts[0]
        if self._reach is not None:
            after = welcome.hosts[(welcome.node_rank + 1) % len(welcome.hosts)]
            address = welcome.next_address or self._connection.their_address
            self._reach.probe(after, address, welcome.next_port)
        self._hub.events.append(
            welcome.met(
                store_address=self._connection.their_address,
                own_address=self._connection.own_address,
            )
        )

    def _take_part(self) -> None:
        self._has_ranks, self._is_spare, self._lost = True, False, ""

    def _drop(self, why: str, *, foreign_s: float | None = None) -> None:
        """Close the connection; for ``foreign_s``, something else may answer at the endpoint."""
        connection, self._connection = self._connection, None
        was_known, self._is_known = self._is_known, False
        if connection is not None:
            connection.close(why)
        if self._over or self._failed:
            return
        is_silent = connection is not None and connection.is_silent
        if self._config.is_elastic and (self._met or self._is_spare):
            self._reconnect_later(why, is_silent=is_silent)
        elif self._met:
            self._lose_coordinator(why, is_silent=is_silent)
        else:
            if was_known:  # it has been there: wait less than for a late one
                known_s = min(self._deadline.timeout_s, self._config.node_timeout_s)
                self._deadline = self._hub.deadline(known_s)
            if connection is not None and connection.handshake_error is not None:
                foreign_s = _FOREIGN_S
            self._not_connected(why, foreign_s=foreign_s)
            if why != self._noted and not self._uses_fallback:
                self._noted = why
                self._hub.note(f"node 0 at {self._config.endpoint}: {why}; retrying")

    def _lose_coordinator(self, why: str, *, is_silent: bool) -> None:
        host, now_ns = self._coordinator_host, time.monotonic_ns()
        self._hub.events.append(
            NodeLost(node_rank=0, host=host, why=why, at_ns=now_ns, is_silent=is_silent)
        )

    # ---- reconnecting to an elastic launch -------------------------------------------------

    def _reconnect_later(self, why: str, *, is_silent: bool) -> None:
        """Reconnect once nothing of the last generation is left here."""
        self._lost = self._failed_attempt = why
        if self._met:
            self._lose_coordinator(why, is_silent=is_silent)
        self._met = self._is_spare = False
        if not self._has_ranks:
            self._reconnect()

    def _reconnect(self) -> None:
        self._hub.note(
            f"reconnecting to node 0 at {self._config.endpoint}, up to"
            f" {self._config.return_s:.0f} s"
        )
        self._info = replace(self._info, node_rank=None)
        self._deadline = self._hub.deadline(self._config.return_s)
        self._next_try.move(time.monotonic_ns())

    def _fail(self, error: MeshrunError) -> None:
        self._failed = True
        self._next_try.cancel()
        self._end_of_wait.cancel()
        self._dialer.close()
        self._hub.fail(error)

    def close(self) -> None:
        """Close the connection to the coordinator."""
        for timer in (self._beats, self._next_try, self._end_of_wait):
            timer.cancel()
        self._dialer.close()
        if self._reach is not None:
            self._reach.close()
        if self._connection is not None:
            self._connection.close("the launch has ended")
