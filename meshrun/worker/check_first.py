"""The check before the program (``--check-first``), in a fork of each rank.

The fork joins its own process group, measures and exits. The program then finds the rank as it is
without a check: with no group, no extra thread and no memory in use on the device.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from meshrun.check.evaluate import Finding, best_bus, evaluate, failed_hosts, format_rate
from meshrun.check.requirements import parse_requirements
from meshrun.host.processes import die_with_parent, set_title, signals_blocked
from meshrun.protocol.packing import pack, unpack
from meshrun.protocol.rank_end import RankRaised
from meshrun.protocol.zygote_messages import Checked, StartRank
from meshrun.worker.early_settings import EarlySettings
from meshrun.worker.late_variables import raise_thread_counts
from meshrun.worker.process_group import join_mesh
from meshrun.worker.program import UncaughtException, format_raised
from meshrun.worker.reporter import Reporter

_TIMEOUT_S = 120.0
"""How long one collective of the check may take."""
_OUTCOME = "meshrun/check/outcome"


class CheckOutcome(Struct, frozen=True, kw_only=True):
    """What the check found, the same on every rank."""

    findings: list[Finding]


def check_first(order: StartRank, settings: EarlySettings, reporter: Reporter) -> str | None:
    """Check the mesh together with all other ranks.

    Returns:
        The reason to exclude this rank's node from the launch; "" if the ranks must not continue
        for another reason; ``None`` if nothing is wrong.
    """
    outcome: CheckOutcome | UncaughtException = _in_fork(partial(_find, order, settings, reporter))
    if isinstance(outcome, UncaughtException):
        reporter.report(RankRaised, **asdict(outcome), shown=False)
        os._exit(1)
    failed = failed_hosts(outcome.findings)
    return failed.get(socket.gethostname(), "") if outcome.findings else None


def _in_fork(find: Callable[[], CheckOutcome | UncaughtException]) -> Any:
    """Return what a fork of this process found; if a signal killed it, end by the same signal."""
    receiver, sender = os.pipe()
    rank = os.getpid()
    fork = os.fork()
    if fork == 0:
        try:
            die_with_parent(rank)
            os.close(receiver)
            found = find()
            with open(sender, "wb") as file:
                file.write(pack(found))
        finally:
            os._exit(0)  # this process must never run the program
    os.close(sender)
    with open(receiver, "rb") as file:
        # Peers may miss the fork, and have this rank asked to end, before it can be waited for.
        before = signal.signal(signal.SIGTERM, partial(_end_as_fork, fork, receiver))
        text = file.read()
        with signals_blocked([signal.SIGTERM]):
            _, status = os.waitpid(fork, 0)
            if os.WIFSIGNALED(status):
                _end_by_signal(os.WTERMSIG(status))
            signal.signal(signal.SIGTERM, before)
    return unpack(text, CheckOutcome | UncaughtException)


def _end_as_fork(fork: int, receiver: int, signum: int, _frame: object) -> None:
    """End by the signal that has killed the fork, or by the one that arrived."""
    is_ending = bool(select.select([receiver], [], [], 0)[0])  # it has closed the other end
    ended, status = os.waitpid(fork, 0 if is_ending else os.WNOHANG)
    _end_by_signal(os.WTERMSIG(status) if ended and os.WIFSIGNALED(status) else signum)


def _end_by_signal(signum: int) -> None:
    with suppress(OSError):  # that of SIGKILL cannot be changed
        signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _find(
    order: StartRank, settings: EarlySettings, reporter: Reporter
) -> CheckOutcome | UncaughtException:
    try:
        set_title(f"check of rank {order.rank}")
        raise_thread_counts(os.environ)
        with settings.in_effect():
            for module in order.imports:
                import_module(module)
            join_mesh(tuple(order.coordinate), reporter, purpose="/check", timeout_s=_TIMEOUT_S)
        return _check(order, partial(reporter.for_fork().report, Checked))
    except BaseException as error:
        return format_raised(error, may_be_ours=True)


def _check(order: StartRank, report: Callable[..., object]) -> CheckOutcome:
    """Return rank 0's outcome, which is reported before other ranks can act on it."""
    began_s = time.monotonic()
    import torch.distributed as dist

    from meshrun.worker.check_ranks import gather, measure

    require, *paths = order.check
    measured = gather(measure("quick", paths))
    store: Any = dist.distributed_c10d._get_default_store()
    if measured is not None:
        result = evaluate(measured, parse_requirements(require, "--require") if require else ())
        outcome = CheckOutcome(findings=result.findings)
        best = best_bus(result.rows).items()
        report(
            findings=[finding.text for finding in outcome.findings],
            hosts=list(failed_hosts(outcome.findings)),
            speeds=", ".join(f"{dim} {format_rate(rate)}" for dim, rate in best),
            seconds=time.monotonic() - began_s,
        )
        store.set(_OUTCOME, pack(outcome))
        return outcome
    received: CheckOutcome = unpack(store.get(_OUTCOME), CheckOutcome)
    return received
