"""torch-elastic's own events, for ``--event-log-handler``.

Source:
    ``_construct_event`` in torch 2.13's ``distributed/elastic/agent/server/api.py``.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

from meshrun.console.console import Console
from meshrun.errors import UsageError
from meshrun.host.entry_points import entry_points, load
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.error_record import render_record
from meshrun.protocol.events import AllCleared, AllJoined, Event, NextBegins
from meshrun.protocol.generation import RankState
from meshrun.protocol.result import LaunchResult, signal_name
from meshrun.protocol.zygote_messages import RankStarted
from meshrun.supervisor.watcher import Watcher

ENTRY_POINTS = "torchrun.event_log_handlers"
"""Group of entry points for a ``logging.Handler``, or a callable that returns one."""
_BUILT_IN = ("null", "console", "dynamic_rendezvous")


def _load_handler(name: str) -> logging.Handler:
    found = entry_points(ENTRY_POINTS)
    if name not in found:
        raise UsageError(
            f"--event-log-handler: no handler named `{name}`",
            hint=f"use null, console, or an entry point in the group {ENTRY_POINTS}",
        )
    loaded = load(ENTRY_POINTS, name, found[name])
    try:
        handler = loaded if isinstance(loaded, logging.Handler) else loaded()
    except Exception as error:
        raise UsageError(f"cannot load --event-log-handler {name}: {error}") from error
    if not isinstance(handler, logging.Handler):
        raise UsageError(f"--event-log-handler {name} is not a logging.Handler")
    return handler


class ElasticEvents(Watcher):
    """Turns events into torch-elastic's records, each one a JSON object."""

    def __init__(self, plan: LaunchPlan, run_id: str, emit: Callable[[str], None]) -> None:
        self.update_plan(plan)
        self._run_id = run_id
        self._emit = emit
        self._began_ns = self._waits_since_ns = time.monotonic_ns()
        self._waited_ns = 0
        self._generation: int | None = None
        """The last generation whose ranks were started."""

    def on_event(self, event: Event, state: State) -> None:
        """Record the start of a worker and, before the first one, how long nodes took to join."""
        if isinstance(event, AllCleared):
            self._waits_since_ns = event.at_ns
        elif isinstance(event, AllJoined | NextBegins):
            self._waited_ns = time.monotonic_ns() - self._waits_since_ns
        elif isinstance(event, RankStarted):
            if state.generation != self._generation:
                self._generation = state.generation
                self._record("RENDEZVOUS", state, duration_ms=self._waited_ns / 1e6)
                self._record("ASSIGN_WORKER_RANKS", state, duration_ms=0.0)
            self._record("START", state, rank=event.rank)

    def end(self, state: State, result: LaunchResult) -> None:
        """Record how each worker and the launch ended."""
        if self._generation is None:
            waited_ms = (time.monotonic_ns() - self._waits_since_ns) / 1e6
            self._record("RENDEZVOUS", state, duration_ms=waited_ms)
        failed = {failure.rank for failure in result.failures}
        for rank, rank_state in state.ranks.items():
            if rank in failed and rank_state.pid is not None:
                self._record_failure(rank, rank_state, state)
            elif rank_state.pid is not None:
                self._record("SUCCEEDED", state, rank=rank)
        if result.exit_code:
            why = str(result.trouble) if result.trouble else None
            stopped = result.signum and f"received {signal_name(result.signum)}"
            self._record("FAILED", state, raw_error=why or stopped or None)
        else:
            self._record("SUCCEEDED", state)

    def _record_failure(self, rank: int, rank_state: RankState, state: State) -> None:
        exit_code = os.waitstatus_to_exitcode(
            rank_state.exited.wait_status if rank_state.exited else 0
        )
        was_asked = rank_state.asked_to_end_ns is not None
        how = "TERMINATED" if was_asked else "FAILED"
        error = None if was_asked else json.dumps({"message": "<NONE>"})
        if rank_state.raised is not None:
            error = render_record(rank_state.raised, exit_code or 1)
        self._record(how, state, rank=rank, exit_code=exit_code, raw_error=error)

    def _record(
        self,
        what: str,
        state: State,
        *,
        rank: int | None = None,
        exit_code: int | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
    ) -> None:
        details = dict(self._details(rank))
        pid = None if rank is None else state.ranks[rank].pid
        if rank is not None:
            details.update(exit_code=(exit_code,), worker_pid=(pid if exit_code else None,))
        record = {
            "name": f"torchelastic.worker.status.{what}",
            "source": "AGENT" if rank is None else "WORKER",
            "timestamp": 0,  # as in torch-elastic
            "metadata": {
                "run_id": self._run_id,
                "global_rank": rank,
                "group_rank": self.plan.node_rank,
                "worker_id": None if rank is None else str(pid),
                "role": self.plan.request.role,
                "hostname": socket.gethostname(),
                "state": what,
                "total_run_time": int((time.monotonic_ns() - self._began_ns) / 1e9),
                "rdzv_backend": self.plan.request.rendezvous.backend,
                "raw_error": raw_error,
                "metadata": json.dumps(details),
                "agent_restarts": state.restarts,
                "duration_ms": duration_ms,
            },
        }
        self._emit(json.dumps(record))

    def _details(self, rank: int | None) -> Iterator[tuple[str, object]]:
        layout, program = self.plan.layout, self.plan.program
        yield "group_world_size", layout.nnodes
        executable = program.target if program.kind == "command" else sys.executable
        yield "entry_point", os.path.basename(executable)
        if rank is not None:
            yield "local_rank", (layout.local_rank(rank),)
            role_rank, role_world_size = self.plan.place_in_role(rank)
            yield "role_rank", (role_rank,)
            yield "role_world_size", (role_world_size,)


def _handle(handler: logging.Handler, text: str) -> None:
    """Pass a text to a handler as a record of torch-elastic's logger."""
    record = {"name": "torchelastic-events", "msg": text, "levelno": logging.INFO}
    handler.handle(logging.makeLogRecord({**record, "levelname": "INFO"}))


def make_elastic_events(plan: LaunchPlan, run_id: str, console: Console) -> ElasticEvents | None:
    """Return a watcher that emits torch-elastic's events, or ``None`` for the handler ``null``.

    Raises:
        UsageError: If no package provides the handler, or it cannot be loaded.
    """
    name = plan.request.event_log_handler
    if name not in _BUILT_IN:
        return ElasticEvents(plan, run_id, partial(_handle, _load_handler(name)))
    if name != "console":
        return None
    return ElasticEvents(
        plan, run_id, lambda text: console.print_line(text.encode(), to_stderr=True)
    )
