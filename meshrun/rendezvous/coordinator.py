"""Node 0 once all nodes have joined: notices lost ones, admits spares, chooses who takes part."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from meshrun.errors import HostError, MeshrunError, RendezvousError
from meshrun.layout import Layout
from meshrun.protocol.activity import idle_s_at, latest
from meshrun.protocol.events import GenerationAborted, LaunchOver, NextBegins, NodeLost
from meshrun.protocol.generation import Cause, Withdraw
from meshrun.protocol.result import Resize
from meshrun.rendezvous.connection import Connection, close_gracefully, send_all
from meshrun.rendezvous.expected_nodes import check_settings, note_different_arguments
from meshrun.rendezvous.hub import CHECK_EVERY_S
from meshrun.rendezvous.membership import Membership, NodeChoice, describe_shapes
from meshrun.rendezvous.messages import (
    Join,
    Message,
    Rejected,
    Resume,
    Resumed,
    Waiting,
)
from meshrun.rendezvous.node_assigner import NodeAssigner
from meshrun.rendezvous.node_phases import CoordinatorPhase
from meshrun.rendezvous.policy import change_of_nodes
from meshrun.rendezvous.running_generation import OWN, RunningGeneration
from meshrun.rendezvous.this_node import ThisNode
from meshrun.rendezvous.unauthenticated import Unauthenticated

_SPARE = "this node is a spare: it joins when another node is lost or the mesh has room for it"


class Coordinator:
    """Node 0, which keeps listening; a node keeps its number here even if its node rank changes.

    What it does as nodes join and are lost is a policy.

    Args:
        infos: The Join of each node, this one's first.
    """

    def __init__(
        self,
        node: ThisNode,
        connections: Mapping[int, Connection],
        infos: Sequence[Join],
        *,
        listener: socket.socket,
        run_id: str,
    ) -> None:
        self._config, self._hub = config, hub = node.config, node.hub
        self._policy = node.policy
        self._nodes = Membership(
            fit=node.fit,
            least=config.least_nodes or config.nnodes,
            most=config.nnodes,
            infos=dict(enumerate(infos)),
        )
        self._counter = itertools.count(len(infos))
        self._notified: set[int] = set()
        """Spares that know that they are spares."""
        self._excluded: dict[str, HostError] = {}
        """Hosts that may no longer take part, and why."""
        self._ran: dict[int, str] = {}
        """The hosts of the last generation, by number, in node order."""
        self._causes: list[Cause] = []
        """Why each generation before this one, or the one that will begin, ended."""
        self._phase = CoordinatorPhase.AWAITING_NODES
        self._deadline = hub.deadline(config.return_s)
        """How long to gather nodes."""
        self._checks = hub.reactor.every(CHECK_EVERY_S, self._check)
        self._connections = dict(connections)
        """Those to all other nodes; the running generation has those to its nodes."""
        for number, connection in connections.items():
            self._watch(number, connection)
        # Before the first generation, none has ranks that could report.
        self._running = RunningGeneration(0, dict(connections), world_size=0, hub=hub)
        self._assigner = NodeAssigner(
            node, self._nodes, self._connections, listener=listener, run_id=run_id
        )
        self._listener = listener
        self._unauthenticated = Unauthenticated(listener, node, self._on_join)
        self._begin_if_enough()

    # ---- messages of this node -------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Carry out a message of this node's own launch, and send the others what they need."""
        match message:
            case NextBegins():
                self._causes.append(message.cause)
                self._exclude_failing_node(message.cause)
                self._phase = CoordinatorPhase.AWAITING_NODES
                self._deadline = self._hub.deadline(self._config.return_s)
                self._begin_if_enough()
            case LaunchOver():
                self._phase = CoordinatorPhase.OVER
                self._running.close()
                send_all(self._connections.values(), message)
                for connection in self._connections.values():
                    connection.can_resume = False  # they leave, perhaps before they have read all
                self._hub.events.append(message)
            case _:
                self._running.send(message)

    @property
    def store_listener(self) -> socket.socket | None:
        """The socket of this generation's store."""
        return self._assigner.store_listener

    @property
    def all_delivered(self) -> bool:
        """Whether the other nodes have received all messages; silent ones are not waited for."""
        return all(connection.is_delivered for connection in self._connections.values())

    # ---- time ------------------------------------------------------------------------------

    def _check(self) -> None:
        """Check whether nodes are silent or missing for too long."""
        activity, others = self._hub.activity, self._running.connections.values()
        activity.elsewhere_ns = latest(*(each.active_ns for each in others))
        self._hub.reported_idle_s = idle_s_at(
            self._hub.now_ns(), latest(activity.here_ns, activity.elsewhere_ns)
        )
        for number, connection in list(self._connections.items()):
            if why := connection.time_out_if_silent(self._config.node_timeout_s):
                self._lose(number, why)
        self._unauthenticated.check()
        if self._phase is CoordinatorPhase.AWAITING_NODES:
            self._check_deadline()

    def _check_deadline(self) -> None:
        deadline = self._deadline
        if deadline.is_over:
            lost = f"{self._running.loss}; " if self._running.loss else ""
            what = f"{lost}after {deadline.waited_s:.0f} s, {self._nodes.describe()}"
            todo = "start another node with the same command to join"
            if self._config.present is not None:  # a launcher is started on each host
                todo = f"check that the other hosts can reach {self._assigner.endpoint}"
            self._fail(
                RendezvousError(
                    what, hint=f"{todo}; {self._policy.wait_option} sets how long to wait"
                )
            )
        elif deadline.note_is_due():
            text = f"waiting at {self._assigner.endpoint}: {self._choose()} ({deadline})"
            self._hub.note(text)
            send_all(self._connections.values(), Waiting(text=text, has_begun=True))

    def _fail(self, error: MeshrunError) -> None:
        self._phase = CoordinatorPhase.FAILED
        if not self._causes:  # no node has been welcomed yet
            send_all(self._connections.values(), Rejected.of(error))
        self._hub.fail(error)

    # ---- nodes that join and leave ---------------------------------------------------------

    def _watch(self, number: int, connection: Connection) -> None:
        connection.can_resume = True
        connection.watch(partial(self._on_ready, number))

    def _on_ready(self, number: int) -> None:
        connection = self._connections[number]
        for message in connection.receive():
            if isinstance(message, Withdraw):  # it did not know yet that all nodes had joined
                connection.close(message.reason)
            elif number in self._running.connections:  # a spare's is on ranks that it had before
                self._running.receive(number, connection, message)
        if connection.closed is not None:
            self._lose(number, connection.closed)

    def _on_join(self, connection: Connection, messages: Sequence[Message]) -> None:
        first = (each for each in messages if isinstance(each, Join | Withdraw | Resume))
        info = next(first, None)
        if info is None or connection.closed is not None:
            connection.close("it left before it joined")
        elif isinstance(info, Resume):
            self._resume(connection, info)
        elif isinstance(info, Withdraw):
            self._unauthenticated.reject(connection, info.as_error())
        else:
            try:
                self._admit(connection, info)
            except MeshrunError as error:
                self._unauthenticated.reject(connection, error)

    def _resume(self, new: Connection, request: Resume) -> None:
        number = self._nodes.of_launcher(request.launcher)
        if number is None or number not in self._connections:
            self._unauthenticated.reject(new, RendezvousError("it reconnected too late"))
            return
        connection = self._connections[number]
        new.send(Resumed(received=connection.received))
        connection.resume(new, request.received)
        if connection.closed is not None:
            self._lose(number, connection.closed)
            return
        host = self._nodes.infos[number].host
        self._hub.note(f"the connection to {host} was reset and resumed")

    def _admit(self, connection: Connection, info: Join) -> None:
        check_settings(self._nodes.infos[OWN], info)
        if (error := self._excluded.get(info.host)) is not None:
            raise error
        for number in list(self._policy.replaceable(self._nodes, info.host)):
            running = self._running.connections.get(number)
            if running is not None and running.may_be_replaced:
                self._lose(number, "its launcher restarted")
        self._policy.check_place(self._nodes, info)
        before = self._nodes.of_launcher(info.launcher)
        if before in self._connections:
            self._lose(before, "it reconnected")
        number = next(self._counter)
        self._nodes.add(number, info)
        self._connections[number] = connection
        self._watch(number, connection)
        if self._phase is CoordinatorPhase.AWAITING_NODES:
            if len(self._nodes.infos) >= self._nodes.least:
                self._begin_if_enough()
        elif not (self._running.asked_to_stop or self._running.has_finished):
            self._grow(info.host)

    def _exclude_failing_node(self, cause: Cause) -> None:
        """Exclude a node after two failures in a row on it that no other node had."""
        number = self._failed_on(cause)
        why = self._nodes.record_failure(number, cause)
        if number is None or not why:
            return
        self._excluded[self._nodes.infos[number].host] = error = HostError(
            f"{why}; the other nodes continue without it",
            hint="check the devices, disk and memory of this host; the launch no longer accepts it",
        )
        self._hub.note(f"{why}; excluding it")
        del self._running.connections[number]
        self._unauthenticated.reject(self._connections.pop(number), error)
        self._nodes.remove(number)

    def _failed_on(self, cause: Cause) -> int | None:
        """Return the number of the node that failed, whether a rank did or something else."""
        rank, layout = cause.rank, self._nodes.layout
        if layout is None or not cause.is_failure:
            return None
        if rank is not None:
            return list(self._ran)[layout.node_rank(rank)]
        failed = [
            number
            for number, outcome in self._running.outcomes.items()
            if outcome.failure and not outcome.is_hung
        ]
        return failed[0] if len(failed) == 1 else None

    def _grow(self, host: str) -> None:
        """End this generation if the next would have more ranks."""
        before, choice = self._nodes.layout, self._choose()
        after = choice.layout if isinstance(choice, NodeChoice) else before
        if before is not None and after is not None and after.world_size > before.world_size:
            why = f"{host} joins: {describe_shapes(before, after)}"
            self._end(why, change_of_nodes(why, self._hub.now_ns()))
        else:
            self._notify_spares()

    def _lose(self, number: int, why: str) -> None:
        connection, host = self._connections.pop(number), self._nodes.infos[number].host
        connection.close(why)
        self._running.connections.pop(number, None)
        node_rank = self._nodes.remove(number)
        if self._phase is CoordinatorPhase.OVER:
            return
        if node_rank is None:
            self._hub.note(f"lost spare node {host}: {why}")
            return
        lost = connection.loss(node_rank, host, why)
        self._running.loss = self._running.loss or str(lost)
        event = self._policy.event_of_loss(lost, self._running.has_finished)
        is_news = self._running.asked_to_stop and number not in self._running.outcomes
        if is_news and isinstance(event, GenerationAborted):
            self._hub.note(str(lost))
        if event is not None:
            self._end(str(lost), event)
        self._running.advance()

    def _end(self, why: str, event: NodeLost | GenerationAborted) -> None:
        """End this generation on every node; ``event`` is for this node's launch."""
        self._running.end(GenerationAborted(why=why, signum=0, at_ns=self._hub.now_ns()))
        self._hub.events.append(event)

    # ---- nodes that take part --------------------------------------------------------------

    def _choose(self) -> NodeChoice | MeshrunError:
        """Return which nodes should take part, or why they are too few."""
        try:
            return self._nodes.choose()
        except MeshrunError as error:
            return error

    def _begin_if_enough(self) -> None:
        """Begin the next generation, unless there are too few nodes for it."""
        choice = self._choose()
        if isinstance(choice, MeshrunError):
            if len(self._nodes.infos) >= self._nodes.most:
                self._fail(choice)  # more nodes would not help
            return
        if list(choice.participants) == list(self._ran):
            self._continue()
        else:
            try:
                self._begin(choice)
            except HostError as error:
                self._fail(error)
                return
        self._phase = CoordinatorPhase.RUNNING
        self._notify_spares()

    @property
    def _generation(self) -> int:
        return len(self._causes)

    def _continue(self) -> None:
        """Begin the next generation with the same nodes."""
        begin = NextBegins(
            generation=self._generation, cause=self._causes[-1], at_ns=self._hub.now_ns()
        )
        self._running.broadcast(begin)
        self._run_generation()
        self._hub.events.append(begin)

    def _run_generation(self) -> None:
        layout = self._nodes.layout
        self._running = RunningGeneration(
            self._generation,
            {number: self._connections[number] for number in self._ran if number != OWN},
            world_size=layout.world_size if layout is not None else 0,
            hub=self._hub,
        )

    def _begin(self, choice: NodeChoice) -> None:
        """Begin a generation with other nodes: send each its place."""
        nodes, before = self._nodes, self._nodes.layout
        previous = {**before.to_dict(), "generation": self._generation - 1} if before else {}
        nodes.apply(choice)
        runs = {number: nodes.infos[number].host for number in choice.participants}
        new = (nodes.infos[number] for number in runs if number not in self._ran)
        if note := note_different_arguments(nodes.infos[OWN], new):
            self._hub.note(note)
        if self._causes and self._policy.announces_changes:
            resize = self._resize(runs, before, choice.layout)
            self._causes[-1] = replace(self._causes[-1], resize=resize)
        self._ran = runs
        self._notified -= runs.keys()
        self._run_generation()
        self._hub.events.append(self._assigner.assign(list(runs), self._causes, previous))

    def _resize(self, runs: Mapping[int, str], before: Layout | None, after: Layout) -> Resize:
        """Return how the nodes that ran last differ from those that run now."""
        return Resize(
            generation=self._generation,
            left=tuple(host for number, host in self._ran.items() if number not in runs),
            joined=tuple(host for number, host in runs.items() if number not in self._ran),
            shapes=describe_shapes(before, after),
            mesh=str(after.mesh) if after.mesh else "",
            hosts=tuple(runs.values()),
        )

    def _notify_spares(self) -> None:
        for number in self._connections.keys() - self._running.connections.keys() - self._notified:
            self._notified.add(number)
            self._connections[number].send(Waiting(text=_SPARE, has_begun=True))
            self._hub.note(f"{self._nodes.infos[number].host} is a spare")

    def close(self) -> None:
        """Close all connections, once the other nodes have read everything."""
        self._checks.cancel()
        self._unauthenticated.close("the launch has ended")
        self._listener.close()
        close_gracefully(self._connections.values())
        self._assigner.close()
