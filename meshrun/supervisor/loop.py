"""The launcher's loop: waits on descriptors, turns them into events, carries out actions."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshrun.console.console import Console
from meshrun.console.output import Output
from meshrun.console.slow_readers import LAST_WORDS_TAKE_S, SlowReaders, dropped_note
from meshrun.errors import HostError, MeshrunError
from meshrun.host.exclusion import how_to_exclude, node_name
from meshrun.host.memory import MemoryWatch
from meshrun.host.processes import (
    become_subreaper,
    end_children,
    is_stopped,
    list_children,
    process_name,
)
from meshrun.host.reactor import Reactor
from meshrun.layout.labels import merged_label
from meshrun.lifecycle.actions import (
    Action,
    Decide,
    EndGeneration,
    EndZygote,
    OpenGate,
    Report,
    Signal,
    StartAll,
    StartZygote,
    WakeAt,
)
from meshrun.lifecycle.outcome import build_result, went_well
from meshrun.lifecycle.phases import NodesPhase
from meshrun.lifecycle.state import NodesState, State, skip_time, was_stopped
from meshrun.lifecycle.step import step
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.caller import Caller
from meshrun.protocol.codec import WireError
from meshrun.protocol.collectives import FromRecorder
from meshrun.protocol.events import (
    AllIdle,
    Event,
    FromNodes,
    GenerationAborted,
    LaunchBegan,
    MeetingFailed,
    Met,
    SignalArrived,
    TimePassed,
    TimesReported,
    TimesRequested,
    ZygoteGone,
)
from meshrun.protocol.from_zygote import (
    BreakpointPassed,
    CallEnded,
    FromNegotiation,
    FromRank,
    GenerationEnded,
    LeftoversEnded,
    NodeExcluded,
    RankBeat,
    RankReady,
    RankStarted,
    StartFailed,
)
from meshrun.protocol.generation import Evidence, RankState
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import LaunchResult, signal_name
from meshrun.supervisor.gpu_errors import GpuErrors
from meshrun.supervisor.gpu_wait import GpuWait
from meshrun.supervisor.investigation import gather
from meshrun.supervisor.launch_facts import complete, facts_at_start
from meshrun.supervisor.listening import note_listening
from meshrun.supervisor.monitor import Monitor
from meshrun.supervisor.pause import Pause
from meshrun.supervisor.run_folder import RunFolder
from meshrun.supervisor.signals import SignalQueue
from meshrun.supervisor.stopwatch import Stopwatch
from meshrun.supervisor.terminal import Terminal
from meshrun.supervisor.watcher import Watcher
from meshrun.supervisor.workers import Workers

if TYPE_CHECKING:
    from meshrun.supervisor.node_link import Meet, Nodes

_LATE_NS = 1_000_000_000
"""More than a busy machine's delay in waking this process up."""
_PAUSED_TURN_S = 0.1
_STEP_DAEMON = "slurmstepd"
"""What starts each task of a step of Slurm, carries its output and waits for it."""
_LOOK_AT_PARENT_S = 2.0


class Loop:
    """One launch, from the zygote's start, which is in the constructor, until nothing is left.

    Args:
        plan: What to start; of several nodes, what is known of it before they have met.
        run_id: Names the launch; of several nodes, until they have met.
        folder: Where ranks' files are; closed once they have ended.
        store_listener: Where the store serves; of several nodes, the coordinator's has its own.
        watchers: Follow the launch.
        began_ns: Monotonic time at which the user's wait began.
        meet: Begins to meet the other nodes, if there are any.
        caller: The program that started this launcher and uses it, if one does.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        run_id: str,
        folder: RunFolder,
        store_listener: socket.socket | None,
        console: Console,
        watchers: Sequence[Watcher],
        began_ns: int,
        meet: Meet | None,
        caller: Caller | None,
    ) -> None:
        self._caller, self._console, self._folder = caller, console, folder
        self._stopwatch = Stopwatch(began_ns)
        self._watchers = (self._stopwatch, *watchers)
        self._asked = plan
        """As it was before nodes have met: they may meet again."""
        ranks = plan.layout.ranks_of_node(plan.node_rank)
        self.state = State(
            shutdown_timeout_s=plan.request.shutdown_timeout_s,
            max_restarts=plan.request.max_restarts,
            sigterm_repeats=plan.request.sigterm_repeats,
            ranks={rank: RankState() for rank in ranks},
            nodes=None if meet is None else NodesState(is_elastic=plan.is_elastic),
        )
        self._reactor = Reactor()
        self._pause = Pause(
            self._reactor,
            None if caller is None else partial(is_stopped, caller.pid),
            stop=partial(self._suspend_ranks, until_told=False),
            resume=self._resume,
        )
        self._terminal = Terminal(
            plan,
            console,
            self._reactor,
            lambda *to, **how: self._workers.signal(*to, **how),  # noqa: PLW0108 - made later
        )
        self._monitor = Monitor(
            plan,
            console,
            self._reactor,
            happen=self._happen,
            zygote_pid=lambda: self._workers.zygote.pid,
        )
        self._monitor.see(self.state)
        for watcher in self._watchers:
            watcher.begin(self._reactor, self.state)
        self._output = Output(
            plan, console, self._reactor, self._monitor.watchdog.printed, folder.open
        )
        self._memory = MemoryWatch()
        self._gpu_errors = GpuErrors(plan)
        self._gpu_wait = GpuWait(plan, self._reactor, console.note)
        self._wake = self._reactor.call_at(
            None, lambda: self._happen(TimePassed(at_ns=time.monotonic_ns()))
        )
        self._was_continued = False
        self._signalled_ns = self._ended_ns = 0
        self._has_told_nonsense = False
        self._slow_readers = SlowReaders(console, self._reactor)
        self._not_ours = frozenset(list_children())
        become_subreaper()
        # From before there is anything to end.
        self._signals = SignalQueue(
            (
                *plan.request.stop_signals,
                *([signal.SIGTSTP] if self._terminal.rank is None else []),
            ),
            even_if_ignored=plan.request.stop_even_if_ignored,
            always=(signal.SIGQUIT, signal.SIGCONT, *plan.request.forwarded_signals),
        )
        self._reactor.add_reader(self._signals, self._on_signals)
        if process_name(parent := os.getppid()) == _STEP_DAEMON:
            self._reactor.every(_LOOK_AT_PARENT_S, partial(self._look_at_parent, parent))
        facts = facts_at_start(plan, run_id, folder, store_listener)
        self._workers = Workers(
            plan,
            facts,
            folder,
            store_listener,
            output=self._output,
            monitor=self._monitor,
            terminal=self._terminal,
            reactor=self._reactor,
            note=console.note,
            on_control=self._on_control,
            on_reports=self._on_reports,
        )
        if meet is None:
            note_listening(plan, facts, console)
        self._nodes = None if meet is None else self._meet(meet)
        self._arrange()

    def _meet(self, meet: Meet) -> Nodes:
        note, negotiate = self._console.note, self._workers.negotiate
        nodes = meet(self._reactor, note, self._monitor.ask, negotiate)
        self._monitor.watchdog.activity = nodes.peers.activity
        if self._monitor.stragglers is not None:
            self._monitor.stragglers.tell_nodes = nodes.peers.send
        return nodes

    def _arrange(self) -> None:
        """Say what is done in every turn, in this order."""
        each, output, console = self._reactor.each_turn, self._output, self._console
        each(self._skip_lost_time)
        each(output.read_files, due=lambda: output.next_read_ns)
        each(console.show_waiting, due=lambda: console.next_wake_ns)
        if (nodes := self._nodes) is not None:
            each(self._hear_nodes, due=lambda: 0 if nodes.peers.has_events else None)

    @property
    def plan(self) -> LaunchPlan:
        """What is started; of several nodes, the last word is spoken once they have met."""
        return self._workers.plan

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the nodes, in their order, if known."""
        return (os.uname().nodename,) if self._nodes is None else self._nodes.hosts

    def run(self) -> LaunchResult:
        """Run until everything has ended and every byte is written."""
        evidence: Mapping[int, Evidence] | None = None
        try:
            self._happen(LaunchBegan(at_ns=time.monotonic_ns()))
            while not self.state.over:
                self._turn()
            if self._nodes is not None:
                while self._nodes.takes_leave(self.state, self.plan.layout):
                    self._turn()
                self._nodes.close()
            self._finish_output()
            evidence = self._gather()
            if {*self.state.signals} <= {signal.SIGINT}:
                self._workers.leave_warm_server()
        finally:
            self._workers.close()
            self._monitor.close()
            self._gpu_errors.close()
            self._output.close()
            self._terminal.close()
            self._reactor.close()
            kept = self._folder.close(went_well=evidence is not None and went_well(self.state))
            # Nothing is left to clear up, so signals do what they did before us. But the first is
            # late: a launch that is decided, and only has to be told, ends as it was.
            self._signals.restore_late(LAST_WORDS_TAKE_S)
        result = build_result(
            self.state,
            self.plan.layout,
            hosts=self.hosts,
            timings=self._stopwatch.timings(),
            log_folder=kept,
            evidence=evidence,
        )
        for watcher in self._watchers:
            watcher.end(self.state, result)
        return result

    def _finish_output(self) -> None:
        """Bring out what ranks wrote; once the launch was stopped, for readers that take it."""
        self._ended_ns = time.monotonic_ns()
        left = self._output.finish(
            lambda: self._slow_readers.wait(self.readers_have_s()),
            lambda: self.readers_have_s() == 0.0,
        )
        if left:
            self._console.note(dropped_note(left))

    def readers_have_s(self) -> float | None:
        """Return for how long to wait for readers of our output, in s; ``None`` for no limit."""
        if len(self.state.signals) > 1:
            return 0.0
        if not was_stopped(self.state):
            return None
        shutdown_ns = int(self.plan.request.shutdown_timeout_s * 1e9)
        last_words_ns = min(shutdown_ns, int(LAST_WORDS_TAKE_S * 1e9))
        stopped_ns = self._signalled_ns or self._ended_ns
        until_ns = max(stopped_ns + shutdown_ns, self._ended_ns + last_words_ns)
        return max(0.0, (until_ns - time.monotonic_ns()) / 1e9)

    # ---- events ----------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen and deal with it."""
        self._slow_readers.watch()
        self._output.pause_or_resume()
        is_paused = self._pause.is_on and not self._output.has_more
        # What is due moves with the time while ranks are stopped.
        self._reactor.wait(least_s=_PAUSED_TURN_S if is_paused else 0.0)
        if self._look_at_terminal():
            return
        self._reactor.call_ready()
        self._reactor.call_due()
        self._console.note_lost_output()
        if self._console.reader_is_gone and signal.SIGPIPE not in self.state.signals:
            self._happen(SignalArrived(signum=signal.SIGPIPE, at_ns=time.monotonic_ns()))

    def _look_at_terminal(self) -> bool:
        """Give the terminal to its owner; return whether ranks' output was held or released."""
        if self._terminal.takes_keys():
            self._suspend("a rank tried to read the terminal from the background")
        return self._terminal.look()

    def _skip_lost_time(self) -> None:
        """Count no time in which this process was stopped, or the whole machine held up.

        SIGCONT does not say since when; at worst it was since we last went to sleep.
        """
        now_ns = time.monotonic_ns()
        is_paused = self._pause.is_on and not self.state.stopping
        is_lost = is_paused or self._was_continued
        lost_ns = now_ns - (self._reactor.asleep_ns if is_lost else self._reactor.due_ns)
        if not is_lost and lost_ns < _LATE_NS:
            return
        self._was_continued = False
        self.state = skip_time(self.state, lost_ns)
        self._reactor.skip(lost_ns)

    def _hear_nodes(self) -> None:
        for news in self._nodes.peers.events() if self._nodes is not None else ():
            self._hear(news)

    def _hear(self, news: FromNodes) -> None:
        if isinstance(news, TimesRequested | TimesReported):
            if self._monitor.stragglers is not None:
                self._monitor.stragglers.hear_node(news)
        elif isinstance(news, GenerationAborted) and news.is_hung and not self.state.stopping:
            self._monitor.ask(news.why, then=news)
        else:
            if isinstance(news, AllIdle):
                self.state, news = self._monitor.explain_hang(self.state, news)
            self._happen(self._completed(news) if isinstance(news, Met) else news)

    def _happen(self, event: Event) -> None:
        was_stopping = self.state.stopping
        self.state, actions = step(self.state, event)
        self._terminal.see(event, self.state)
        if isinstance(event, RankReady):
            self._output.begin()
        if isinstance(event, RankExited):
            self._output.end(event.rank, failed=event.wait_status != 0)
        for watcher in self._watchers:
            watcher.see(event, self.state)
        if isinstance(event, RankRaised):
            self._monitor.see(self.state)
            self._monitor.see_raised(event, was_stopping=was_stopping)
        if isinstance(event, RankExited) and event.aborted and not was_stopping:
            self._monitor.see(self.state)
            self._monitor.see_aborted(event.rank, self._output.last_lines(event.rank))
        for action in actions:
            self._act(action)
        self._monitor.see(self.state)

    def _on_control(self) -> None:
        message = self._workers.zygote.receive()
        if message is None:
            self._on_zygote_gone()
            return
        if isinstance(message, RankExited | GenerationEnded):
            self._on_reports()  # what ranks told before their end comes first
        if isinstance(message, RankStarted | StartFailed):
            self._try_to_start(self._workers.answered)
        if isinstance(message, RankExited):
            raised = self.state.ranks[message.rank].raised
            if (raised := self._workers.match_error_file(message, raised)) is not None:
                self._happen(raised)
            if message.wait_status:
                self._leave_out_unfit(message)
        self._happen(message)

    def _leave_out_unfit(self, event: RankExited | RankRaised) -> None:
        """Start no rank again on a GPU that only a reset can help."""
        if (why := self._gpu_errors.why_unfit(event.rank, self.plan)) is not None:
            self._happen(
                NodeExcluded(
                    rank=event.rank,
                    reason=why,
                    remedy=how_to_exclude(node_name(os.environ), os.environ),
                    found_by="driver",
                    at_ns=event.at_ns,
                )
            )

    def _on_zygote_gone(self) -> None:
        self._gpu_wait.cancel()
        status, kept = self._workers.wait_for_zygote()
        ended = end_children(grace_s=0.0, spare=self._not_ours)  # all that it had come to us
        left = LeftoversEnded(
            count=0,
            survivors=[*kept.survivors, *ended.survivors],
            denied=[*kept.denied, *ended.denied],
        )
        if left.survivors or left.denied:
            self._happen(left)
        self._on_reports()
        self._happen(ZygoteGone(wait_status=status, at_ns=time.monotonic_ns()))

    def _on_reports(self) -> None:
        for message in self._take_reports():
            if isinstance(message, RankBeat):
                self._monitor.watchdog.beat(message.rank)
            if isinstance(message, BreakpointPassed):
                self._terminal.passed_breakpoint(self.plan.layout, message.rank)
            elif isinstance(message, CallEnded):
                if self._caller is not None:  # else nobody waits for it
                    self._output.end_call(message.rank, message.number)
            elif isinstance(message, FromRecorder):
                self._monitor.hear(message)
            elif isinstance(message, FromNegotiation):
                if self._nodes is not None:
                    self._nodes.peers.receive(message)
            else:
                self._happen(message)
                if isinstance(message, RankRaised):
                    self._leave_out_unfit(message)

    def _take_reports(self) -> Iterator[FromRank | FromNegotiation]:
        """Yield what ranks have told; no rank is to end because another one tells nonsense."""
        while True:
            try:
                message = self._workers.zygote.receive_report()
                if isinstance(message, FromRank) and message.rank not in self.state.ranks:
                    raise WireError(f"a message of rank {message.rank}, which is not here")
            except WireError:
                if not self._has_told_nonsense:
                    self._has_told_nonsense = True
                    self._console.note(
                        "ignoring what a rank's program wrote to a descriptor of meshrun's"
                    )
                continue
            if message is None:
                return
            yield message

    def _on_signals(self) -> None:
        for signum in self._signals.take():
            if signum == signal.SIGCONT:
                self._resume()
            if signum in self.plan.request.forwarded_signals:
                self._forward(signum)
                continue
            if signum == signal.SIGCONT:
                continue
            if signum == signal.SIGTSTP and signum not in self.plan.request.stop_signals:
                self._suspend("SIGTSTP")
                continue
            if signum == signal.SIGQUIT and signum not in self.plan.request.stop_signals:
                self._monitor.ask("SIGQUIT: showing where the ranks are")
                if self._nodes is not None:
                    self._nodes.ask_where(
                        f"SIGQUIT on {self.hosts[0]}: showing where the ranks are"
                    )
                continue
            if self._terminal.takes(signum, self.state):
                continue
            self._take_signal(signum, self._caller.why_ended if self._caller else "")

    def _take_signal(self, signum: int, why: str) -> None:
        now_ns = time.monotonic_ns()
        self._signalled_ns = self._signalled_ns or now_ns
        self._happen(SignalArrived(signum=signum, at_ns=now_ns, why=why))

    def _look_at_parent(self, daemon: int) -> None:
        """End if Slurm has lost this task: nobody reads its output, waits for it or can stop it."""
        if os.getppid() != daemon and signal.SIGTERM not in self.state.signals:
            self._take_signal(signal.SIGTERM, f"its {_STEP_DAEMON} has exited")

    def _suspend(self, why: str) -> None:
        """Be stopped, as Ctrl-Z asks, and the ranks with us; or the ranks alone, for a caller."""
        if self._pause.has_caller:
            self._suspend_ranks(until_told=True)
            return
        rendezvous = self.plan.rendezvous
        lost = (
            f"; the other nodes wait {rendezvous.node_timeout_s:g} s for this one"
            if rendezvous
            else ""
        )
        self._console.note(f"{why}: suspending the ranks until `fg` or SIGCONT{lost}")
        self._workers.suspend()
        self._console.leave_terminal()
        self._reactor.asleep_ns = time.monotonic_ns()
        self._signals.suspend_here()
        self._resume()

    def _suspend_ranks(self, *, until_told: bool) -> None:
        if not self.state.stopping:
            self._pause.begin(until_told=until_told)
            self._workers.suspend()

    def _resume(self) -> None:
        self._was_continued = True
        self._pause.end()
        self._workers.resume()
        self._terminal.resume()
        self._console.return_to_terminal()

    def _forward(self, signum: int) -> None:
        if deaf := self._workers.forward(signum, self.state):
            who, name = merged_label(self.plan.layout, deaf), signal_name(signum)
            self._console.note(
                f"{name} was not forwarded to {who}: it has no handler and would be killed"
            )

    # ---- actions ---------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case StartAll(generation=generation):
                self._start_all(generation)
            case StartZygote(without_torch=without_torch):
                self._start_zygote(without_torch=without_torch)
            case Signal(ranks=ranks, signum=signum, whole_group=whole_group):
                send = partial(self._workers.signal, ranks, signum, whole_group=whole_group)
                self._monitor.once_known(send)
            case EndGeneration(grace_s=grace_s):
                self._gpu_wait.cancel()
                self._workers.end_generation(grace_s)
            case EndZygote(grace_s=grace_s, by_force=by_force):
                self._gpu_wait.cancel()
                self._workers.end(grace_s, by_force=by_force)
            case OpenGate():
                self._workers.zygote.open_gate()
            case WakeAt(at_ns=at_ns):
                self._wake.move(at_ns)
            case Report() | Decide() if self._nodes is not None:
                calls = self._monitor.calls
                self._nodes.carry_out(action, self.state, self.plan.layout, self._gather, calls)

    def _gather(self) -> Mapping[int, Evidence]:
        why_empty = partial(self._terminal.why_empty, self.plan.layout)
        return gather(
            self.state,
            self._output,
            self._monitor,
            self._memory,
            why_empty=why_empty,
            why_gpu=partial(self._gpu_errors.why, plan=self.plan),
            timers=self._workers.timers,
        )

    def _completed(self, met: Met) -> Met | MeetingFailed:
        """Complete the plan with what the other nodes sent, and set this node's ranks."""
        try:
            plan, facts = complete(self._asked, self._workers.facts, met)
        except MeshrunError as error:
            self.state = replace(
                self.state,
                nodes=NodesState(phase=NodesPhase.RUNNING, is_coordinator=not met.node_rank),
            )
            return MeetingFailed(error=error, at_ns=met.at_ns)
        assert self._nodes is not None  # noqa: S101 - which have met
        self._nodes.hosts = met.hosts
        self._workers.replan(plan, facts, self._nodes.peers.listener)
        self._monitor.replan(plan)
        self._output.replan(plan)
        for watcher in self._watchers:
            watcher.replan(plan)
        note_listening(plan, facts, self._console)
        if self._caller is not None:
            self._caller.note_met()
        return replace(met, ranks=tuple(self._workers.ranks))

    def _start_all(self, generation: int) -> None:
        start = partial(self._try_to_start, partial(self._workers.start_all, generation))
        if generation:
            self._monitor.begin()  # from now on the start takes time
            self._gpu_wait.hold(self.plan.used_gpus, self._workers.zygote.pid, start)
        else:
            start()

    def _try_to_start(self, start: Callable[[], None]) -> None:
        """Start ranks; what this machine lacks for it is news, which other nodes hear too."""
        try:
            start()
        except HostError as error:
            now_ns = time.monotonic_ns()
            failed = StartFailed(rank=None, error=error.message, hint=error.hint, at_ns=now_ns)
            self._reactor.call_at(now_ns, partial(self._happen, failed))

    def _start_zygote(self, *, without_torch: bool) -> None:
        self._workers.start_zygote(without_torch=without_torch)
        if self._nodes is not None:
            self._nodes.peers.start_negotiation()
