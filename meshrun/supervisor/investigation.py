"""Gathers evidence about failed ranks: last lines, stacks, memory, timers."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping

from meshrun.console.output import Output
from meshrun.host.shortage import (
    MemoryWatch,
    ProcessLimit,
    describe_full_shm,
    describe_limited_memory,
)
from meshrun.lifecycle.root_cause import FailedRank, failed_ranks
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.generation import Evidence
from meshrun.protocol.rank_end import killed_worker, lacks_processes
from meshrun.protocol.stacks import CRASHES, current_folder, describe, stack_place
from meshrun.supervisor.hung_collectives import describe_peers
from meshrun.supervisor.launch_gpus import GpuErrors, may_be_of_gpu
from meshrun.supervisor.monitor import Monitor
from meshrun.supervisor.terminal import Terminal
from meshrun.supervisor.timers import Timers
from meshrun.wording import count

_MOST_LINES = 6
_ON_EMPTY_STDIN = {("EOFError", "EOF when reading a line"), ("BdbQuit", "")}
"""Exceptions of ``input()`` and pdb when stdin is empty."""
_NO_PROCESS = "possibly at a limit: see `ulimit -u`, `ulimit -v` and pids.max of the cgroup"
_NO_MEMORY = "cannot allocate memory"
"""In messages of Python and of torch's allocator."""
_ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")
"""Variables that name the active environment; a virtual one may be inside one of conda."""
_MOST_RANKS = 16
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""From gloo's ``tcp/pair.cc``."""
_ASSERTED = re.compile(r"([^/\s]+:\d+): .*?\b[Aa]ssertion (`.+[`']) failed")
"""Printed by CUDA for each thread of a kernel whose assertion fails, and by the C library."""


class Investigation:
    """The sources of evidence about failed ranks, from the start of the launch on."""

    def __init__(
        self, plan: LaunchPlan, output: Output, monitor: Monitor, terminal: Terminal
    ) -> None:
        self._output, self._monitor, self._terminal = output, monitor, terminal
        self.memory, self._processes = MemoryWatch(), ProcessLimit()
        self.gpu_errors = GpuErrors(plan)

    def gather(
        self, state: State, plan: LaunchPlan, timers: Timers | None
    ) -> Mapping[int, Evidence]:
        """Return the evidence about failed ranks, the cause first."""
        self._state, self._plan, self._timers = state, plan, timers
        folder = current_folder()
        found = {}
        for number, failed in enumerate(failed_ranks(self._state)[:_MOST_RANKS]):
            # A process that the rank forked may have crashed, and written to the same file.
            has_crashed = failed.signum in CRASHES
            crash = self._monitor.stacks.crash(failed.rank) if has_crashed else None
            place = stack_place(crash.main, folder) if crash else ""
            reasons = self._reasons(failed, place, is_first=number == 0)
            found[failed.rank] = Evidence(
                last_lines=tuple(self._output.last_lines(failed.rank)[-_MOST_LINES:]),
                stack=tuple(describe(crash.main, folder)) if crash else (),
                place=place,
                why=next((reason for reason in reasons if reason), ""),
            )
        return found

    def _reasons(self, failed: FailedRank, place: str, *, is_first: bool) -> Iterator[str | None]:
        """Yield why a rank failed, the most certain reason first."""
        rank_state = self._state.ranks.get(failed.rank)  # other nodes investigate their own ranks
        if self._timers is not None and rank_state is not None:
            yield self._timers.why_ended(rank_state.pid, failed.signum)
        yield self._why_raised(failed)
        yield self._why_killed(failed)
        yield self._why_mismatch(failed, place)
        if is_first and (  # it may have failed because of a collective: late, lost or aborted
            self._state.all_ranks[failed.rank].has_timed_out
            or failed.has_lost_peer
            or failed.signum == signal.SIGABRT
        ):
            yield self._monitor.why
        error = failed.error if failed.raised is None else ""
        errors = [error, self._why_asserted(failed)]
        if rank_state is not None:
            errors.append(self.gpu_errors.why(failed, self._plan))
        yield "; ".join(error for error in errors if error)
        if failed.signum in CRASHES and (why := self._processes.why_refused()):
            yield f"possibly for lack of threads: {why}"

    def _why_raised(self, failed: FailedRank) -> str | None:
        raised = failed.raised
        if raised is None:
            return None
        if (raised.kind, raised.message) in _ON_EMPTY_STDIN:
            return self._terminal.why_empty(failed.rank)
        if raised.kind == "ModuleNotFoundError":
            return None if self._plan.program.kind == "command" else _why_not_found()
        if raised.kind == "MemoryError" or _NO_MEMORY in raised.message.lower():
            return describe_limited_memory()
        return (self._processes.why_refused() or _NO_PROCESS) if lacks_processes(raised) else None

    def _why_killed(self, failed: FailedRank) -> str | None:
        """Return what explains the signal that ended a rank, or one of its loader workers."""
        worker = (killed_worker(failed.raised) if failed.raised else None) or ""
        killed = failed.signum == signal.SIGKILL and not failed.asked_to_end
        if killed or worker.endswith("Killed"):
            return self.memory.why_killed()
        if failed.signum == signal.SIGBUS or worker.endswith("Bus error"):
            return describe_full_shm()
        return None

    def _why_mismatch(self, failed: FailedRank, place: str) -> str | None:
        """Return what gloo reported if it aborted a rank that received more than it expected."""
        found = _MISMATCH.search(self._output_of_abort(failed))
        if found is None:
            return None
        peers = describe_peers(self._monitor.calls, self._plan.layout, failed.rank, place)
        sent, expected = map(int, found.groups())
        text = f"a peer sent {count(sent, 'byte')} instead of {expected:,}: the ranks call"
        text += " different collectives, or one with different shapes"
        return f"{text}; {peers}" if peers else text

    def _why_asserted(self, failed: FailedRank) -> str | None:
        """Return the assertion that failed, if one did: any error of CUDA may follow."""
        printed = self._output_of_abort(failed)
        if failed.raised is not None and may_be_of_gpu(failed.raised):
            printed = "\n".join(self._output.last_lines(failed.rank))
        found = _ASSERTED.search(printed)
        return f"{found[1]}: {found[2]}" if found else None

    def _output_of_abort(self, failed: FailedRank) -> str:
        """Return the last lines of a rank that SIGABRT killed."""
        if failed.signum != signal.SIGABRT:
            return ""
        return "\n".join(self._output.last_lines(failed.rank))


def _why_not_found() -> str | None:
    """Return that modules are sought in an environment other than the active one, if they are."""
    active = [env for name in _ACTIVE if (env := os.environ.get(name))]
    if not active or os.path.realpath(sys.prefix) in map(os.path.realpath, active):
        return None
    return f"meshrun is installed in `{sys.prefix}`, not in the active environment `{active[0]}`"
