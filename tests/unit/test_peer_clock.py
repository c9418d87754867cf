"""How far the clock of another machine is ahead of ours."""

from __future__ import annotations

from meshrun.rendezvous.peer_clock import PeerClock

MS, S = 1_000_000, 1_000_000_000


def test_the_shortest_round_trip_counts_until_the_clocks_may_have_drifted() -> None:
    clock, ahead_ns = PeerClock(), 100 * S
    known = []
    for began_ns, there_ns, back_ns in [(S, 3 * MS, MS), (2 * S, MS, MS), (3 * S, 9 * MS, MS)]:
        arrived_ns = began_ns + there_ns
        clock.measure(began_ns, arrived_ns + ahead_ns, arrived_ns + back_ns)
        known.append((clock.ahead_ns - ahead_ns, clock.is_known))
    late_ns = 200 * S
    clock.measure(late_ns, late_ns + 9 * MS + ahead_ns, late_ns + 10 * MS)

    assert known == [(MS, False), (0, True), (0, True)]
    assert clock.ahead_ns - ahead_ns == 4 * MS
    assert clock.unsure_ns(late_ns + 10 * MS) == 5 * MS
