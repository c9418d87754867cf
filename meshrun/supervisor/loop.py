"""The launcher's loop: waits for descriptors and times, makes events, carries out actions."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshrun.console.console import Console
from meshrun.console.outlet import last_read_s
from meshrun.console.output import Output
from meshrun.errors import HostError, MeshrunError
from meshrun.host.exclusion import how_to_exclude, node_name
from meshrun.host.forked_call import ForkedCall
from meshrun.host.process_state import is_stopped, process_name, wait_until_stopped
from meshrun.host.processes import EndedChildren, become_subreaper, list_children
from meshrun.host.reactor import Reactor
from meshrun.layout.labels import merged_label
from meshrun.lifecycle import actions, advance
from meshrun.lifecycle.outcome import build_result, describe_end
from meshrun.lifecycle.state import (
    ALONE,
    ELASTIC,
    FIXED,
    NodesState,
    State,
    delay_deadline,
    skip_time,
    was_stopped,
)
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol import events
from meshrun.protocol.caller import Invocation
from meshrun.protocol.codec import WireError
from meshrun.protocol.collectives import AskTimes, RankAnswer
from meshrun.protocol.generation import Evidence, RankState
from meshrun.protocol.rank_end import RankExited, RankRaised, why_aborted
from meshrun.protocol.result import LaunchResult, signal_name, split_wait_status
from meshrun.protocol.zygote_messages import (
    BreakpointPassed,
    CallEnded,
    EndGeneration,
    FromNegotiation,
    FromRank,
    GenerationEnded,
    LeftoversEnded,
    NodeExcluded,
    RankBeat,
    RankReady,
    RankStarted,
    ResumeRanks,
    SignalRanks,
    StartFailed,
    StoreEnded,
    SuspendRanks,
)
from meshrun.supervisor.investigation import Investigation
from meshrun.supervisor.launch_gpus import GpuWait
from meshrun.supervisor.listening import describe_listening
from meshrun.supervisor.monitor import Monitor
from meshrun.supervisor.node_processes import NodeProcesses
from meshrun.supervisor.run_folder import RunFolder
from meshrun.supervisor.signals import Pause, SignalQueue
from meshrun.supervisor.terminal import Terminal
from meshrun.supervisor.watcher import Stopwatch, Watcher

if TYPE_CHECKING:
    from meshrun.supervisor.node_link import NodeLink, RendezvousAccess

_LATE_NS = 1_000_000_000
"""Longer than the delay with which a busy machine wakes this process."""
_PAUSED_TURN_S = 0.1
_STEP_DAEMON = "slurmstepd"
"""The process that starts each task of a Slurm step, forwards its output and waits for it."""
_CHECK_PARENT_S = 2.0
_MOST_REPORTS = 1000
"""How many reports of ranks are read at once: more than their socket holds, so that those before a
rank's end are among them, but not all of a rank that sends them without end."""


class Loop:
    """One launch, from the start of the zygote in the constructor until all processes have ended.

    Args:
        plan: What to start; on several nodes, the part that is known before they have joined.
        run_id: Name of the launch; on several nodes, until they have joined.
        folder: The ranks' files; closed once the ranks have ended.
        store_listener: The store's socket on a single node; on several, the coordinator makes one.
        invocation: How this launcher was started.
        watchers: Follow the launch.
        rendezvous: Where this node meets the others, if there are any.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        run_id: str,
        folder: RunFolder,
        store_listener: socket.socket | None,
        console: Console,
        invocation: Invocation,
        watchers: Sequence[Watcher],
        rendezvous: RendezvousAccess | None,
    ) -> None:
        self._caller, self._console, self._folder = invocation.caller, console, folder
        self._stopwatch = Stopwatch(invocation.began_ns)
        self._initial_plan = plan
        """The plan before the nodes joined, to be completed each time they have."""
        self.state = _initial_state(plan, has_other_nodes=rendezvous is not None)
        self._reactor = Reactor()
        self._pause = Pause(
            self._reactor,
            None if self._caller is None else partial(is_stopped, self._caller.pid),
            stop=partial(self._suspend_ranks, until_sigcont=False),
            resume=self._resume,
        )
        self._terminal = Terminal(plan, console, self._reactor)
        self._monitor = Monitor(plan, console, self._reactor, emit=self._handle)
        self._watchers = (self._terminal, self._stopwatch, *watchers, self._monitor)
        for watcher in self._watchers:
            watcher.begin(self._reactor, self.state)
        self._output = Output(
            plan, console, self._reactor, self._monitor.watchdog.record_output, folder.open
        )
        self._investigation = Investigation(plan, self._output, self._monitor, self._terminal)
        self._gpu_wait = GpuWait(plan, self._reactor, console.note)
        self._wake = self._reactor.call_at(
            None, lambda: self._handle(events.TimePassed(at_ns=self._reactor.now_ns()))
        )
        """The next time at which the state machine decides something."""
        self._was_continued = False
        """Whether this process was stopped and continued since the last turn."""
        self._signalled_s = self._ended_s = 0.0
        """When the first signal stopped the launch, and when its ranks had ended; 0 before."""
        self._noted_malformed_report = False
        self._earlier_children = frozenset(list_children())
        """Children of whatever this process was before, which are not ours to end."""
        become_subreaper()
        request = plan.request
        self._signals = SignalQueue(  # before the first process is started
            (*request.stop_signals, *([signal.SIGTSTP] if self._terminal.rank is None else [])),
            even_if_ignored=request.stop_even_if_ignored,
            always=(signal.SIGQUIT, signal.SIGCONT, *request.forwarded_signals),
        )
        self._reactor.add_reader(self._signals, self._on_signals)
        if invocation.task is not None:
            invocation.task.raise_signals(self._reactor)
        if process_name(parent := os.getppid()) == _STEP_DAEMON:
            self._reactor.every(_CHECK_PARENT_S, partial(self._check_parent, parent))
        try:
            self._processes = NodeProcesses(
                plan,
                run_id,
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
        except MeshrunError:
            self._signals.restore()  # for the time in which this node notifies the others
            raise
        if rendezvous is None:
            self._report_joined()
        self._nodes = None if rendezvous is None else self._join(rendezvous)
        each = self._reactor.each_turn  # in this order
        each(self._skip_lost_time)
        each(self._output.read_files, due=lambda: self._output.next_read_ns)
        each(console.show_waiting, due=lambda: console.next_wake_ns)
        if (nodes := self._nodes) is not None:
            each(partial(self._on_nodes, nodes), due=lambda: 0 if nodes.peers.events else None)

    def _join(self, rendezvous: RendezvousAccess) -> NodeLink:
        from meshrun.supervisor.node_link import NodeLink  # not needed on a single node

        nodes = NodeLink(
            self._initial_plan,
            rendezvous,
            self._reactor,
            note=self._console.note,
            negotiate=self._processes.send,
        )
        self._monitor.watchdog.activity = nodes.peers.activity
        if self._monitor.stragglers is not None:
            self._monitor.stragglers.send_to_nodes = nodes.peers.send
        return nodes

    def _report_joined(self) -> None:
        if self.plan.request.console.verbose:
            for line in describe_listening(self.plan, self._processes.facts, os.environ):
                self._console.note(line)
        if self._caller is not None:
            self._caller.report_joined()

    @property
    def plan(self) -> LaunchPlan:
        """What is started; on several nodes, final once they have joined."""
        return self._processes.plan

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names of the known nodes, in node order."""
        return (os.uname().nodename,) if self._nodes is None else self._nodes.hosts

    def run(self) -> LaunchResult:
        """Run until all processes have ended and all output is written."""
        went_well, console = False, self._console
        try:
            self._handle(events.LaunchBegan(at_ns=self._reactor.now_ns()))
            while not self.state.over:
                self._turn()
            if self._nodes is not None:
                self._nodes.begin_to_linger(self.state, self.plan.layout)
                while self._nodes.lingers(self.state):
                    self._turn()
            self._ended_s = self._reactor.now_s()
            if left := self._output.finish(self._reader_timeout_s):
                console.note_dropped(left)
            evidence = self._gather()
            went_well = describe_end(self.state, self.plan.layout, self.hosts, "").exit_code == 0
            if {*self.state.signals} <= {signal.SIGINT}:
                self._processes.leave_warm_server()
        finally:
            self._processes.close()
            self._monitor.close()
            self._investigation.gpu_errors.close()
            self._output.close()
            self._terminal.close()
            self._reactor.close()
            kept = self._folder.close(went_well=went_well)
            # Nothing is left to clean up, so signals get their previous effect, but with a delay:
            # the launch is decided, and only the report is missing.
            self._signals.restore_late()
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
        console.close()
        console.drain(self._reader_timeout_s)
        return result

    def close_nodes(self) -> None:
        """Close the connections to other nodes, which :meth:`run` leaves open.

        A scheduler may end all launchers once one has exited with an error. So node 0 reports a
        failure first, and then the others exit.
        """
        if self._nodes is not None:
            self._nodes.peers.close()

    def _reader_timeout_s(self) -> float | None:
        """Return how long to wait for readers of our output, in s; ``None`` for no limit."""
        if len(self.state.signals) > 1:
            return 0.0
        if not was_stopped(self.state):
            return None
        stopped_s = self._signalled_s or self._ended_s
        until_s = last_read_s(stopped_s, self._ended_s, self.plan.request.shutdown_timeout_s)
        return max(0.0, until_s - self._reactor.now_s())

    # ---- events ----------------------------------------------------------------------------

    def _turn(self) -> None:
        self._output.pause_or_resume()
        is_paused = self._pause.is_on and not self._output.has_more
        # While ranks are stopped, deadlines move with the time.
        self._reactor.wait(least_s=_PAUSED_TURN_S if is_paused else 0.0)
        if self._terminal.steals_input():  # it suspends a launch that reads the shell's input
            self._suspend("a rank tried to read the terminal from the background")
        if self._terminal.update_typing():
            return
        self._reactor.call_ready()
        self._reactor.call_due()
        self._console.note_lost_output()
        if self._console.reader_is_gone and signal.SIGPIPE not in self.state.signals:
            self._handle(events.SignalArrived(signum=signal.SIGPIPE, at_ns=self._reactor.now_ns()))

    def _skip_lost_time(self) -> None:
        """Do not count time in which this process was stopped, or the whole machine suspended."""
        is_paused = self._pause.is_on and not self.state.stopping
        is_lost = is_paused or self._was_continued
        lost_ns = self._reactor.count_lost_ns(was_suspended=is_lost)
        if not is_lost and lost_ns < _LATE_NS:
            return
        self._was_continued = False
        self.state = skip_time(self.state, lost_ns)
        self._reactor.skip(lost_ns)

    def _on_nodes(self, nodes: NodeLink) -> None:
        while nodes.peers.events:
            match nodes.peers.events.popleft():
                case events.ShowStacks(why=why):
                    self._monitor.ask(why)
                case AskTimes() | events.TimesReported() as event:
                    if self._monitor.stragglers is not None:
                        self._monitor.stragglers.receive_from_node(event)
                case events.GenerationAborted(title=str(title)) as event if (
                    title and not self.state.stopping
                ):
                    self._monitor.ask(title, then=event)
                case events.AllCleared() as event:
                    self._handle(self._monitor.explain_wait(self.state, event))
                case events.AllJoined() as event:
                    self._handle(self._complete(event, nodes))
                case event:
                    self._handle(event)

    def _handle(self, event: events.Event) -> None:
        before_ns = self.state.deadline_ns
        self.state, wanted = advance(self.state, event)
        if self.state.deadline_ns is not None and self.state.deadline_ns != before_ns:
            # It counts from the event, which this process may have handled late: on a slow disk.
            now_ns = self._reactor.now_ns()
            late_ns = max(0, now_ns - getattr(event, "at_ns", now_ns))
            self.state = delay_deadline(self.state, late_ns)
        if isinstance(event, RankReady):
            self._output.begin()
        if isinstance(event, RankExited):
            self._output.end(event.rank, failed=event.wait_status != 0)
        for watcher in self._watchers:
            watcher.on_event(event, self.state)
        for action in wanted:
            self._act(action)
        self._wake.move(self.state.wake_ns)
        self._monitor.update(self.state)

    def _on_control(self) -> None:
        message = self._processes.zygote.receive()
        if message is None:
            self._on_zygote_gone()
            return
        if isinstance(message, RankExited | GenerationEnded):
            self._on_reports()  # what ranks reported before their end comes first
        if isinstance(message, RankStarted | StartFailed):
            self._try_to_start(self._processes.start_next)
        if isinstance(message, RankExited) and message.wait_status:
            if message.aborted:
                error = why_aborted(self._output.last_lines(message.rank))
                message = replace(message, error=error)
            self._match_error_file(message)
            self._exclude_if_unfit(message)
        if isinstance(message, StoreEnded):
            message = replace(message, why=self._why_killed(message.wait_status))
        self._handle(message)

    def _match_error_file(self, event: RankExited) -> None:
        """Write the exception that a failed rank reported to its error file, or take it from there.

        A rank that is a command reports nothing, but may be a Python program that uses ``@record``.
        """
        raised = self.state.ranks[event.rank].raised
        if raised is not None:
            self._processes.write_error_file(event, raised)
        elif (found := self._processes.read_error_file(event)) is not None:
            self._handle(found)

    def _why_killed(self, wait_status: int) -> str | None:
        is_killed = split_wait_status(wait_status)[1] == signal.SIGKILL
        return self._investigation.memory.why_killed() if is_killed else None

    def _exclude_if_unfit(self, event: RankExited | RankRaised) -> None:
        """Exclude this node from the launch if the rank's GPU needs a reset."""
        why = self._investigation.gpu_errors.why_unfit(event.rank, self.plan)
        if why is not None:
            self._handle(
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
        ending = self._processes.ending_zygote(lambda: self._earlier_children | ForkedCall.running)
        self._reactor.follow(ending, self._end_without_zygote)

    def _end_without_zygote(self, end: tuple[int, EndedChildren]) -> None:
        status, left = end
        if left.survivors or left.denied:
            survivors, denied = list(left.survivors), list(left.denied)
            self._handle(LeftoversEnded(count=0, survivors=survivors, denied=denied))
        self._on_reports()
        why = self._why_killed(status)
        self._handle(events.ZygoteGone(wait_status=status, at_ns=self._reactor.now_ns(), why=why))

    def _on_reports(self) -> None:
        for message in self._receive_reports():
            if isinstance(message, RankBeat):
                self._monitor.watchdog.beat(message.rank)
            if isinstance(message, BreakpointPassed):
                self._terminal.note_skipped_breakpoint(message.rank)
            elif isinstance(message, CallEnded):
                if self._caller is not None:
                    self._output.end_call(message.rank, message.number)
            elif isinstance(message, RankAnswer):
                self._monitor.receive(message)
            elif isinstance(message, FromNegotiation):
                if self._nodes is not None:
                    self._nodes.peers.receive(message)
            else:
                self._handle(message)
                if isinstance(message, RankRaised):
                    self._exclude_if_unfit(message)

    def _receive_reports(self) -> Iterator[FromRank | FromNegotiation]:
        """Yield the ranks' reports; a malformed one must not end the launch."""
        for _ in range(_MOST_REPORTS):
            try:
                message = self._processes.zygote.receive_report()
                if isinstance(message, FromRank) and message.rank not in self.state.ranks:
                    raise WireError(f"a message from rank {message.rank}, which is not here")
            except WireError:
                if not self._noted_malformed_report:
                    self._noted_malformed_report = True
                    self._console.note(
                        "ignoring what a rank's program wrote to one of meshrun's descriptors"
                    )
                continue
            if message is None:
                return
            yield message

    def _on_signals(self) -> None:
        request = self.plan.request
        for signum in self._signals.take():
            if signum == signal.SIGCONT:
                self._resume()
            if signum in request.forwarded_signals:
                self._forward(signum)
            elif signum == signal.SIGTSTP and signum not in request.stop_signals:
                self._suspend("SIGTSTP")
            elif signum == signal.SIGQUIT and signum not in request.stop_signals:
                self._show_stacks()
            elif signum != signal.SIGCONT:
                send = self._processes.send
                if not self._terminal.intercept(signum, self.state, send):
                    self._on_stop_signal(signum, self._caller.why_ended if self._caller else "")

    def _show_stacks(self) -> None:
        self._monitor.ask("SIGQUIT: showing where the ranks are")
        if self._nodes is not None:
            why = f"SIGQUIT on {self.hosts[0]}: showing where the ranks are"
            self._nodes.peers.send(events.ShowStacks(why=why))

    def _on_stop_signal(self, signum: int, why: str) -> None:
        self._signalled_s = self._signalled_s or self._reactor.now_s()
        self._handle(events.SignalArrived(signum=signum, at_ns=self._reactor.now_ns(), why=why))

    def _check_parent(self, daemon: int) -> None:
        """End if Slurm has lost this task: nobody reads its output, waits for it or can stop it."""
        if os.getppid() != daemon and signal.SIGTERM not in self.state.signals:
            self._on_stop_signal(signal.SIGTERM, f"its {_STEP_DAEMON} has exited")

    def _suspend(self, why: str) -> None:
        """Suspend the ranks and this process, as on Ctrl-Z; with a caller, the ranks alone."""
        if self._pause.has_caller:
            self._suspend_ranks(until_sigcont=True)
            return
        rendezvous = self.plan.rendezvous
        lost = (
            f"; the other nodes wait {rendezvous.node_timeout_s:g} s for this one"
            if rendezvous
            else ""
        )
        self._processes.send(SuspendRanks())
        wait_until_stopped(self.state.alive.values())  # else they read what the shell is to get
        self._console.note(f"{why}: suspending the ranks until `fg` or SIGCONT{lost}")
        self._console.leave_terminal()
        self._reactor.count_lost_ns()  # none until here
        self._signals.suspend_here()
        self._resume()

    def _suspend_ranks(self, *, until_sigcont: bool) -> None:
        if not self.state.stopping:
            self._pause.begin(until_sigcont=until_sigcont)
            self._processes.send(SuspendRanks())

    def _resume(self) -> None:
        self._was_continued = True
        self._pause.end()
        self._processes.send(ResumeRanks())
        self._terminal.resume()
        self._console.return_to_terminal()

    def _forward(self, signum: int) -> None:
        if without_handler := self._processes.forward(signum, self.state):
            who, name = merged_label(self.plan.layout, without_handler), signal_name(signum)
            self._console.note(
                f"{name} was not forwarded to {who}: it has no handler and would be killed"
            )

    # ---- actions ---------------------------------------------------------------------------

    def _act(self, action: actions.Action) -> None:
        match action:
            case actions.StartAll(generation=generation):
                self._start_all(generation)
            case actions.StartZygote(without_torch=without_torch):
                self._processes.start_zygote(without_torch=without_torch)
                if self._nodes is not None:
                    self._nodes.peers.start_negotiation()
            case SignalRanks():
                self._monitor.after_answers(partial(self._processes.send, action))
            case EndGeneration():
                self._gpu_wait.cancel()
                self._processes.end_generation(action)
            case actions.EndZygote(grace_s=grace_s, by_force=by_force):
                self._gpu_wait.cancel()
                self._processes.end(grace_s, by_force=by_force)
            case actions.ReleaseRanks():
                self._processes.zygote.release_ranks()
            case actions.Report() | actions.Decide() if self._nodes is not None:
                calls = self._monitor.calls
                self._nodes.carry_out(action, self.state, self.plan.layout, self._gather, calls)

    def _gather(self) -> Mapping[int, Evidence]:
        timers = self._processes.timers
        return self._investigation.gather(self.state, self.plan, timers)

    def _complete(
        self, joined: events.AllJoined, nodes: NodeLink
    ) -> events.AllJoined | events.JoinFailed:
        """Complete the plan with what the other nodes sent."""
        if joined.causes:
            self._monitor.begin_generation()  # or it reports answers of ranks before it
        try:
            self._processes.join(self._initial_plan, joined, nodes.peers.listener)
        except MeshrunError as error:
            return events.JoinFailed(error=error, at_ns=joined.at_ns, joined=joined)
        nodes.hosts = joined.hosts
        self._output.update_plan(self.plan)
        for watcher in self._watchers:
            watcher.update_plan(self.plan)
        self._report_joined()
        return replace(joined, ranks=tuple(self._processes.ranks))

    def _start_all(self, generation: int) -> None:
        start = partial(self._try_to_start, partial(self._processes.start_all, generation))
        if generation:
            self._monitor.begin_generation()  # the wait for the GPUs counts as start
            self._gpu_wait.delay(self.plan.used_gpus, self._processes.zygote.process.pid, start)
        else:
            start()

    def _try_to_start(self, start: Callable[[], None]) -> None:
        """Start ranks; an error becomes an event, which the other nodes receive too."""
        try:
            start()
        except HostError as error:
            now_ns = self._reactor.now_ns()
            failed = StartFailed(rank=None, error=error.message, hint=error.hint, at_ns=now_ns)
            self._reactor.call_at(now_ns, partial(self._handle, failed))


def _initial_state(plan: LaunchPlan, *, has_other_nodes: bool) -> State:
    request, policy = plan.request, ELASTIC if plan.is_elastic else FIXED
    return State(
        shutdown_timeout_s=request.shutdown_timeout_s,
        max_restarts=request.max_restarts,
        sigterm_repeats=request.sigterm_repeats,
        ranks={rank: RankState() for rank in plan.layout.ranks_of_node(plan.node_rank)},
        nodes=NodesState(policy=policy) if has_other_nodes else ALONE,
    )
