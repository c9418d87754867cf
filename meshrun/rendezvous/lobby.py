"""Where node 0's launcher takes the others in, until every node is there."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from functools import partial

from meshrun.errors import MeshrunError, RendezvousError
from meshrun.host.interfaces import address_in
from meshrun.plan.rendezvous_config import Meeting, format_endpoint
from meshrun.protocol.events import MeetingFailed
from meshrun.rendezvous.connection import Link
from meshrun.rendezvous.connections import Switchboard
from meshrun.rendezvous.coordinator import BEAT_S, SILENT_S, Head, say_goodbye
from meshrun.rendezvous.deadline import Patience
from meshrun.rendezvous.duplicate_coordinator import Rival
from meshrun.rendezvous.elastic_coordinator import ElasticHead
from meshrun.rendezvous.expected_nodes import Gathering, TooMany
from meshrun.rendezvous.membership import Fit, fit_without_mesh
from meshrun.rendezvous.messages import GaveUp, Join, Message, Refused, Waiting
from meshrun.rendezvous.unauthenticated import Strangers

_OTHER_LAUNCH_S = 5.0
"""How long those that cannot join are not taken for those that are missing."""


class WaitingRoom:
    """Node 0 of a launch until all have joined; then it hands over to a Head.

    Args:
        meeting: How many there are to be, and how long they may take.
        card: What this node says of itself.
        nnodes: How many it is, where not as many as there may be.
        listener: Where the others connect; once all are there, the ranks' store takes it over.
        secret: What only launchers of this launch know.
        run_id: The name of the launch, which the others are told.
        board: Where links are watched.
        hand_over: Called with the head once every node is there.
        fit: Solves the mesh over nodes.
        rival: Knocks where another node 0 may be, with ``card``.
    """

    def __init__(
        self,
        meeting: Meeting,
        card: Join,
        *,
        nnodes: int | None = None,
        listener: socket.socket,
        secret: bytes,
        run_id: str,
        board: Switchboard,
        hand_over: Callable[[Head], None],
        fit: Fit = fit_without_mesh,
        rival: Rival | None = None,
    ) -> None:
        self._listener = listener
        self._meeting, self._card, self._secret, self._run_id = meeting, card, secret, run_id
        self._board, self._hand_over, self._rival, self._fit = board, hand_over, rival, fit
        self._gathering = Gathering(nnodes=nnodes or meeting.nnodes, own=card, hosts=meeting.hosts)
        self._links: dict[int, Link] = {}
        """To those who have said what they are."""
        self._counter = itertools.count()
        self._patience = Patience(meeting.timeout_s)
        self._next_beat_ns = time.monotonic_ns()
        self._failure: MeshrunError | None = None
        self._left_to_tell = meeting.nnodes - 1
        """How many have not heard of the failure."""
        self._has_shown_command = False
        self._strangers = Strangers(listener, secret=secret, board=board, come=self._come)

    def begin(self) -> None:
        """Look whether anybody is missing: a range of nodes may end at one."""
        if self._gathering.is_complete:
            self._meet()

    def tell(self, message: Message) -> None:
        """There is nobody to be told yet."""

    def give_up(self, word: GaveUp) -> None:
        """Tell those who are there, and those who come while this goes on, that it was in vain."""
        self._fail(word.as_error())

    @property
    def is_through(self) -> bool:
        """Whether all have been told that there will be no launch."""
        return self._left_to_tell <= 0

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`look` has something to do."""
        knock_ns = self._rival.next_look_ns if self._rival is not None else None
        return self._next_beat_ns if knock_ns is None else min(knock_ns, self._next_beat_ns)

    def look(self) -> None:
        """Do what is due: beats, notes, time-outs."""
        if self._rival is not None and (error := self._rival.look()) is not None:
            self._stop_knocking()
            self._fail(error)
        now_ns = time.monotonic_ns()
        if now_ns < self._next_beat_ns:
            return
        self._next_beat_ns = now_ns + int(BEAT_S * 1e9)
        self._strangers.look()
        for number, link in list(self._links.items()):
            link.beat()
            self._board.settle(link)
            if now_ns - link.heard_ns > self._meeting.node_timeout_s * 1e9:
                self._drop(number, "it fell silent")
        if self._failure is None:
            self._wait_on()

    def _wait_on(self) -> None:
        if self._patience.is_over and self._are_enough:
            self._meet()  # who is missing may come later
        elif self._patience.is_over:
            self._left_to_tell = 0  # all are as late
            self._fail(
                RendezvousError(
                    f"after {self._meeting.timeout_s:.0f} s {self._gathering.missing()}",
                    hint=self._doubt(),
                )
            )
        elif 0 < self._gathering.left <= len(others := self._of_other_launches()):
            self._fail(
                RendezvousError(
                    f"{self._gathering.missing()}, and {', '.join(others[:8])} has another"
                    " --rdzv-id or MESHRUN_SECRET",
                    hint="both are the same on every node of a launch; launches at one time have"
                    " endpoints of their own",
                )
            )
        elif self._patience.takes_note():
            self._note_missing()

    def _doubt(self) -> str:
        """Return what may be wrong if nodes are missing in the end."""
        if self._rival is not None:  # it has not reached itself there, nor anybody else
            return (
                f"{self._meeting.endpoint} leads to another machine than {self._card.host}, which"
                " is node 0: --rdzv-endpoint HOST:PORT on every node, with an address of node 0"
            )
        return (
            f"on the missing nodes: was meshrun started? can they reach {self._endpoint()}"
            " (a firewall, another network)? with the same --rdzv-id and MESHRUN_SECRET?"
        )

    def _of_other_launches(self) -> list[str]:
        """Return where launchers are that seem to be meant for this launch, and cannot join it."""
        meeting = self._meeting
        wait_s = meeting.node_timeout_s if meeting.is_secret else _OTHER_LAUNCH_S
        return self._strangers.of_other_launches(wait_s)

    @property
    def _are_enough(self) -> bool:
        least, present = self._meeting.least_nodes, 1 + len(self._gathering.joined)
        return least is not None and present >= least

    def _note_missing(self) -> None:
        text = f"waiting at {self._endpoint()}: {self._gathering.missing()} ({self._patience})"
        self._board.note(text)
        if self._meeting.paste is not None and not self._has_shown_command:
            self._has_shown_command = True
            command = self._meeting.paste.replace("ENDPOINT", self._endpoint())
            self._board.note(f"on each other node: {command}")
        for link in self._links.values():
            link.send(Waiting(text=text))
            self._board.settle(link)

    def _endpoint(self) -> str:
        name = self._listener.getsockname()
        address, port = address_in(name), name[1]
        if address in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            address = self._meeting.host or self._card.host
        return format_endpoint(address, port)

    def _come(self, link: Link, said: list[Message]) -> None:
        number = next(self._counter)
        self._links[number] = link
        if link.closed is None:
            self._board.add(link, partial(self._on_ready, number))
        self._heed(number, link, said)

    def _on_ready(self, number: int) -> None:
        link = self._links.get(number)
        if link is not None:
            self._heed(number, link, link.receive())

    def _heed(self, number: int, link: Link, said: list[Message]) -> None:
        for message in said:
            if self._failure is not None and isinstance(message, Join | GaveUp):
                self._refuse(number, self._failure)
                self._left_to_tell -= 1
            elif isinstance(message, Join):
                self._take_in(number, message)
            elif isinstance(message, GaveUp) and self._meeting.is_elastic:
                self._refuse(number, message.as_error())  # it waits for an answer
                self._drop(number, message.reason)
                self._go_on_without(message)
            elif isinstance(message, GaveUp):
                self._fail(message.as_error())
        if self._links.get(number) is link:
            if link.closed is not None:
                self._drop(number, link.closed)
            else:
                self._board.settle(link)

    def _take_in(self, number: int, card: Join) -> None:
        if card.knock and card.knock == self._card.knock:
            self._stop_knocking()  # it has reached itself
            return
        self._forget_earlier(card.host)
        if self._meeting.is_elastic and card.node_rank is None:
            self._drop(number, "the first nodes are about to meet")  # it tries again
            return
        try:
            self._gathering.join(number, card)
        except TooMany as error:
            self._refuse(number, error)
        except MeshrunError as error:
            self._fail(error)
        if self._failure is None and self._gathering.is_complete:
            self._meet()

    def _go_on_without(self, word: GaveUp) -> None:
        """Nodes may come and go, and this one is gone before it came."""
        self._board.note(f"{word.host} cannot take part: {word.reason}")
        self._gathering.left_out += 1
        if self._are_enough and self._gathering.is_complete:
            self._meet()

    def _forget_earlier(self, host: str) -> None:
        """A host that was cut off may come again before its earlier connection is given up."""
        silent_since_ns = time.monotonic_ns() - int(SILENT_S * 1e9)
        for number, card in list(self._gathering.joined.items()):
            if card.host == host and self._links[number].heard_ns < silent_since_ns:
                self._drop(number, "its host came again")

    def _meet(self) -> None:
        order = self._gathering.order()
        links = {rank: self._links.pop(number) for rank, number in enumerate(order, 1)}
        cards = [self._card, *(self._gathering.joined[number] for number in order)]
        for number in list(self._links):
            self._drop(number, "every node is there")
        self._strangers.close("every node is there")
        self._stop_knocking()
        for link in links.values():
            self._board.drop(link)
        self._hand_over(
            ElasticHead(
                links,
                cards,
                meeting=self._meeting,
                listener=self._listener,
                secret=self._secret,
                run_id=self._run_id,
                fit=self._fit,
                board=self._board,
            )
        )

    def _stop_knocking(self) -> None:
        rival, self._rival = self._rival, None
        if rival is not None:
            rival.close()

    def _drop(self, number: int, why: str) -> None:
        """A connection is gone, or is to go."""
        self._board.close(self._links.pop(number), why)
        self._gathering.leave(number)

    def _fail(self, error: MeshrunError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for number in self._links:
            self._refuse(number, error)
            self._left_to_tell -= 1
        self._board.news.append(MeetingFailed(error=error, at_ns=time.monotonic_ns()))

    def _refuse(self, number: int, error: MeshrunError) -> None:
        link = self._links[number]
        link.send(Refused.of(error))
        self._board.settle(link)

    def close(self) -> None:
        """Tell those who wait that there will be no launch."""
        self._stop_knocking()
        self._fail(RendezvousError(f"{self._card.host} ended before all had joined"))
        self._strangers.close("the launch is over")
        say_goodbye(self._links.values(), self._board)
