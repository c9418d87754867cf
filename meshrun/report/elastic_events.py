"""torch-elastic's own events, for ``--event-log-handler``.

Source:
    ``_construct_event`` in torch 2.13's ``distributed/elastic/agent/server/api.py``.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator

from meshrun.console.console import Console
from meshrun.errors import UsageError
from meshrun.host.entry_points import entry_points, load
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event
from meshrun.protocol.from_zygote import RankStarted
from meshrun.protocol.result import LaunchResult, split_wait_status

ENTRY_POINTS = "torchrun.event_log_handlers"
"""Group in which a package names its ``logging.Handler``, or what makes one."""
_BUILT_IN = ("null", "console", "dynamic_rendezvous")


def load_handler(name: str) -> logging.Handler | None:
    """Return the handler of that name; ``None`` for ``null`` and for ``console``, which is ours.

    Raises:
        UsageError: If no package has it, or it cannot be loaded.
    """
    if name in _BUILT_IN:
        return None
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


class ElasticEvents:
    """Turns what happens into torch-elastic's records, each one JSON object."""

    def __init__(self, plan: LaunchPlan, run_id: str, emit: Callable[[str], None]) -> None:
        self.replan(plan)
        self._run_id = run_id
        self._emit = emit
        self._began_s = time.time()

    def __call__(self, event: Event, state: State, console: Console) -> None:  # noqa: ARG002
        """Record the start of a worker."""
        if isinstance(event, RankStarted):
            self._record("START", rank=event.rank)

    def replan(self, plan: LaunchPlan) -> None:
        """Take the plan as it is known now; the nodes may have met."""
        self.plan = plan

    def end(self, state: State, result: LaunchResult) -> None:
        """Record how each worker ended, and the launch."""
        for rank, known in state.ranks.items():
            status = known.exited.wait_status if known.exited else 0
            code, signum = split_wait_status(status)
            failed = any(failure.rank == rank for failure in result.failures)
            told = known.told_to_end_ns is not None
            how = "TERMINATED" if failed and told else "FAILED" if failed else "SUCCEEDED"
            raised = None if known.raised is None else known.raised.traceback
            exit_code = None if not failed else -signum if signum is not None else code
            pid = known.pid if failed else None
            self._record(how, rank=rank, exit_code=exit_code, worker_pid=pid, raw_error=raised)
        self._record("FAILED" if result.exit_code else "SUCCEEDED", restarts=result.restarts)

    def _record(
        self,
        state: str,
        *,
        rank: int | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
        raw_error: str | None = None,
        restarts: int = 0,
    ) -> None:
        details = dict(self._details(rank))
        if rank is not None:
            details.update(exit_code=(exit_code,), worker_pid=(worker_pid,))
        record = {
            "name": f"torchelastic.worker.status.{state}",
            "source": "AGENT" if rank is None else "WORKER",
            "timestamp": 0,  # torch-elastic leaves it at that
            "metadata": {
                "run_id": self._run_id,
                "global_rank": rank,
                "group_rank": self.plan.node_rank,
                "worker_id": None if rank is None else str(worker_pid or rank),
                "role": self.plan.request.role,
                "hostname": socket.gethostname(),
                "state": state,
                "total_run_time": int(time.time() - self._began_s),
                "rdzv_backend": self.plan.request.rendezvous.backend,
                "raw_error": raw_error,
                "metadata": json.dumps(details),
                "agent_restarts": restarts,
                "duration_ms": None,
            },
        }
        self._emit(json.dumps(record))

    def _details(self, rank: int | None) -> Iterator[tuple[str, object]]:
        layout = self.plan.layout
        yield "group_world_size", layout.nnodes
        yield "entry_point", self.plan.program.target
        if rank is not None:
            yield "local_rank", (layout.local_rank(rank),)
            role_rank, role_world_size = self.plan.place_in_role(rank)
            yield "role_rank", (role_rank,)
            yield "role_world_size", (role_world_size,)


def emit_through(handler: logging.Handler) -> Callable[[str], None]:
    """Return a function that gives a text to ``handler`` as a record of torch-elastic's logger."""

    def emit(text: str) -> None:
        record = {"name": "torchelastic-events", "msg": text, "levelno": logging.INFO}
        handler.handle(logging.makeLogRecord({**record, "levelname": "INFO"}))

    return emit


def make_elastic_events(plan: LaunchPlan, run_id: str, console: Console) -> ElasticEvents | None:
    """Return what tells torch-elastic's events, if anybody wants them."""
    name = plan.request.event_log_handler
    if name == "null":
        return None
    handler = load_handler(name)
    if handler is not None:
        return ElasticEvents(plan, run_id, emit_through(handler))

    def emit(text: str) -> None:
        console.print_line(text.encode(), to_stderr=True)

    return ElasticEvents(plan, run_id, emit) if name == "console" else None
