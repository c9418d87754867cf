"""Failures by host, across restarts and jobs: ``--node-history``.

The file has one JSON object per line, so that nodes and jobs that share it can append to it. A
failure is attributed to the node if the program cannot be the cause: a broken device, a lost node,
a process that something else killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from meshrun.console.console import Console
from meshrun.errors import HostError, MeshrunError, NodeExcludedError
from meshrun.host.exclusion import how_to_exclude, node_name
from meshrun.host.named_files import check_target, open_nonblocking
from meshrun.lifecycle.root_cause import describe_failed_rank, failed_ranks
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event, NodeLost
from meshrun.protocol.packing import Line, convert, read_json, to_builtins
from meshrun.protocol.rank_end import RankExited, RankRaised
from meshrun.protocol.result import LaunchResult
from meshrun.protocol.zygote_messages import Checked, NodeExcluded, RankStarted
from meshrun.supervisor.watcher import Watcher
from meshrun.wording import count

_DAYS = 30
_DAY_S = 86400
_MANY_FAILURES = 3
"""Failures of a node after which a launch names it."""
_NODE_ERROR = re.compile(
    r"(CUDA|HIP) error: (unknown error|unspecified launch failure|OS call failed)|ECC error|NVLink"
    r"|\bXid\b|hardware error|Input/output error|cuda initialization|system not yet initialized"
    r"|no CUDA-capable device|device\(s\) is/are busy|unsupported display driver"
)
_NODE_SIGNALS = frozenset({signal.SIGBUS, signal.SIGKILL})


class Failure(Struct, frozen=True, kw_only=True):
    """A line of the file."""

    time: float
    """Seconds since the epoch."""
    host: Line
    run_id: str
    reason: Line


def record_failure(
    path: str, host: str, run_id: str, reason: str, note: Callable[[str], None]
) -> None:
    """Append a failure to the file; if that is impossible, call ``note`` with the reason."""
    failure = Failure(time=time.time(), host=host, run_id=run_id, reason=reason)
    text = f"{json.dumps(to_builtins(failure))}\n".encode()
    try:
        check_target(path, "--node-history")  # a link may have appeared there since the start
        fd = os.open(
            path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # an incomplete line: the disk was full
                text = b"\n" + text
            while text:
                text = text[os.write(fd, text) :]
        finally:
            os.close(fd)
    except OSError as error:
        note(f"cannot write to {path} ({error.strerror})")
    except MeshrunError as error:
        note(error.message)


def check_node(plan: LaunchPlan, note: Callable[[str], None]) -> None:
    """Check that this node has not failed too often and, if requested, that its GPUs are healthy.

    Raises:
        NodeExcludedError: If it has failed too often.
        HostError: If the file cannot be read, or a GPU is faulty, which is then recorded.
    """
    request, host = plan.request, node_name(os.environ)
    path, most = request.node_history, request.max_node_failures
    if path is not None and most is not None:
        own = [failure for failure in read_history(path) if failure.host == host]
        recent = _recent(own, time.time())
        if len(recent) > most:
            raise NodeExcludedError(
                f"{_describe(recent)}; --max-node-failures is {most}",
                hint=f"leave the node out: {how_to_exclude(host, os.environ)}",
            )
    if not request.check_gpus:
        return
    from meshrun.supervisor.launch_gpus import examine_gpus

    try:
        examine_gpus(plan, note)
    except HostError as error:
        if path is not None:
            record_failure(path, host, request.rendezvous.run_id or "", error.message, note)
        raise


class NodeHistory(Watcher):
    """Appends the failures of this node to a file, and names nodes that fail often."""

    def __init__(self, plan: LaunchPlan, run_id: str, path: str, console: Console) -> None:
        self._path, self._run_id, self._console = path, run_id, console
        self._host = node_name(os.environ)
        self._generation, self._is_recorded = -1, False
        """The last generation whose ranks were started, and whether its failure is in the file."""
        self.update_plan(plan)
        failures = read_history(path)
        if not plan.node_rank:
            self._name_failing_nodes(failures)

    def on_event(self, event: Event, state: State) -> None:
        """Append a failure of this node, or the loss of another one."""
        if isinstance(event, NodeLost):
            self._append(event.host, f"the node was lost: {event.why}")
        elif isinstance(event, RankStarted) and state.generation != self._generation:
            self._generation, self._is_recorded = state.generation, False
        elif isinstance(event, NodeExcluded) and state.excluded is event:
            self._is_recorded = True
            self._append(self._host, f"excluded by {event.who}: {event.reason}")
        elif self._is_recorded:
            return
        elif isinstance(event, Checked) and event.hosts and state.nodes.is_alone:
            self._append(self._host, f"the check before the program found: {event.findings[0]}")
        elif isinstance(event, RankExited | RankRaised) and (why := node_failure(state)):
            self._is_recorded = True
            self._append(self._host, why)

    def end(self, state: State, result: LaunchResult) -> None:  # noqa: ARG002
        """Name nodes that fail often if the launch failed."""
        if result.exit_code and not self.plan.node_rank:
            try:
                self._name_failing_nodes(read_history(self._path))
            except MeshrunError as error:  # the file was readable at the start
                self._console.note(error.message)

    def _append(self, host: str, reason: str) -> None:
        record_failure(self._path, host, self._run_id, reason, self._console.note)

    def _name_failing_nodes(self, failures: Iterable[Failure]) -> None:
        for line in describe_history(failures, time.time()):
            self._console.note(line)


def read_history(path: str) -> list[Failure]:
    """Return the failures in a file, none if it does not exist; invalid lines are skipped.

    Raises:
        UsageError: If the path cannot name a file.
        HostError: If the file cannot be read, or could not be written.
    """
    check_target(path, "--node-history")
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise HostError(f"--node-history: `{path}` is not a regular file")
            return list(_parse(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise HostError(f"--node-history: cannot read `{path}`: {error.strerror}") from error


def describe_history(failures: Iterable[Failure], now_s: float) -> Iterator[str]:
    """Yield a line for each node that failed often recently."""
    by_host: dict[str, list[Failure]] = {}
    for failure in _recent(failures, now_s):
        by_host.setdefault(failure.host, []).append(failure)
    for host, of_host in sorted(by_host.items(), key=lambda item: -len(item[1])):
        if len(of_host) >= _MANY_FAILURES:
            yield f"{_describe(of_host)}; to leave it out: {how_to_exclude(host, os.environ)}"


def _recent(failures: Iterable[Failure], now_s: float) -> list[Failure]:
    begin_s, end_s = now_s - _DAYS * _DAY_S, now_s + _DAY_S  # clocks differ between nodes
    return [failure for failure in failures if begin_s < failure.time < end_s]


def _describe(failures: Sequence[Failure]) -> str:
    """Return how often a node failed, and why it did so last."""
    last = max(failures, key=lambda failure: failure.time)
    jobs = len({failure.run_id for failure in failures})
    return (
        f"{last.host} failed {count(len(failures), 'time')} in {count(jobs, 'job')} in the last"
        f" {_DAYS} days, most recently: {last.reason}"
    )


def _parse(lines: Iterable[str]) -> Iterator[Failure]:
    for line in lines:
        try:
            yield convert(Failure, read_json(line))
        except ValueError:
            continue


def node_failure(state: State) -> str | None:
    """Return how the first rank of this node failed, if the program cannot be the cause."""
    for failed in failed_ranks(state):
        if failed.rank not in state.ranks or failed.is_consequence or failed.asked_to_end:
            continue
        error = failed.raised.message if failed.raised else failed.error
        if failed.signum in _NODE_SIGNALS or _NODE_ERROR.search(error):
            return f"rank {failed.rank} {describe_failed_rank(failed)}"
        return None
    return None
