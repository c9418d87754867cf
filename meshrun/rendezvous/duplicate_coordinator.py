"""Whether another node is the first too: node 0 knocks at an endpoint that is not its own."""

from __future__ import annotations

from dataclasses import replace

from meshrun.errors import MeshrunError
from meshrun.plan.rendezvous_config import RendezvousConfig
from meshrun.protocol.events import MeetingFailed
from meshrun.rendezvous.connections import Connections
from meshrun.rendezvous.messages import Join
from meshrun.rendezvous.participant import Participant

_ANSWER_TAKES_S = 3600.0
"""How much longer than the meeting it knocks: who listens gives up first, with a better error."""


class DuplicateCoordinator:
    """Knocks at the endpoint as a participant would, until somebody answers.

    That may be this node itself, where the address is a translated or a service's one; the node
    recognises its own card. What comes of the tries is said to nobody: most endpoints never answer.

    Args:
        meeting: Where the endpoint is.
        info: What this node says of itself; its ``knock`` is drawn for this.
        secret: What only launchers of this launch know.
        board: That of this node, whose selector watches the knocking too.
    """

    def __init__(
        self, meeting: RendezvousConfig, info: Join, *, secret: bytes, board: Connections
    ) -> None:
        self._board = Connections(board.selector, note=lambda _: None)
        self._participant = Participant(
            replace(meeting, timeout_s=meeting.timeout_s + _ANSWER_TAKES_S),
            info,
            secret=secret,
            board=self._board,
            where=lambda _: None,
        )

    @property
    def next_look_ns(self) -> int | None:
        """When :meth:`look` has something to do."""
        return self._participant.next_look_ns

    def look(self) -> MeshrunError | None:
        """Do what is due; return what another first node said, if there is one."""
        self._participant.look()
        while self._board.news:
            if isinstance(news := self._board.news.popleft(), MeetingFailed):
                return news.error
        return None

    def close(self) -> None:
        """Knock no more."""
        self._participant.close()
