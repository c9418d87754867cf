"""The launcher of node 0 while it waits for the other nodes to join."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.host.host_names import is_address
from meshrun.host.network import address_of, is_unspecified
from meshrun.host.printable import one_line
from meshrun.plan.rendezvous_config import format_endpoint
from meshrun.protocol.events import JoinFailed
from meshrun.protocol.generation import Withdraw
from meshrun.rendezvous.connection import Connection, close_gracefully, send_all
from meshrun.rendezvous.coordinator import Coordinator
from meshrun.rendezvous.expected_nodes import ExpectedNodes, TooManyNodesError, list_names
from meshrun.rendezvous.hub import CHECK_EVERY_S, Deadline, Hub
from meshrun.rendezvous.messages import Join, Message, Rejected, Waiting
from meshrun.rendezvous.participant import Participant
from meshrun.rendezvous.this_node import ThisNode
from meshrun.rendezvous.unauthenticated import Unauthenticated

_OTHER_LAUNCH_S = 5.0
"""After this long, launchers that cannot join are assumed to be the missing nodes."""
_ANSWER_TAKES_S = 3600.0
"""How long a second node 0 is looked for after the join timeout: the lobby times out first, with a
better error."""


class DuplicateCoordinator:
    """Detects a second node 0 by probing an endpoint that is not an address of this machine.

    It connects to the endpoint like a participant until it gets an answer. That may come from
    this node itself, behind a translated address or that of a service; the lobby then recognizes
    its own message. Failed attempts print nothing, as most endpoints never answer.
    """

    def __init__(self, node: ThisNode) -> None:
        self._hub = Hub(node.hub.reactor, note=lambda _: None)
        longer_s = node.config.timeout_s + _ANSWER_TAKES_S
        config = replace(node.config, timeout_s=longer_s)
        self._participant = Participant(replace(node, config=config, hub=self._hub))

    def rejection(self) -> MeshrunError | None:
        """Return the rejection by another node 0, if there is one."""
        while self._hub.events:
            if isinstance(news := self._hub.events.popleft(), JoinFailed):
                return news.error
        return None

    def close(self) -> None:
        """Stop probing."""
        self._participant.close()


class Lobby:
    """Node 0 of a launch until all nodes have joined; then a coordinator takes over.

    Args:
        nnodes: How many nodes are expected, if not as many as the launch may have.
        hand_over: Called with the coordinator once every node has joined.
        duplicate: Probes for another node 0.
    """

    def __init__(
        self,
        node: ThisNode,
        *,
        nnodes: int | None = None,
        listener: socket.socket,
        run_id: str,
        hand_over: Callable[[Coordinator], None],
        duplicate: DuplicateCoordinator | None = None,
    ) -> None:
        self._node, self._listener, self._run_id = node, listener, run_id
        self._config, self._info, self._hub = node.config, node.info, node.hub
        self._hand_over, self._duplicate = hand_over, duplicate
        config, hub = node.config, node.hub
        is_open = config.last_call_s is not None
        self._expected = ExpectedNodes(
            nnodes=nnodes or config.nnodes,
            least=config.least_nodes if is_open else None,
            own=node.info,
            hosts=config.hosts,
        )
        self._connections: dict[int, Connection] = {}
        """Connections that have sent a Join."""
        self._counter = itertools.count()
        self._deadline = self._hub.deadline(config.timeout_s)
        self._last_call: Deadline | None = None
        """How long more nodes may still join, once enough have."""
        self._checks = hub.reactor.every(CHECK_EVERY_S, self._check)
        self._failure: MeshrunError | None = None
        self._left_to_notify = config.nnodes - 1
        """How many nodes have not been notified of the failure."""
        self._has_shown_command = False
        self._unauthenticated = Unauthenticated(listener, node, self._on_join)

    def begin(self) -> None:
        """Start at once if this node is the only one."""
        if self._expected.is_complete:
            self._all_joined()

    def withdraw(self, notice: Withdraw) -> None:
        """Notify nodes, as they join, that the launch has failed."""
        self._fail(notice.as_error())

    @property
    def all_notified(self) -> bool:
        """Whether all nodes have been notified of the failure."""
        return self._left_to_notify <= 0

    def _check(self) -> None:
        """Check whether nodes are silent or missing for too long."""
        if self._duplicate is not None and (error := self._duplicate.rejection()) is not None:
            self._stop_probing()
            self._fail(error)
        self._unauthenticated.check()
        for number, connection in list(self._connections.items()):
            if why := connection.time_out_if_silent(self._config.node_timeout_s):
                self._drop(number, why)
        if self._failure is None:
            self._check_deadlines()

    def _check_deadlines(self) -> None:
        if not self._are_enough or self._config.last_call_s is None:
            self._last_call = None
        elif self._last_call is None:
            self._last_call = self._hub.deadline(self._config.last_call_s)
        is_last = self._last_call is not None and self._last_call.is_over
        if self._are_enough and (is_last or self._deadline.is_over):
            self._all_joined()  # missing nodes may join later
        elif self._deadline.is_over:
            self._left_to_notify = 0  # their own timeouts expire too
            self._fail(
                RendezvousError(
                    f"after {self._config.timeout_s:.0f} s, {self._expected.missing()}",
                    hint=self._hint(),
                )
            )
        elif 0 < self._expected.left <= len(others := self._foreign_launchers()):
            self._left_to_notify = 0  # they seem to be the missing nodes, and exit by themselves
            self._fail(
                RendezvousError(
                    f"{self._expected.missing()}, but {list_names(others)}"
                    f" {'has' if len(others) == 1 else 'have'} a different --rdzv-id or"
                    f" MESHRUN_SECRET{self._own_id()}",
                    hint="use the same values on every node of a launch, and a different endpoint"
                    " for each concurrent launch",
                )
            )
        elif self._deadline.note_is_due():
            self._note_missing()

    def _hint(self) -> str:
        """Return what may be wrong if nodes are still missing at the end."""
        if self._duplicate is not None:  # nothing answers at the endpoint, not even this node
            return (
                f"{self._config.endpoint} is not an address of {self._info.host}, which is"
                " node 0: on every node, pass --rdzv-endpoint HOST:PORT with an address of"
                " node 0"
            )
        if self._expected.left_out:
            return "see its output for details"
        if unheard := next(iter(self._unauthenticated.unheard.values()), ""):
            return unheard
        host = self._config.host or ""
        is_name = host and not is_address(host)
        name = f" that `{host}` resolves to an address of {self._info.host}," if is_name else ""
        return (
            f"on the missing nodes, check that meshrun was started,{name} that it can reach"
            f" {self._endpoint()} through firewalls and networks, and that --rdzv-id and"
            " MESHRUN_SECRET are the same"
        )

    def _foreign_launchers(self) -> list[str]:
        """Return the addresses of launchers that try to join but have another id or secret."""
        config = self._config
        wait_s = config.node_timeout_s if config.is_secret else _OTHER_LAUNCH_S
        return self._unauthenticated.foreign_launchers(wait_s)

    @property
    def _are_enough(self) -> bool:
        least, present = self._config.least_nodes, 1 + len(self._expected.joined)
        return least is not None and present >= least

    def _own_id(self) -> str:
        given = self._config.run_id
        return f" than {self._info.host}, with --rdzv-id {one_line(given, 80)}" if given else ""

    def _note_missing(self) -> None:
        deadline = self._last_call or self._deadline
        text = f"waiting at {self._endpoint()}: {self._expected.missing()} ({deadline})"
        self._notify_all(text)
        if self._config.join_command is not None and not self._has_shown_command:
            self._has_shown_command = True
            command = self._config.join_command.replace("ENDPOINT", self._endpoint(), 1)
            self._hub.note(f"run on every other node: {command}")

    def _notify_all(self, text: str) -> None:
        self._hub.note(text)
        send_all(self._connections.values(), Waiting(text=text))

    def _endpoint(self) -> str:
        name = self._listener.getsockname()
        address, port = address_of(name), name[1]
        if is_unspecified(address):
            address = self._config.host or self._info.host
        return format_endpoint(address, port)

    def _on_join(self, connection: Connection, messages: list[Message]) -> None:
        number = next(self._counter)
        self._connections[number] = connection
        connection.watch(partial(self._on_ready, number))
        self._handle(number, connection, messages)

    def _on_ready(self, number: int) -> None:
        connection = self._connections[number]
        self._handle(number, connection, connection.receive())

    def _handle(self, number: int, connection: Connection, messages: list[Message]) -> None:
        for message in messages:
            if number not in self._connections:  # an earlier message has closed it
                return
            if self._failure is not None and isinstance(message, Join | Withdraw):
                self._reject(number, self._failure)
                self._left_to_notify -= 1
            elif isinstance(message, Join):
                self._admit(number, message)
            elif isinstance(message, Withdraw) and self._node.policy.needs_all:
                self._fail(message.as_error())
            elif isinstance(message, Withdraw):
                self._reject(number, message.as_error())  # it waits for an answer
                self._drop(number, message.reason)
                self._continue_without(message)
        if connection.closed is not None and number in self._connections:
            self._drop(number, connection.closed)

    def _admit(self, number: int, info: Join) -> None:
        if info.probe and info.probe == self._info.probe:
            self._stop_probing()  # the probe has reached this node itself
            return
        if number in self._expected.joined:
            self._drop(number, "it joined twice")
            return
        for earlier in self._expected.on_host(info.host):
            if self._connections[earlier].may_be_replaced:
                self._drop(earlier, "its host reconnected")
        is_late = self._config.last_call_s is None and not self._node.policy.needs_all
        if is_late and (info.node_rank is None or self._expected.is_taken(info.node_rank)):
            self._drop(number, "the first nodes are about to start")  # it retries
            return
        try:
            self._expected.join(number, info)
        except TooManyNodesError as error:
            self._reject(number, error)
        except MeshrunError as error:
            self._fail(error)
        if self._failure is None and self._expected.is_complete:
            self._all_joined()

    def _continue_without(self, notice: Withdraw) -> None:
        """Continue without a node that has withdrawn."""
        self._notify_all(f"{notice.host} withdrew: {notice.reason}")
        self._expected.left_out[notice.host] = notice.reason
        if self._are_enough and self._expected.is_complete:
            self._all_joined()

    def _all_joined(self) -> None:
        order = self._expected.order()
        connections = {rank: self._connections.pop(number) for rank, number in enumerate(order, 1)}
        infos = [self._info, *(self._expected.joined[number] for number in order)]
        for number in list(self._connections):
            self._drop(number, "all nodes have joined")
        self._unauthenticated.close("all nodes have joined")
        self._checks.cancel()
        self._stop_probing()
        self._hand_over(
            Coordinator(
                self._node, connections, infos, listener=self._listener, run_id=self._run_id
            )
        )

    def _stop_probing(self) -> None:
        duplicate, self._duplicate = self._duplicate, None
        if duplicate is not None:
            duplicate.close()

    def _drop(self, number: int, why: str) -> None:
        self._connections.pop(number).close(why)
        self._expected.leave(number)

    def _fail(self, error: MeshrunError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for number in self._connections:
            self._reject(number, error)
            self._left_to_notify -= 1
        self._hub.fail(error)

    def _reject(self, number: int, error: MeshrunError) -> None:
        self._connections[number].send(Rejected.of(error))

    def close(self) -> None:
        """Notify the nodes that have joined, and close all connections."""
        self._checks.cancel()
        self._stop_probing()
        self._fail(RendezvousError(f"{self._info.host} exited before all nodes had joined"))
        self._unauthenticated.close("the launch has ended", self._failure)
        close_gracefully(self._connections.values())
