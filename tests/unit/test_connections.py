"""What the connections of a launcher share."""

from __future__ import annotations

from meshrun.host.reactor import Reactor
from meshrun.rendezvous.connections import Connections


def test_lost_time_is_no_part_of_a_deadline() -> None:
    """Nor does what was lost before count for one that begins later."""
    with Reactor() as reactor:
        connections = Connections(reactor, note=lambda _: None)
        first = connections.deadline(60)
        reactor.skip(50 * 10**9)
        second = connections.deadline(60)

    assert round(second.waited_s - first.waited_s) == 50
