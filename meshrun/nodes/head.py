"""The head: node 0's launcher, to which the others connect, and who says what happens next."""

from __future__ import annotations

import itertools
import selectors
import socket
import time
from functools import partial

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.events import (
    AllIdle,
    LaunchOver,
    MeetingFailed,
    Met,
    NextBegins,
    NodeLost,
    OthersFailed,
    OthersFinished,
)
from meshrun.meeting import Meeting, format_endpoint
from meshrun.nodes.gathering import Gathering, TooMany
from meshrun.nodes.handshake import HeadHandshake
from meshrun.nodes.link import Link
from meshrun.nodes.messages import (
    Begin,
    End,
    Failed,
    Finished,
    Idle,
    Join,
    MayLeave,
    Message,
    Over,
    Refused,
    Waiting,
    Welcome,
    Where,
)
from meshrun.nodes.outcome import shift_times
from meshrun.nodes.switchboard import Switchboard

_BEAT_S = 1.0
_FIRST_NOTE_S = 3.0
_NOTE_EVERY_S = 5.0
_PROOF_WITHIN_S = 10.0
_MOST_STRANGERS = 256
"""Connections that have not proved what they are; more wait in the kernel's queue."""
_GOODBYE_S = 2.0
_OWN = -1
"""Stands for this node where connections are counted."""


class Head:
    """Node 0 of a launch.

    Args:
        listener: Where the others connect; once all are there, the ranks' store takes it over.
    """

    def __init__(
        self,
        meeting: Meeting,
        card: Join,
        *,
        listener: socket.socket,
        secret: bytes,
        run_id: str,
        board: Switchboard,
    ) -> None:
        self.listener = listener
        self._meeting, self._card, self._secret, self._run_id = meeting, card, secret, run_id
        self._board = board
        self._gathering = Gathering(nnodes=meeting.nnodes, own=card, hosts=meeting.hosts)
        self._links: dict[int, Link] = {}
        self._nodes: dict[int, int] = {}
        """Node rank by connection, once all have met."""
        self._counter = itertools.count()
        now_ns = time.monotonic_ns()
        self._began_ns = now_ns
        self._deadline_ns: int | None = now_ns + int(meeting.timeout_s * 1e9)
        self._next_note_ns = now_ns + int(_FIRST_NOTE_S * 1e9)
        self._next_beat_ns = now_ns
        self._met = self._over = False
        self._told: set[tuple[str, str]] = set()
        """Strangers that people were told of."""
        self._begin_generation(0)
        listener.setblocking(False)
        board.selector.register(listener, selectors.EVENT_READ, self._accept)
        if self._gathering.is_complete:  # a range of nodes may end at one
            self._meet()

    def _begin_generation(self, generation: int) -> None:
        self._generation = generation
        self._outcomes: dict[int, dict[str, object]] = {}
        self._finished: set[int] = set()
        self._own_finished = self._own_idle = self._ending = False

    # ---- the launch's own wishes -----------------------------------------------------------

    def tell(self, message: Message) -> None:
        """Do what this node's own launch says, and pass on what concerns the others."""
        match message:
            case Failed():
                self._end(_OWN, message, signum=int(message.outcome.get("signum") or 0))
            case Finished():
                self._own_finished = True
                self._leave_if_all_finished()
            case Idle():
                self._own_idle = True
                self._advance_if_all_idle()
            case Begin():
                self._broadcast(message)
                self._begin_generation(message.generation)
                begins = NextBegins(
                    generation=message.generation, cause=message.cause, at_ns=time.monotonic_ns()
                )
                self._board.news.append(begins)
            case Over():
                self._over = True
                self._broadcast(message)
                self._board.news.append(
                    LaunchOver(
                        exit_code=message.exit_code,
                        signum=message.signum,
                        preempted=message.preempted,
                        headline=message.headline,
                        at_ns=time.monotonic_ns(),
                    )
                )
            case Where():
                self._broadcast(message)

    # ---- time ------------------------------------------------------------------------------

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`look` has something to do."""
        return self._next_beat_ns

    def look(self) -> None:
        """Do what is due: beats, notes, time-outs."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = now_ns + int(_BEAT_S * 1e9)
        for number, link in list(self._links.items()):
            if not link.is_open:
                if now_ns - link.began_ns > _PROOF_WITHIN_S * 1e9:
                    self._drop(number, "it did not say what it is")
                continue
            link.beat()
            self._board.settle(link)
            silent_s = (now_ns - link.heard_ns) / 1e9
            if silent_s > self._meeting.node_timeout_s:
                self._drop(number, f"nothing was heard of it for {silent_s:.0f} s")
        if not self._met and self._deadline_ns is not None:
            self._look_for_missing(now_ns)

    def _look_for_missing(self, now_ns: int) -> None:
        if self._deadline_ns is not None and now_ns >= self._deadline_ns:
            self._fail(
                RendezvousError(
                    f"after {self._meeting.timeout_s:.0f} s {self._gathering.missing()}",
                    hint=_likely_causes(self._endpoint()),
                )
            )
        elif now_ns >= self._next_note_ns:
            first = self._next_note_ns - self._began_ns <= _FIRST_NOTE_S * 1e9
            self._next_note_ns = now_ns + int(_NOTE_EVERY_S * 1e9)
            waited_s = (now_ns - self._began_ns) / 1e9
            text = f"waiting at {self._endpoint()}: {self._gathering.missing()} ({waited_s:.0f} s)"
            self._board.note(text)
            if first and self._meeting.paste is not None:
                command = self._meeting.paste.replace("ENDPOINT", self._endpoint())
                self._board.note(f"on each other node: {command}")
            self._broadcast(Waiting(text=text))

    def _endpoint(self) -> str:
        address, port = self.listener.getsockname()[:2]
        if address in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            address = self._meeting.host or self._card.host
        return format_endpoint(address, port)

    # ---- connections -----------------------------------------------------------------------

    def _accept(self) -> None:
        strangers = sum(not link.is_open for link in self._links.values())
        while strangers < _MOST_STRANGERS:
            try:
                connection, _ = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # out of descriptors: those that wait stay in the queue
                self._board.note(f"a connection could not be taken: {error.strerror}")
                return
            number = next(self._counter)
            self._links[number] = Link(connection, HeadHandshake(self._secret))
            self._board.add(self._links[number], partial(self._on_ready, number))
            strangers += 1

    def _on_ready(self, number: int) -> None:
        link = self._links.get(number)
        if link is None:
            return
        for message in link.receive():
            self._hear(number, message)
        if link.closed is not None:
            self._drop(number, link.closed)
        elif number in self._links:
            self._board.settle(link)

    def _hear(self, number: int, message: Message) -> None:
        if isinstance(message, Join) and not self._met:
            self._take_in(number, message)
            return
        if number not in self._nodes or getattr(message, "generation", None) != self._generation:
            return
        match message:
            case Failed():
                shift_times(message.outcome, -self._links[number].ahead_ns)
                self._outcomes.setdefault(number, message.outcome)
                self._end(number, message, signum=int(message.outcome.get("signum") or 0))
            case Idle():
                shift_times(message.outcome, -self._links[number].ahead_ns)
                message.outcome["idle"] = True
                self._outcomes[number] = message.outcome
                self._advance_if_all_idle()
            case Finished():
                self._finished.add(number)
                self._leave_if_all_finished()

    def _take_in(self, number: int, card: Join) -> None:
        try:
            self._gathering.join(number, card)
        except TooMany as error:
            self._refuse(number, error)
        except MeshrunError as error:
            self._fail(error)
        if self._gathering.is_complete:
            self._meet()

    def _meet(self) -> None:
        self._met = True
        order = self._gathering.order()
        cards = [self._card, *(self._gathering.joined[number] for number in order)]
        self._nodes = {number: rank for rank, number in enumerate(order, 1)}
        self._board.selector.unregister(self.listener)
        for number in [number for number in self._links if number not in self._nodes]:
            self._drop(number, "every node is there")
        hosts, counts = [card.host for card in cards], [card.nproc for card in cards]
        port = self.listener.getsockname()[1]
        for number, rank in self._nodes.items():
            self._send(
                number,
                Welcome(
                    node_rank=rank,
                    hosts=hosts,
                    nproc_per_node=counts,
                    run_id=self._run_id,
                    store_port=port,
                ),
            )
        own_address = self.listener.getsockname()[0]
        if order:
            own_address = self._links[order[0]].own_address
        self._board.news.append(
            Met(
                node_rank=0,
                hosts=tuple(hosts),
                nproc_per_node=tuple(counts),
                run_id=self._run_id,
                store_address=own_address,
                store_port=port,
                own_address=own_address,
                at_ns=time.monotonic_ns(),
            )
        )

    def _drop(self, number: int, why: str) -> None:
        """A connection is gone, or is to go."""
        link = self._links.pop(number)
        address = link.their_address
        self._board.close(link, why)
        if not self._met:
            if link.was_refused and (address, why) not in self._told:
                self._told.add((address, why))
                self._board.note(f"{address} was not let in: {why}")
            self._gathering.leave(number)
            self._board.selector.modify(self.listener, selectors.EVENT_READ, self._accept)
            return
        rank = self._nodes.pop(number, None)
        if rank is None or self._over:
            return
        now_ns = time.monotonic_ns()
        host = self._gathering.joined[number].host
        self._board.news.append(NodeLost(node_rank=rank, host=host, why=why, at_ns=now_ns))
        self._broadcast(
            End(generation=self._generation, why=f"node {rank} ({host}) was lost", signum=0)
        )
        self._ending = True
        self._advance_if_all_idle()

    # ---- deciding --------------------------------------------------------------------------

    def _end(self, number: int, message: Failed, *, signum: int) -> None:
        """One node's ranks are over before they are done: all others' are to end, once."""
        if self._ending or self._over:
            return
        self._ending = True
        why = str(message.outcome.get("headline") or "a rank failed")
        end = End(generation=self._generation, why=why, signum=signum)
        for other in self._nodes:
            if other != number:
                self._send(other, end)
        if number in self._nodes:
            self._board.news.append(
                OthersFailed(why=end.why, signum=signum, at_ns=time.monotonic_ns())
            )

    def _leave_if_all_finished(self) -> None:
        if self._own_finished and self._finished >= set(self._nodes):
            self._broadcast(MayLeave(generation=self._generation))
            self._board.news.append(OthersFinished(at_ns=time.monotonic_ns()))

    def _advance_if_all_idle(self) -> None:
        idle = {number for number, outcome in self._outcomes.items() if outcome.get("idle")}
        if self._own_idle and idle >= set(self._nodes):
            self._own_idle = False
            outcomes = tuple(self._outcomes.values())
            self._board.news.append(AllIdle(outcomes=outcomes, at_ns=time.monotonic_ns()))

    def _fail(self, error: MeshrunError) -> None:
        self._deadline_ns = None
        for number in list(self._links):
            self._refuse(number, error)
        self._board.news.append(MeetingFailed(error=error, at_ns=time.monotonic_ns()))

    def _refuse(self, number: int, error: MeshrunError) -> None:
        if number in self._links:
            refused = Refused(message=error.message, hint=error.hint, exit_code=error.exit_code)
            self._send(number, refused)

    def _send(self, number: int, message: Message) -> None:
        link = self._links[number]
        link.send(message)
        self._board.settle(link)

    def _broadcast(self, message: Message) -> None:
        for number, link in self._links.items():
            if link.is_open and (number in self._nodes or not self._met):
                self._send(number, message)

    def close(self) -> None:
        """Have what was said arrive, as far as the others still listen, and let them go."""
        deadline = time.monotonic() + _GOODBYE_S
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                self._board.drop(link)
                selector.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE)
                link.end_writing()
            while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    link = _as_link(key.fileobj)
                    link.receive()
                    link.end_writing()
                    if link.closed is not None:
                        selector.unregister(link)
                    elif not link.wants_to_write:
                        selector.modify(link, selectors.EVENT_READ)
        for link in self._links.values():
            link.close("the launch is over")
        if not self._met:
            self._board.selector.unregister(self.listener)


def _as_link(file: object) -> Link:
    assert isinstance(file, Link)  # noqa: S101 - nothing else was registered
    return file


def _likely_causes(endpoint: str) -> str:
    return (
        f"on the missing nodes: was meshrun started? can they reach {endpoint} (a firewall, another"
        " network)? with the same --rdzv-id and MESHRUN_SECRET?"
    )
