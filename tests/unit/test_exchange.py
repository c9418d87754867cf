"""One message to a group's ranks, which a signal or a lost rank may interrupt."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest

from meshrun.api.exchange import Exchange, GroupRank, TerminalOwner
from meshrun.host.reactor import Reactor
from meshrun.worker import serve_tests
from meshrun.worker.call_channel import CallDone, Channel, packed


class _Signalled(Channel):
    """A channel that sends this process a signal after each message."""

    def send_now(self, data: memoryview) -> memoryview:
        left = super().send_now(data)
        os.kill(os.getpid(), signal.SIGALRM)
        return left


def test_what_a_signal_handler_raises_while_a_message_is_sent_ends_the_call() -> None:
    """``TimeoutError`` is an ``OSError``, as are the errors of a lost rank."""

    def give_up(*_: object) -> None:
        raise TimeoutError("the caller's own limit")

    here, there = socket.socketpair()
    member = GroupRank(rank=0, pid=os.getpid(), label="rank 0", channel=_Signalled(here))
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with Reactor() as reactor:
            exchange = Exchange([member], reactor, TerminalOwner())
            with pytest.raises(TimeoutError, match="the caller's own limit"):
                exchange.send(b"call", None)
            Channel(there).send(answer := CallDone(b"its answer"))
            reactor.run_until(lambda: exchange.is_done)
    finally:
        signal.signal(signal.SIGALRM, before)
        here.close()
        there.close()
    assert exchange.by_member == {member: answer}


def test_a_lost_rank_is_noticed_when_its_answer_is_received() -> None:
    here, there = socket.socketpair()
    there.close()
    member = GroupRank(rank=0, pid=0, label="rank 0", channel=Channel(here))
    with Reactor() as reactor:
        exchange = Exchange([member], reactor, TerminalOwner())
        exchange.send(b"call", None)
        reactor.run_until(lambda: exchange.is_done)
    here.close()

    assert exchange.is_rank_gone
    assert exchange.missing == (member,)


_LONG = CallDone(b"x" * 4_000_000)
"""A message that no socket can hold."""


def test_long_messages_arrive_whole() -> None:
    here, there = socket.socketpair()
    member = GroupRank(rank=0, pid=0, label="rank 0", channel=Channel(here))

    def echo() -> None:
        rank = Channel(there)
        rank.send(rank.receive())

    (thread := threading.Thread(target=echo)).start()
    with here, there, Reactor() as reactor:
        exchange = Exchange([member], reactor, TerminalOwner())
        exchange.send(_LONG, None)
        reactor.run_until(lambda: exchange.is_done)
        thread.join()

    assert exchange.by_member == {member: _LONG}


@pytest.mark.parametrize("stopped", ["before it reads the call", "while it answers"])
def test_a_rank_that_is_stopped_during_a_message_does_not_hold_up_the_time_limit(
    stopped: str,
) -> None:
    here, there = socket.socketpair()
    member = GroupRank(rank=0, pid=0, label="rank 0", channel=Channel(here))
    with here, there, Reactor() as reactor:
        exchange = Exchange([member], reactor, TerminalOwner())
        if stopped == "while it answers":
            there.sendall(packed("answer")[:-1])
        exchange.send(_LONG, 0.01)
        reactor.run_until(lambda: exchange.is_done)

    assert exchange.reason == "timed out after 0.01 s"
    assert exchange.missing == (member,)


def test_a_rank_ends_with_the_session_that_it_runs_tests_for() -> None:
    """It reports no error of its own, which would hide why the session has ended."""
    here, there = socket.socketpair()
    here.close()
    with there:
        serve_tests.serve(Channel(there))
