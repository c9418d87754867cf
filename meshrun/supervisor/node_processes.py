"""Starts, signals, watches and ends the zygote of a node and its ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from meshrun.console.output import Output
from meshrun.errors import HostError
from meshrun.host import rank_variables as var
from meshrun.host.descriptors import allow_descriptors, close_file
from meshrun.host.network import LOOPBACK_INTERFACE, interface_of
from meshrun.host.process_state import handles_signal, read_stat
from meshrun.host.processes import EndedChildren, killing_children
from meshrun.host.reactor import Reactor, Steps, finish
from meshrun.layout.labels import rank_label
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan, RankPlan, complete_plan
from meshrun.plan.rank_env import LaunchFacts, rank_environment
from meshrun.protocol import codec, zygote_messages
from meshrun.protocol.error_record import read_record, write_record
from meshrun.protocol.events import AllJoined
from meshrun.protocol.rank_end import RankExited, RankRaised, as_torch_prints
from meshrun.supervisor.monitor import Monitor
from meshrun.supervisor.run_folder import RunFolder
from meshrun.supervisor.stack_requests import ZYGOTE
from meshrun.supervisor.terminal import Terminal
from meshrun.supervisor.timers import Timers, timer_file
from meshrun.supervisor.zygote_client import EXIT_TAKES_S, ZygoteClient

if TYPE_CHECKING:
    from meshrun.warm.client import WarmRun

_AHEAD = 16
"""Most orders without an answer; more could fill both directions of the zygote's socket."""
_UNCAUGHT = 1 << 8
"""The wait status of a Python program that ends by an exception."""
_LOOK_EVERY_S = 3.0
_CPU_TIMES = slice(11, 13)
"""The fields utime and stime of ``/proc/PID/stat``, from the state on (proc_pid_stat(5))."""


class NodeProcesses:
    """The processes below the launcher: the zygote, and the ranks that it starts.

    Args:
        run_id: Name of the launch; on several nodes, until they have joined.
        listener: The store's socket; ``None`` if the store is on another node, or not known yet.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        run_id: str,
        folder: RunFolder,
        listener: socket.socket | None,
        *,
        output: Output,
        monitor: Monitor,
        terminal: Terminal,
        reactor: Reactor,
        note: Callable[[str], None],
        on_control: Callable[[], None],
        on_reports: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._output, self._monitor, self._terminal = output, monitor, terminal
        self._reactor, self._on_control, self._on_reports = reactor, on_control, on_reports
        self._note, self._warm = note, _warm_run(plan, note)
        self._waiting: deque[RankPlan] = deque()
        """Ranks that the zygote has not been ordered to start yet."""
        self._generation = 0
        self.timers: Timers | None = None
        facts = LaunchFacts(
            run_id=run_id,
            master_addr=plan.store_address,
            master_port=listener.getsockname()[1] if listener is not None else 0,
            interface=LOOPBACK_INTERFACE,
            timer_file=timer_file(os.environ, folder.path),
        )
        self._replan(plan, facts, listener)
        self._method = plan.start_method
        self.zygote = self._start_zygote()
        self._seen = self._noted = (0, "", [""])
        """The zygote, its state and CPU time at the last look, and when it was noted."""
        reactor.every(_LOOK_EVERY_S, self._look_at_zygote)

    def join(self, plan: LaunchPlan, joined: AllJoined, listener: socket.socket | None) -> None:
        """Complete a plan with what the other nodes sent, before ranks are started.

        Raises:
            MeshrunError: If it does not fit them.
        """
        plan = complete_plan(
            plan,
            node_rank=joined.node_rank,
            nproc_per_node=joined.nproc_per_node,
            nodes_per_domain=joined.nodes_per_domain,
            roles=joined.roles,
        )
        facts = replace(
            self.facts,
            run_id=joined.run_id,
            master_addr=joined.store_address,
            master_port=joined.store_port,
            interface=interface_of(joined.own_address),
            previous=json.dumps(joined.previous) if joined.previous else "",
        )
        self._replan(plan, facts, listener)

    def _replan(self, plan: LaunchPlan, facts: LaunchFacts, listener: socket.socket | None) -> None:
        self.plan, self.facts, self._listener = plan, facts, listener
        self.ranks = {rank.rank: rank for rank in plan.ranks_of_node()}
        allow_descriptors(6 * len(self.ranks) + plan.layout.nnodes + 64)
        self._last_layout: dict[str, Any] | None = None
        """The layout of the last generation, if it had this plan."""
        self._is_first_with_plan = True
        """Whether this generation is the first with this plan, and so with these nodes."""

    # ---- starting --------------------------------------------------------------------------

    def start_zygote(self, *, without_torch: bool) -> None:
        """Replace a zygote that has exited or is about to."""
        if without_torch:
            self._method = "exec"
            finish(self.zygote.process.ending())  # it is about to exit
        self._waiting.clear()
        for end in (self.zygote.control, self.zygote.reports):
            self._reactor.remove(end)
        self.zygote.close()
        self.zygote = self._start_zygote()
        self._monitor.begin_generation()

    def start_all(self, generation: int) -> None:
        """Start the store and every rank of this node, as one generation."""
        self._output.end_generation()
        self._generation = generation
        self._is_first_with_plan = self._last_layout is None
        if self._last_layout is not None:  # otherwise, the facts are new
            self.facts = replace(self.facts, previous=json.dumps(self._last_layout))
        self._last_layout = {**self.plan.layout.to_dict(), "generation": generation}
        self._monitor.begin_generation()
        # Made only now, when the zygote can remove it if this process is killed.
        self._folder.make(
            generation, {rank.local_rank: self._environment(rank) for rank in self.ranks.values()}
        )
        if self.timers is not None:
            self.timers.clear()
        elif (path := self.facts.timer_file) is not None:
            self.timers = Timers(path, self._reactor, lambda: self.zygote.process.pid, self._note)
        self.zygote.start_store(self._listener)
        self._waiting.extend(self.ranks.values())
        for _ in range(_AHEAD):
            self.start_next()

    def start_next(self) -> None:
        """Start the next rank, now that the zygote has answered an order."""
        if self._waiting:
            self._order_rank(self._waiting.popleft())

    def _start_zygote(self) -> ZygoteClient:
        request = self.plan.request
        builds_first = request.mesh_init == "eager" and self.plan.program.kind != "command"
        prepare = zygote_messages.Prepare(
            start_method=self._method,
            preload=[*(request.preload if self._method == "fork" else self.plan.modules_of_mesh)],
            backends=[*request.groups.backend_names] if builds_first else [],
            device=(self.plan.uncounted_device or "") if builds_first else "",
            workers=min(self.plan.layout.nproc_per_node),
            scratch_dir=self._folder.cleanup_path,
            ignored=[signal.SIGQUIT] if request.only_launcher_gets_sigquit else [],
        )
        stacks = self._monitor.stacks.open(ZYGOTE)
        try:
            zygote = ZygoteClient(
                self.plan.program,
                prepare,
                stacks=stacks,
                stdin=self._terminal.stdin,
                warm=self._warm,
            )
        finally:
            os.close(stacks)
        self._monitor.zygote_pid = zygote.process.pid
        self._reactor.add_reader(zygote.control, self._on_control)
        self._reactor.add_reader(zygote.reports, self._on_reports)
        return zygote

    def _look_at_zygote(self) -> None:
        """Note once that the zygote stays stopped or held, as a launch waits for it."""
        self.zygote.notice_end()
        pid = self.zygote.process.pid
        state, *fields = read_stat(pid)
        before, self._seen = self._seen, (pid, state, fields[_CPU_TIMES])
        if state not in ("T", "D") or before != self._seen or self._noted == self._seen:
            return
        self._noted = self._seen
        where = f" on {os.uname().nodename}" if self.plan.rendezvous is not None else ""
        who = f"the process that starts the ranks{where} (process {pid})"
        if state == "T":
            self._note(f"{who} is stopped; the launch waits for it until `kill -CONT {pid}`")
        else:
            self._note(
                f"waiting for {who}, which is waiting for a disk, a driver or a network file system"
                " (state D in `ps`)"
            )

    def _order_rank(self, rank: RankPlan) -> None:
        files = self._folder.files(self._generation, rank.local_rank)
        request, layout, terminal = self.plan.request, self.plan.layout, self._terminal
        order = zygote_messages.StartRank(
            rank=rank.rank,
            environment=self._whole_environment(rank, files.error_file),
            coordinate=list(rank.coordinate),
            local_rank=rank.local_rank,
            lazy=request.mesh_init == "lazy",
            cpus=list(rank.cpus or ()),
            imports=[] if self._method == "fork" else [*self.plan.modules_of_mesh],
            label=rank_label(layout, rank.rank) if layout.mesh else "",
            stdin=terminal.has_stdin(rank.local_rank),
            debug=terminal.rank == rank.rank,
            imports_file=self._warm.imports_file if self._warm and rank.local_rank == 0 else "",
            check=request.check_first if self._is_first_with_plan else (),
        )
        _check_size(order)
        descriptors = [
            *(terminal.streams(rank.rank) or self._output.open(rank, files)),
            self._monitor.stacks.open(rank.rank),
            self._monitor.pipes.open(rank.rank),
        ]
        self.zygote.send(order, descriptors)
        for descriptor in descriptors:
            close_file(descriptor)

    def _whole_environment(self, rank: RankPlan, error_file: str) -> dict[str, str]:
        """Return the variables of a rank that differ from the zygote's own."""
        # The zygote was started with its own thread variables.
        found = {name: os.environ[name] for name in var.THREADS if name in os.environ}
        found |= self._environment(rank, error_file)
        if self._terminal.rank != rank.rank:  # it cannot ask a pipe for the width of lines
            window = self._output.window_for(rank).items()
            found |= {name: text for name, text in window if name not in os.environ}
        if self._terminal.rank not in {None, rank.rank}:  # another rank is debugged
            found["PYTHONBREAKPOINT"] = "0"
        return found

    def _environment(self, rank: RankPlan, error_file: str = "") -> dict[str, str]:
        return rank_environment(
            self.plan,
            rank,
            self.facts,
            os.environ,
            generation=self._generation,
            error_file=error_file,
        )

    # ---- signals and ends ------------------------------------------------------------------

    def send(self, order: zygote_messages.ToZygote) -> None:
        """Send an order to the zygote, whichever it is by now."""
        self.zygote.send(order)

    def forward(self, signum: int, state: State) -> Sequence[int]:
        """Forward a signal to the ranks that handle it; return the ranks it would kill."""
        alive = dict(sorted(state.alive.items()))
        spared = [rank for rank, pid in alive.items() if not handles_signal(pid, signum)]
        ranks = tuple(rank for rank in alive if rank not in spared)
        self.send(zygote_messages.SignalRanks(ranks=ranks, signum=signum))
        return spared

    def end_generation(self, order: zygote_messages.EndGeneration) -> None:
        """Have the zygote end the store and what ranks left behind; start no more ranks."""
        self._waiting.clear()
        self.send(order)

    def end(self, grace_s: float, *, by_force: bool) -> None:
        """Have the zygote end all processes and then itself; with ``by_force``, kill it."""
        self.send(zygote_messages.Exit(grace_s=grace_s))
        if by_force:
            self.zygote.process.kill()
            self._reactor.call_later(EXIT_TAKES_S, self.zygote.abandon)

    def ending_zygote(
        self, spares: Callable[[], frozenset[int]]
    ) -> Steps[tuple[int, EndedChildren]]:
        """Wait for the zygote's end, and end what it leaves behind, except for ``spares``.

        Return its wait status, and what could not be ended.
        """
        self._reactor.remove(self.zygote.control)
        status, kept = yield from self.zygote.process.ending()
        own = yield from killing_children(lambda: spares() | {*kept.survivors})
        survivors, denied = kept.survivors + own.survivors, kept.denied + own.denied
        return status, EndedChildren(0, survivors, denied)

    def read_error_file(self, event: RankExited) -> RankRaised | None:
        """Return the exception that ended a rank, if it is in the file that ``@record`` writes."""
        is_ours = self.plan.program.kind != "command"
        if is_ours and event.wait_status != _UNCAUGHT:  # a child's, or one that was handled
            return None
        path = self._error_file(event.rank)
        return read_record(path, event.rank, self._folder.open) if path else None

    def write_error_file(self, event: RankExited, raised: RankRaised) -> None:
        """Write a reported exception to the error file, and to the log if it was not shown."""
        if not (path := self._error_file(event.rank)):
            return
        exit_code = os.waitstatus_to_exitcode(event.wait_status)
        write_record(path, raised, exit_code, self._folder.open)
        if not raised.shown:
            is_bare = self.plan.request.console.prefix != "mesh"
            text = raised.traceback
            self._output.log(event.rank, as_torch_prints(text, event.rank) if is_bare else text)

    def _error_file(self, rank: int) -> str:
        return self._folder.files(self._generation, self.ranks[rank].local_rank).error_file

    def leave_warm_server(self) -> None:
        """Leave a warm server for the next run, if the user asked for it."""
        if self._warm is not None:
            self._warm.leave_server()

    def close(self) -> None:
        """Close the zygote's sockets."""
        if self.timers is not None:
            self.timers.close()
        self.zygote.close()


def _check_size(order: zygote_messages.StartRank) -> None:
    """Raise HostError if an order does not fit into a packet, as its variables are too long."""
    if (size := len(codec.encode(order))) > codec.PACKET_BYTES:
        longest = max(order.environment, key=lambda name: len(order.environment[name]))
        raise HostError(
            f"a rank's environment takes {size} bytes, but the limit is {codec.PACKET_BYTES}:"
            f" {longest} alone takes {len(order.environment[longest])}",
            hint="write the data to a file and pass its path to the program",
        )


def _warm_run(plan: LaunchPlan, note: Callable[[str], None]) -> WarmRun | None:
    idle_s = plan.request.warm_idle_s
    if idle_s is None:
        return None
    if plan.start_method == "exec":
        is_command = plan.program.kind == "command"
        why = "on a command that is not Python" if is_command else "with --start-method exec"
        note(f"--warm has no effect {why}")
        return None
    from meshrun.warm.client import WarmRun

    return WarmRun(plan, idle_s=idle_s, note=note)
