"""Gathers evidence about failed ranks: last lines, stacks, memory, timers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping

from meshrun.console.output import Output
from meshrun.host.memory import MemoryWatch, describe_full_shm
from meshrun.lifecycle.blame import Verdict, judge
from meshrun.lifecycle.state import State
from meshrun.protocol.generation import Evidence
from meshrun.protocol.raised import killed_worker
from meshrun.protocol.stacks import current_folder, describe, headline
from meshrun.supervisor.monitor import Monitor
from meshrun.supervisor.timers import Timers

_MOST_LINES = 6
_ON_EMPTY_STDIN = {("EOFError", "EOF when reading a line"), ("BdbQuit", "")}
"""Exceptions of ``input()`` and pdb when stdin is empty."""
_ON_NO_THREADS = ("can't start new thread", "Resource temporarily unavailable")
"""Messages of Python and C++ when no thread can be started."""
_NO_THREADS = "possibly at a limit: see `ulimit -u`, `ulimit -v` and pids.max of the cgroup"
_MOST_RANKS = 16
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""From gloo's ``tcp/pair.cc``."""
_IN_A_THREAD = re.compile(r"what\(\): .*?\b((?:CUDA|NCCL) error\b.+)")
"""Printed by C++ when a thread of torch's, such as NCCL's watchdog, ends the process."""


def gather(
    state: State,
    output: Output,
    monitor: Monitor,
    memory: MemoryWatch,
    *,
    why_empty: Callable[[int], str],
    why_gpu: Callable[[Verdict], str | None],
    timers: Timers | None,
) -> Mapping[int, Evidence]:
    """Return the evidence about failed ranks, the cause first.

    ``why_empty`` returns why a rank has no stdin, ``why_gpu`` the errors of its GPU, if any.
    """
    folder = current_folder()
    found = {}
    for verdict in judge(state)[:_MOST_RANKS]:
        crash = monitor.stacks.crash(verdict.rank) if verdict.signum is not None else None
        place = headline(crash.main, folder) if crash else ""
        found[verdict.rank] = Evidence(
            last_lines=tuple(output.last_lines(verdict.rank)[-_MOST_LINES:]),
            stack=tuple(describe(crash.main, folder)) if crash else (),
            place=place,
            why=_why_timer(state, verdict, timers)
            or _why(verdict, memory, why_empty)
            or _why_mismatch(verdict, output, monitor, place)
            or (monitor.why if verdict.rank == monitor.first_failed else None)
            or "; ".join(
                filter(None, (_why_terminated(verdict, output), _why_gpu(state, verdict, why_gpu)))
            ),
        )
    return found


def _why_gpu(
    state: State, verdict: Verdict, why_gpu: Callable[[Verdict], str | None]
) -> str | None:
    return why_gpu(verdict) if verdict.rank in state.ranks else None  # others report their own


def _why_timer(state: State, verdict: Verdict, timers: Timers | None) -> str | None:
    known = state.ranks.get(verdict.rank)  # other nodes report their own
    return timers.why_ended(known.pid, verdict.signum) if timers is not None and known else None


def _why_mismatch(verdict: Verdict, output: Output, monitor: Monitor, place: str) -> str | None:
    """Return what gloo reported if it aborted a rank that received more than it expected."""
    found = _MISMATCH.search(_output_of_abort(verdict, output))
    if found is None:
        return None
    peers = monitor.describe_peers(verdict.rank, place)
    text = f"a peer sent {found[1]} bytes where {found[2]} were expected: the ranks call different"
    return f"{text} collectives, or one with different shapes{peers and f'; {peers}'}"


def _why_terminated(verdict: Verdict, output: Output) -> str | None:
    """Return the error of CUDA or NCCL for which a thread of torch's ended the rank, if it did.

    It may come before the main thread's exception, which waits for the GPU less often.
    """
    found = _IN_A_THREAD.findall(_output_of_abort(verdict, output))
    return found[-1].strip() if found and verdict.raised is None else None


def _output_of_abort(verdict: Verdict, output: Output) -> str:
    """Return the last lines of a rank that SIGABRT killed."""
    return "\n".join(output.last_lines(verdict.rank)) if verdict.signum == signal.SIGABRT else ""


def _why(verdict: Verdict, memory: MemoryWatch, why_empty: Callable[[int], str]) -> str | None:
    """Return what explains the end of a rank, or of one of its loader workers."""
    raised = verdict.raised
    if raised is not None and (raised.kind, raised.message) in _ON_EMPTY_STDIN:
        return why_empty(verdict.rank)
    if raised is not None and raised.kind == "RuntimeError" and raised.message in _ON_NO_THREADS:
        return _NO_THREADS
    worker = (killed_worker(verdict.raised) if verdict.raised else None) or ""
    killed = verdict.signum == signal.SIGKILL and not verdict.asked_to_end
    if killed or worker.endswith("Killed"):
        return memory.why_killed()
    if verdict.signum == signal.SIGBUS or worker.endswith("Bus error"):
        return describe_full_shm()
    return None
