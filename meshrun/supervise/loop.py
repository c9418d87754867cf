"""The launcher's one loop: waits on descriptors, turns them into events, carries out actions."""

from __future__ import annotations

import os
import select
import selectors
import shutil
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from meshrun import wire
from meshrun.environment import THREAD_VARIABLES, Session, rank_environment
from meshrun.errors import InternalError
from meshrun.events import (
    Event,
    LaunchBegan,
    RankExited,
    RankStarted,
    SignalArrived,
    StartFailed,
    TimePassed,
    ZygoteGone,
)
from meshrun.host.descriptors import allow_descriptors
from meshrun.host.folders import make_private_folders
from meshrun.host.processes import become_subreaper, end_children, list_children
from meshrun.plan import LaunchPlan, RankPlan
from meshrun.supervise.console import Console, RankStream
from meshrun.supervise.label import rank_label
from meshrun.supervise.state import (
    Action,
    EndZygote,
    OpenGate,
    RankState,
    Signal,
    StartAll,
    StartOver,
    State,
    WakeAt,
    step,
)
from meshrun.supervise.zygote import Zygote

Watch = Callable[[Event, State, Console], None]
_READ_BYTES = 256 * 1024
_ORDERS_AHEAD = 16
"""Start orders the zygote has not answered; more could fill both directions of its socket."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Loop:
    """One launch, from the zygote's start until nothing of it is left."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        session: Session,
        store_listener: socket.socket,
        console: Console,
        watch: Watch,
    ) -> None:
        self._plan = plan
        self._session = session
        self._listener = store_listener
        self._console = console
        self._watch = watch
        self._ranks = {rank.rank: rank for rank in plan.ranks_of_node()}
        allow_descriptors(2 * len(self._ranks) + 64)
        self.state = State(
            shutdown_timeout_s=plan.shutdown_timeout_s,
            ranks={rank: RankState() for rank in self._ranks},
        )
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, RankStream] = {}
        self._reading = True
        self._orders: deque[RankPlan] = deque()
        self._wake_at_ns: int | None = None
        self._signals: deque[int] = deque()
        self._not_ours = frozenset(list_children())
        become_subreaper()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_signals)
        self._before = self._catch_signals()  # from before there is anything to end
        self._zygote = self._start_zygote(plan.start_method)

    def run(self) -> State:
        """Run until everything has ended and every byte is written; return the last state."""
        try:
            self._happen(LaunchBegan(at_ns=time.monotonic_ns()))
            while not self.state.over:
                self._turn()
            end_children(grace_s=0.0, spare=self._not_ours)
            self._drain()
        finally:
            self._restore_signals(self._before)
            shutil.rmtree(self._session.scratch_dir, ignore_errors=True)
            self._zygote.close()
            self._selector.close()
        return self.state

    # ---- events ----------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen and deal with it."""
        self._choose_what_to_wait_for()
        for key, _ in self._selector.select(self._timeout_s()):
            key.data()
        self._console.show_partials()
        if self._wake_at_ns is not None and time.monotonic_ns() >= self._wake_at_ns:
            self._wake_at_ns = None
            self._happen(TimePassed(at_ns=time.monotonic_ns()))
        self._console.note_lost_output()
        if self._console.reader_is_gone and signal.SIGPIPE not in self.state.signals:
            self._happen(SignalArrived(signum=signal.SIGPIPE, at_ns=time.monotonic_ns()))

    def _happen(self, event: Event) -> None:
        self.state, actions = step(self.state, event)
        self._watch(event, self.state, self._console)
        for action in actions:
            self._act(action)

    def _timeout_s(self) -> float | None:
        times = [at for at in (self._wake_at_ns, self._console.next_partial_ns) if at is not None]
        if not times:
            return None
        return max(0.0, (min(times) - time.monotonic_ns()) / 1e9)

    def _choose_what_to_wait_for(self) -> None:
        """Wait for slow readers of our output, and for ranks only while they keep up."""
        waiting = {outlet.fileno(): outlet for outlet in self._console.waiting}
        for fd, key in list(self._selector.get_map().items()):
            if key.events == selectors.EVENT_WRITE and fd not in waiting:
                self._selector.unregister(fd)
        for fd, outlet in waiting.items():
            if not outlet.needs_select:
                outlet.flush()
            elif fd not in self._selector.get_map():
                self._selector.register(fd, selectors.EVENT_WRITE, outlet.flush)
        if self._reading == self._console.is_full:
            self._reading = not self._reading
            for fd in self._streams:
                if self._reading:
                    self._selector.register(fd, selectors.EVENT_READ, partial(self._on_output, fd))
                else:
                    self._selector.unregister(fd)

    def _on_output(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        self._console.feed(self._streams[fd], data)
        if not data:
            self._close_stream(fd)

    def _close_stream(self, fd: int) -> None:
        del self._streams[fd]
        if self._reading:
            self._selector.unregister(fd)
        os.close(fd)

    def _on_control(self) -> None:
        message = self._zygote.receive()
        if message is None:
            self._selector.unregister(self._zygote.control)
            self._on_reports()
            status = self._zygote.wait()
            self._happen(ZygoteGone(wait_status=status, at_ns=time.monotonic_ns()))
            return
        if isinstance(message, RankExited):
            self._on_reports()  # what a rank told before its end comes first
        if isinstance(message, RankStarted | StartFailed):
            self._send_orders(1)
        if isinstance(message, wire.ToZygote):
            raise InternalError(f"the zygote sent an order: {message}")
        self._happen(message)

    def _on_reports(self) -> None:
        while (message := self._zygote.receive_report()) is not None:
            if isinstance(message, wire.ToZygote):
                raise InternalError(f"a rank sent an order: {message}")
            self._happen(message)

    def _on_signals(self) -> None:
        os.read(self._woken, 4096)
        while self._signals:
            signum = self._signals.popleft()
            self._happen(SignalArrived(signum=signum, at_ns=time.monotonic_ns()))

    # ---- actions ---------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case StartAll():
                self._start_all()
            case StartOver():
                self._start_over()
            case Signal(ranks=ranks, signum=signum, whole_group=whole_group):
                self._zygote.send(
                    wire.SignalRanks(ranks=list(ranks), signum=signum, whole_group=whole_group)
                )
            case EndZygote(grace_s=grace_s, by_force=by_force):
                self._zygote.send(wire.Finish(grace_s=grace_s))
                if by_force:
                    self._zygote.kill()
            case OpenGate():
                self._zygote.open_gate()
            case WakeAt(at_ns=at_ns):
                self._wake_at_ns = at_ns

    def _start_zygote(self, method: Any) -> Zygote:
        zygote = Zygote(
            self._plan.program,
            method=method,
            preload=self._plan.preload,
            scratch_dir=self._session.scratch_dir,
        )
        self._selector.register(zygote.control, selectors.EVENT_READ, self._on_control)
        self._selector.register(zygote.reports, selectors.EVENT_READ, self._on_reports)
        return zygote

    def _start_over(self) -> None:
        self._selector.unregister(self._zygote.control)
        self._selector.unregister(self._zygote.reports)
        self._zygote.wait()
        self._zygote.close()
        self._zygote = self._start_zygote("exec")

    def _start_all(self) -> None:
        # Made only now, when the zygote can remove it should we be killed.
        make_private_folders(
            self._session.scratch_dir, [str(rank.local_rank) for rank in self._ranks.values()]
        )
        port = self._session.master_port
        self._zygote.send(wire.StartStore(port=port), [self._listener.fileno()])
        self._listener.close()
        self._orders.extend(self._ranks.values())
        self._send_orders(_ORDERS_AHEAD)

    def _send_orders(self, count: int) -> None:
        for _ in range(min(count, len(self._orders))):
            self._send_order(self._orders.popleft())

    def _send_order(self, rank: RankPlan) -> None:
        environment = rank_environment(self._plan, rank, self._session, os.environ)
        order = wire.StartRank(
            rank=rank.rank,
            environment={**_own_threads(os.environ), **environment},
            unset=[
                name
                for name in THREAD_VARIABLES
                if name not in os.environ and name not in environment
            ],
            coordinate=list(rank.coordinate),
        )
        label = rank_label(self._plan.layout, rank.rank) if self._plan.prefix else ""
        theirs = []
        for to_stderr in (False, True):
            ours, end = os.pipe()
            os.set_blocking(ours, False)
            theirs.append(end)
            self._streams[ours] = self._console.stream(
                rank=rank.rank, label=label, to_stderr=to_stderr
            )
            if self._reading:
                self._selector.register(ours, selectors.EVENT_READ, partial(self._on_output, ours))
        self._zygote.send(order, theirs)
        for end in theirs:
            os.close(end)

    # ---- the end ---------------------------------------------------------------------------

    def _drain(self) -> None:
        """Bring out what the ranks wrote before they ended; a second signal gives that up."""
        while (self._streams or self._console.waiting) and len(self.state.signals) < 2:
            self._choose_what_to_wait_for()
            if not self._reading or not self._streams:
                if not self._console.waiting:
                    continue
                for key, _ in self._selector.select():
                    key.data()
                continue
            for fd in list(self._streams):
                if select.select([fd], [], [], 0)[0]:
                    self._on_output(fd)
                else:  # somebody we may not end holds it open
                    self._console.feed(self._streams[fd], b"")
                    self._close_stream(fd)
        for fd in list(self._streams):
            self._close_stream(fd)

    def _catch_signals(self) -> dict[int, Any]:
        before: dict[int, Any] = {}
        for signum in _STOP_SIGNALS:
            before[signum] = signal.getsignal(signum)
            if before[signum] != signal.SIG_IGN:  # nohup stays nohup
                signal.signal(signum, lambda number, _: self._signals.append(number))
        before[-1] = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        return before

    def _restore_signals(self, before: Mapping[int, Any]) -> None:
        signal.set_wakeup_fd(before[-1])
        for signum in _STOP_SIGNALS:
            signal.signal(signum, before[signum])
        os.close(self._woken)
        os.close(self._wake)


def _own_threads(env: Mapping[str, str]) -> dict[str, str]:
    """The user's own values of the variables that the zygote was started without."""
    return {name: env[name] for name in THREAD_VARIABLES if name in env}
