"""The report of ``--check``: a table of the dims, the findings, and the hosts that passed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from meshrun.check.evaluate import (
    CheckResult,
    Finding,
    best_bus,
    failed_hosts,
    format_rate,
    format_size,
)
from meshrun.protocol.packing import to_builtins
from meshrun.wording import columns, count

_HEADER = ("DIM", "OPERATION", "SIZE", "MIN", "MEDIAN", "MAX", "BUS", "SLOWEST GROUP")
SHARED_CORES = "ranks share cores, so their speeds are not compared"


def name_findings(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, or one that says there is none."""
    return [f"found: {finding.text}" for finding in findings] or ["found nothing wrong"]


def render_check(result: CheckResult) -> str:
    """Return the result as text."""
    measured, layout, findings = result.measured, result.layout, result.findings
    lines = [f"checked {count(layout.world_size, 'rank')} on {count(layout.nnodes, 'node')}"]
    if result.rows:
        lines += ["", *_table(result)]
    missing = {each.partition(":")[0] for rank in measured.ranks for each in rank.unsupported}
    if missing:
        names = ", ".join(sorted(missing))
        lines += ["", f"not measured, because the backend does not support it: {names}"]
    if best := best_bus(result.rows):
        shown = ", ".join(f"{dim} {format_rate(rate)}" for dim, rate in best.items())
        lines += ["", f"slowest group of each dim, all_reduce at its best size: {shown}"]
    if measured.shares_cores:
        lines += ["", SHARED_CORES]
    lines.append("")
    lines += name_findings(findings)
    failed = failed_hosts(findings)
    passed = Counter(rank.host for rank in measured.ranks if rank.host not in failed)
    if failed and passed:
        hostfile = (f"  {host} slots={ranks}" for host, ranks in passed.items())
        lines += ["", "hosts that passed:", *hostfile]
    return "\n".join(lines)


def render_check_json(result: CheckResult) -> str:
    """Return the result as JSON."""
    failed = failed_hosts(result.findings)
    hosts = dict.fromkeys(rank.host for rank in result.measured.ranks)
    document = {
        "schema": {"name": "meshrun.check", "version": 1},
        "passed": not result.findings,
        "hosts": {"passed": [host for host in hosts if host not in failed], "failed": failed},
        "findings": to_builtins(result.findings),
        "dims": to_builtins(result.rows),
        "ranks": to_builtins(result.measured.ranks),
    }
    return json.dumps(document, indent=2)


def _table(result: CheckResult) -> list[str]:
    cells: list[tuple[str, ...]] = [_HEADER]
    for row in result.rows:
        times = (f"{seconds * 1e3:.3f} ms" for seconds in row.seconds)
        slowest = ",".join(map(str, row.slowest[:6])) + (",..." if len(row.slowest) > 6 else "")
        if len(row.slowest) == result.layout.world_size:
            slowest = ""  # the only group
        cells.append(
            (row.dim, row.op, format_size(row.bytes), *times, format_rate(row.bus), slowest)
        )
    return columns(cells, right=range(2, 7))
