"""Detects a second node 0 by probing an endpoint that is not an address of this machine."""

from __future__ import annotations

from msgspec.structs import replace

from meshrun.errors import MeshrunError
from meshrun.protocol.events import JoinFailed
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.participant import Participant
from meshrun.rendezvous.this_node import ThisNode

_ANSWER_TAKES_S = 3600.0
"""How long it probes after the join timeout: the lobby times out first, with a better error."""


class DuplicateCoordinator:
    """Connects to the endpoint like a participant until it gets an answer.

    The answer may come from this node itself, behind a translated address or that of a service;
    the lobby then recognizes its own message. Failed attempts print nothing, as most endpoints
    never answer.
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
