"""What the event loop calls in a turn, in which order, and when, by a fake clock."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrun.errors import HostError
from meshrun.host.descriptors import WriteBuffer
from meshrun.host.reactor import Reactor, Timer

S = 1_000_000_000


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 100 * S

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    """Give the reactor's clock."""
    return Clock()


@pytest.fixture
def reactor(clock: Clock) -> Iterator[Reactor]:
    """Give a reactor; ``turn()`` below never lets it wait."""
    with Reactor(clock_ns=clock) as made:
        yield made


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give both ends of a connection."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def turn(reactor: Reactor) -> None:
    """Take a turn without a wait."""
    reactor.turn(most_s=0)


def test_a_turn_calls_readers_then_polls_then_timers(
    reactor: Reactor, clock: Clock, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Each kind in the order in which calls were added or are due."""
    done: list[str] = []
    near, far = ends
    reactor.call_at(clock.now_ns, lambda: done.append("second"))
    reactor.call_at(clock.now_ns - 1, lambda: done.append("first"))
    reactor.call_at(clock.now_ns + 1, lambda: done.append("later"))
    reactor.each_turn(lambda: done.append("polls"))
    reactor.each_turn(lambda: done.append("polls second"))
    reactor.add_reader(near, lambda: done.append(near.recv(9).decode()))
    far.send(b"read")
    turn(reactor)
    turn(reactor)

    polls = ["polls", "polls second"]
    assert done == ["read", *polls, "first", "second", *polls]


def test_a_call_that_another_removes_or_cancels_is_not_made(
    reactor: Reactor, clock: Clock, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Even if both were ready or due in the same turn; a socket may be closed, then removed."""
    done: list[str] = []

    def receive(name: str, other: socket.socket) -> None:
        done.append(name)
        other.close()
        reactor.remove(other)

    near, far = ends
    reactor.add_reader(near, lambda: receive("near", far))
    reactor.add_reader(far, lambda: receive("far", near))
    near.send(b"1")
    far.send(b"1")
    first = reactor.call_at(clock.now_ns, lambda: second.cancel())  # noqa: PLW0108 - made later
    second = reactor.call_at(clock.now_ns, lambda: done.append("second"))
    turn(reactor)

    assert len(done) == 1
    assert (first.at_ns, second.at_ns) == (None, None)
    assert len(reactor.watched) == 1


def test_one_call_for_both_directions_is_called_once_a_turn(
    reactor: Reactor, ends: tuple[socket.socket, socket.socket]
) -> None:
    """Two different calls are both made; a writer may be removed alone, and more than once."""
    calls = count()
    done: list[str] = []
    near, far = ends
    far.send(b"1")

    def both() -> None:
        done.append(f"both {next(calls)}")

    reactor.add_reader(near, both)
    reactor.add_writer(near, both)
    turn(reactor)
    reactor.add_reader(near, lambda: done.append("read"))
    turn(reactor)
    reactor.remove_writer(near)
    turn(reactor)
    reactor.remove_writer(near)
    reactor.remove(near)
    reactor.remove(near)
    reactor.add_writer(near, lambda: done.append("write"))
    turn(reactor)
    reactor.remove_writer(near)

    assert done == ["both 0", "read", "both 1", "read", "write"]
    assert not reactor.watched


def test_a_timer_repeats_until_it_is_cancelled(reactor: Reactor, clock: Clock) -> None:
    """It is due at once at first; a late turn does not make up for missed calls."""
    done: list[int] = []
    timer = reactor.every(1.0, lambda: done.append(clock.now_ns // S))
    for seconds in (0, 0.5, 0.5, 3.5, 0.9, 0.1):
        clock.now_ns += int(seconds * S)
        turn(reactor)
    timer.cancel()
    clock.now_ns += 9 * S
    turn(reactor)

    assert done == [100, 101, 104, 105]
    assert reactor.next_ns is None


def test_a_call_that_is_due_again_at_once_waits_for_the_next_turn(
    reactor: Reactor, clock: Clock
) -> None:
    """So every turn ends."""
    done: list[int] = []

    def call() -> None:
        done.append(0)
        timer.move(clock.now_ns)

    timer = reactor.call_at(clock.now_ns, call)
    turn(reactor)
    assert len(done) == 1
    turn(reactor)
    assert len(done) == 2


def test_skipped_time_moves_all_timers(reactor: Reactor, clock: Clock) -> None:
    """Code that measures time by itself is notified."""
    done: list[str] = []
    skipped: list[int] = []
    reactor.on_skip(skipped.append)
    for seconds in (3, 1, 2):
        reactor.call_later(seconds, lambda seconds=seconds: done.append(f"{seconds} s"))
    moved = reactor.call_later(1, lambda: done.append("moved"))
    moved.move(clock.now_ns + 4 * S)
    reactor.skip(10 * S)
    clock.now_ns += 10 * S
    turn(reactor)
    assert (done, skipped) == ([], [10 * S])
    assert reactor.next_ns == clock.now_ns + S
    for _ in range(4):
        clock.now_ns += S
        turn(reactor)

    assert done == ["1 s", "2 s", "3 s", "moved"]


def test_a_wait_ends_when_something_is_due(reactor: Reactor, clock: Clock) -> None:
    """A timer, or the time that a part gives; but not before the least time."""
    slept: list[float | None] = []

    class Selector:
        def select(self, timeout_s: float | None) -> list[object]:
            slept.append(timeout_s)
            clock.now_ns += int((timeout_s or 0) * S) + S // 4  # late by a quarter of a second
            return []

        def close(self) -> None:
            pass

    due: list[int | None] = [None]
    slow = Reactor(clock_ns=clock, selector=Selector())  # type: ignore[arg-type]
    slow.wait()
    assert slow.due_ns == clock.now_ns  # nothing was due
    clock.now_ns += 3 * S  # stopped during a turn
    assert slow.count_lost_ns() == 3 * S
    assert slow.count_lost_ns(was_suspended=True) == 0
    slow.call_at(clock.now_ns + 8 * S, lambda: None)
    slow.wake_by(lambda: due[0])
    slow.wait(most_s=0.5)
    began_ns = clock.now_ns
    due[0] = began_ns + S
    slow.wait()
    assert (slow.asleep_ns, slow.due_ns, clock.now_ns) == (
        began_ns, began_ns + S, began_ns + S + S // 4,
    )  # fmt: skip
    assert slow.count_lost_ns() == 2 * S // 4
    slow.wait()
    slow.wait(least_s=0.125)
    assert slow.count_lost_ns(was_suspended=True) == 5 * S // 8

    assert slept == [None, 0.5, 1.0, 0.0, 0.125]


def test_turns_are_taken_until_a_condition_holds_or_a_timeout(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """By the machine's clock, with real waits."""
    near, far = ends
    said: list[bytes] = []
    with Reactor() as reactor:
        reactor.run_until(lambda: said, timeout_s=0.01)
        assert not said
        reactor.add_reader(near, lambda: said.append(near.recv(9)))
        reactor.call_later(0.01, lambda: far.send(b"come"))
        reactor.run_until(lambda: said)
        assert said == [b"come"]
        assert reactor.poll(0) == 0


def test_the_limit_of_epoll_is_not_reported_as_a_full_disk() -> None:
    """Although the error number, ENOSPC, is the same."""

    class Full(selectors.SelectSelector):
        def register(self, *_: object) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Reactor(selector=Full()) as reactor, pytest.raises(HostError) as raised:
        reactor.add_reader(0, lambda: None)

    assert raised.value.hint == "raise /proc/sys/fs/epoll/max_user_watches"


def test_a_descriptor_whose_number_is_reused_is_another(reactor: Reactor) -> None:
    done: list[str] = []
    old, write = os.pipe()
    reactor.add_reader(old, lambda: done.append("old"))
    reactor.remove(old)
    os.close(old)
    os.close(write)
    new, write = os.pipe()
    assert new == old
    reactor.add_reader(new, lambda: done.append("new"))
    os.write(write, b"1")
    turn(reactor)
    for each in (new, write):
        os.close(each)

    assert done == ["new"]


Step = tuple[str, int, int]


@given(
    st.lists(
        st.tuples(st.sampled_from(["at", "move", "cancel", "skip", "turn"]),
                  st.integers(0, 4), st.integers(0, 5)),
        max_size=40,
    )
)  # fmt: skip
def test_timers_behave_like_a_plain_list_of_times(steps: list[Step]) -> None:
    """Whatever is set, moved, cancelled or skipped."""
    clock = Clock()
    done: list[int] = []
    timers: list[Timer] = []
    times: list[int | None] = []
    with Reactor(clock_ns=clock) as reactor:
        for what, which, seconds in steps:
            at_ns, number = clock.now_ns + seconds * S, which % max(1, len(timers))
            if what == "at":
                timers.append(reactor.call_at(at_ns, partial(done.append, len(timers))))
                times.append(at_ns)
            elif what == "move" and timers:
                timers[number].move(at_ns)
                times[number] = at_ns
            elif what == "cancel" and timers:
                timers[number].cancel()
                times[number] = None
            elif what == "skip":
                reactor.skip(seconds * S)
                times = [each if each is None else each + seconds * S for each in times]
            elif what == "turn":
                clock.now_ns = at_ns
                done.clear()
                turn(reactor)
                due = [n for n, each in enumerate(times) if each is not None and each <= at_ns]
                assert sorted(done) == due
                assert [times[n] for n in done] == sorted(times[n] or 0 for n in due)
                times = [None if n in due else each for n, each in enumerate(times)]
            assert [timer.at_ns for timer in timers] == times
            assert reactor.next_ns == min((each for each in times if each), default=None)


def test_a_signal_starts_a_turn() -> None:
    """Whatever its handler does; a closed reactor leaves none of it behind."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    descriptors = os.listdir("/proc/self/fd")
    calls: list[str] = []
    try:
        with Reactor() as reactor:
            reactor.on_signal(lambda: calls.append("signal"))
            os.kill(os.getpid(), signal.SIGUSR1)
            reactor.run_until(lambda: calls, timeout_s=60)
            assert calls == ["signal"]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


@pytest.mark.parametrize(
    ("code", "is_reset"),
    [("ECONNRESET", True), ("ECONNABORTED", True), ("ETIMEDOUT", True), ("EPIPE", False)],
)
def test_an_ended_connection_was_reset_unless_its_other_end_was_closed(
    monkeypatch: pytest.MonkeyPatch, code: str, is_reset: bool
) -> None:
    """`ss -K` and a firewall abort a connection; the reader may be told only that it ended."""

    def write(*_: object) -> int:
        raise OSError(getattr(errno, code), code)

    with socket.socket() as connection, Reactor() as reactor:
        buffer = WriteBuffer(connection.fileno(), reactor)
        monkeypatch.setattr("os.write", write)
        buffer.write(b"x")
        monkeypatch.undo()

    assert buffer.is_broken
    assert buffer.is_reset is is_reset
