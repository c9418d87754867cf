"""The launcher's one loop: waits on descriptors, turns them into events, carries out actions."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from meshrun import wire
from meshrun.environment import Session, rank_environment
from meshrun.errors import InternalError
from meshrun.events import (
    Event,
    GenerationEnded,
    LaunchBegan,
    RankBeat,
    RankExited,
    RankStarted,
    SignalArrived,
    StartFailed,
    TimePassed,
    ZygoteGone,
)
from meshrun.host.descriptors import allow_descriptors
from meshrun.host.error_record import read_record, write_record
from meshrun.host.memory import MemoryWatch
from meshrun.host.processes import become_subreaper, end_children, handles_signal, list_children
from meshrun.host.run_folder import RunFolder
from meshrun.plan import LaunchPlan, RankPlan
from meshrun.request import StartMethod
from meshrun.result import signal_name
from meshrun.supervise.actions import (
    Action,
    EndGeneration,
    EndZygote,
    OpenGate,
    Signal,
    StartAll,
    StartOver,
    WakeAt,
)
from meshrun.supervise.console import Console
from meshrun.supervise.debugging import Debugging
from meshrun.supervise.evidence import Evidence, gather
from meshrun.supervise.known import RankState, State
from meshrun.supervise.live import Live
from meshrun.supervise.lookout import Lookout
from meshrun.supervise.merged_label import merged_label
from meshrun.supervise.orders import Orders, start_order
from meshrun.supervise.output import Output
from meshrun.supervise.signals import SignalQueue
from meshrun.supervise.slow_readers import SlowReaders
from meshrun.supervise.stacks import ZYGOTE
from meshrun.supervise.state import step
from meshrun.supervise.timers import Timers
from meshrun.supervise.zygote import Zygote

Watch = Callable[[Event, State, Console], None]


class Loop:
    """One launch, from the zygote's start until nothing of it is left."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        session: Session,
        folder: RunFolder,
        store_listener: socket.socket,
        console: Console,
        watch: Watch,
        live: Live | None = None,
    ) -> None:
        self._plan, self._session, self._folder = plan, session, folder
        self._listener, self._console = store_listener, console
        self._watch, self._live = watch, live
        self._ranks = {rank.rank: rank for rank in plan.ranks_of_node()}
        allow_descriptors(5 * len(self._ranks) + 64)
        self.state = State(
            shutdown_timeout_s=plan.request.shutdown_timeout_s,
            max_restarts=plan.request.max_restarts,
            ranks={rank: RankState() for rank in self._ranks},
        )
        self._selector = selectors.DefaultSelector()
        self._debugging = Debugging(plan, console, self._signal)
        self._lookout = Lookout(plan, console)
        self._output = Output(plan, console, self._selector, self._lookout.printed)
        self._orders = Orders(self._send_order)
        self._memory = MemoryWatch()
        self.evidence: Mapping[int, Evidence] = {}
        """What is known of ranks that failed, once the launch is over."""
        self._generation = 0
        self._wake_at_ns: int | None = None
        self._timers: Timers | None = None
        self._slow_readers = SlowReaders(console, self._selector)
        self._not_ours = frozenset(list_children())
        become_subreaper()
        # From before there is anything to end.
        self._signals = SignalQueue(
            plan.request.stop_signals,
            even_if_ignored=plan.request.stop_even_if_ignored,
            always=(signal.SIGQUIT, *plan.request.forwarded_signals),
        )
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        self._zygote = self._start_zygote(plan.start_method)

    def run(self) -> State:
        """Run until everything has ended and every byte is written; return the last state."""
        try:
            self._happen(LaunchBegan(at_ns=time.monotonic_ns()))
            while not self.state.over:
                self._turn()
            end_children(grace_s=0.0, spare=self._not_ours)
            self._output.finish(self._slow_readers.wait, lambda: len(self.state.signals) > 1)
            self.evidence = gather(self.state, self._output, self._lookout, self._memory)
        finally:
            if self._timers is not None:
                self._timers.close()
            self._zygote.close()
            self._lookout.close()
            self._output.close()
            self._debugging.close()
            self._selector.close()
        return self.state

    def let_signals_through(self) -> None:
        """Once there is nothing left to clear up, signals do again what they did before us."""
        self._signals.restore()

    # ---- events ----------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen and deal with it."""
        self._slow_readers.watch()
        self._output.pause_or_go_on()
        ready = self._selector.select(self._timeout_s())
        if self._debugging.look():
            return
        for key, _ in ready:
            key.data()
        self._output.read_files()
        if self._live is not None:
            self._live.look(self.state)
        self._console.show_waiting()
        if self._timers is not None:
            for text in self._timers.expire(self._zygote.pid):
                self._console.note(text)
        if (hung := self._lookout.look(self.state, self._zygote.pid)) is not None:
            self._happen(hung)
        if self._wake_at_ns is not None and time.monotonic_ns() >= self._wake_at_ns:
            self._wake_at_ns = None
            self._happen(TimePassed(at_ns=time.monotonic_ns()))
        self._console.note_lost_output()
        if self._console.reader_is_gone and signal.SIGPIPE not in self.state.signals:
            self._happen(SignalArrived(signum=signal.SIGPIPE, at_ns=time.monotonic_ns()))

    def _happen(self, event: Event) -> None:
        self.state, actions = step(self.state, event)
        self._debugging.see(event)
        self._watch(event, self.state, self._console)
        for action in actions:
            self._act(action)

    def _timeout_s(self) -> float | None:
        if self._output.has_more:
            return 0.0
        looks = [self._wake_at_ns, self._console.next_wake_ns, self._output.next_look_ns]
        looks += [self._lookout.next_look_ns(self.state), self._debugging.next_look_ns]
        if self._live is not None:
            looks.append(self._live.next_look_ns)
        if self._timers is not None:
            looks.append(self._timers.next_expiry_ns)
        times = [at for at in looks if at is not None]
        return max(0.0, (min(times) - time.monotonic_ns()) / 1e9) if times else None

    def _on_control(self) -> None:
        message = self._zygote.receive()
        if message is None:
            self._selector.unregister(self._zygote.control)
            self._on_reports()
            status = self._zygote.wait()
            self._happen(ZygoteGone(wait_status=status, at_ns=time.monotonic_ns()))
            return
        if isinstance(message, RankExited | GenerationEnded):
            self._on_reports()  # what ranks told before their end comes first
        if isinstance(message, RankStarted | StartFailed):
            self._orders.answered()
        if isinstance(message, wire.ToZygote):
            raise InternalError(f"the zygote sent an order: {message}")
        if isinstance(message, RankExited):
            self._match_error_file(message)
        self._happen(message)

    def _match_error_file(self, event: RankExited) -> None:
        """Hear what a command of somebody else's wrote there, or write what a rank told us."""
        files = self._folder.files(self._generation, self._ranks[event.rank].local_rank)
        if event.wait_status == 0 or not files.error_file:
            return
        raised = self.state.ranks[event.rank].raised
        if raised is None and (raised := read_record(files.error_file, event.rank)) is not None:
            self._happen(raised)
        elif raised is not None and not os.path.exists(files.error_file):
            write_record(files.error_file, raised, os.waitstatus_to_exitcode(event.wait_status))

    def _on_reports(self) -> None:
        while (message := self._zygote.receive_report()) is not None:
            if isinstance(message, wire.ToZygote):
                raise InternalError(f"a rank sent an order: {message}")
            if isinstance(message, RankBeat):
                self._lookout.beat(message.rank)
            else:
                self._happen(message)

    def _on_signals(self) -> None:
        for signum in self._signals.take():
            if signum in self._plan.request.forwarded_signals:
                self._forward(signum)
                continue
            if signum == signal.SIGQUIT and signum not in self._plan.request.stop_signals:
                self._lookout.ask(self.state, self._zygote.pid, "SIGQUIT: where the ranks are")
                continue
            if self._debugging.takes(signum, self.state):
                continue
            self._happen(SignalArrived(signum=signum, at_ns=time.monotonic_ns()))

    def _forward(self, signum: int) -> None:
        """Pass a signal on to the ranks that do something with it; it would end the others."""
        alive = {rank: self.state.ranks[rank].pid for rank in sorted(self.state.alive)}
        deaf = [rank for rank, pid in alive.items() if pid and not handles_signal(pid, signum)]
        ranks = [rank for rank in alive if rank not in deaf]
        self._signal(ranks, signum, whole_group=False)
        if deaf:
            who = merged_label(self._plan.layout, deaf)
            name = signal_name(signum)
            self._console.note(f"{name} was not passed to {who}, which would be ended by it")

    def _signal(self, ranks: Iterable[int], signum: int, *, whole_group: bool) -> None:
        order = wire.SignalRanks(ranks=list(ranks), signum=signum, whole_group=whole_group)
        self._zygote.send(order)

    # ---- actions ---------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case StartAll(generation=generation):
                self._start_all(generation)
            case StartOver():
                self._start_over()
            case Signal(ranks=ranks, signum=signum, whole_group=whole_group):
                self._signal(ranks, signum, whole_group=whole_group)
            case EndGeneration(grace_s=grace_s):
                self._orders.clear()
                self._zygote.send(wire.ClearUp(grace_s=grace_s))
            case EndZygote(grace_s=grace_s, by_force=by_force):
                self._zygote.send(wire.Finish(grace_s=grace_s))
                if by_force:
                    self._zygote.kill()
            case OpenGate():
                self._zygote.open_gate()
            case WakeAt(at_ns=at_ns):
                self._wake_at_ns = at_ns

    def _start_zygote(self, method: StartMethod) -> Zygote:
        stacks = self._lookout.open(ZYGOTE)
        try:
            zygote = Zygote(
                self._plan.program,
                method=method,
                preload=self._plan.request.preload,
                scratch_dir=self._folder.removed_without_us,
                stacks=stacks,
                stdin=self._debugging.stdin_of_others,
            )
        finally:
            os.close(stacks)
        self._selector.register(zygote.control, selectors.EVENT_READ, self._on_control)
        self._selector.register(zygote.reports, selectors.EVENT_READ, self._on_reports)
        return zygote

    def _start_over(self) -> None:
        self._selector.unregister(self._zygote.control)
        self._selector.unregister(self._zygote.reports)
        self._zygote.wait()
        self._zygote.close()
        self._zygote = self._start_zygote("exec")

    def _start_all(self, generation: int) -> None:
        self._output.end_generation()
        self._generation = generation
        self._lookout.begin()
        # Made only now, when the zygote can remove it should we be killed.
        self._folder.make(
            generation, {rank.local_rank: self._environment(rank) for rank in self._ranks.values()}
        )
        self._start_timers()
        self._zygote.start_store(self._listener)
        self._orders.begin(self._ranks.values())

    def _send_order(self, rank: RankPlan) -> None:
        files = self._folder.files(self._generation, rank.local_rank)
        environment = self._environment(rank, files.error_file)
        lazy = self._plan.request.mesh_init == "lazy"
        order = start_order(rank, environment, lazy=lazy, debug=self._debugging.rank)
        streams = self._debugging.streams(rank.rank) or self._output.open(rank, files)
        theirs = [*streams, self._lookout.open(rank.rank)]
        self._zygote.send(order, theirs)
        for end in theirs:
            os.close(end)

    def _environment(self, rank: RankPlan, error_file: str = "") -> dict[str, str]:
        return rank_environment(
            self._plan,
            rank,
            self._session,
            os.environ,
            generation=self._generation,
            error_file=error_file,
        )

    def _start_timers(self) -> None:
        if self._timers is not None:
            self._timers.clear()
        elif self._session.timer_file is not None:
            self._timers = Timers(self._session.timer_file)
            self._selector.register(self._timers, selectors.EVENT_READ, self._timers.read)
