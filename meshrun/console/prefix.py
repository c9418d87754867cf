"""What goes before each line of a rank on the console."""

from __future__ import annotations

import time
from string import Template

from meshrun.console.lines import Prefix
from meshrun.layout.labels import rank_label
from meshrun.plan.plan import LaunchPlan, RankPlan

_TORCHRUNS = "[${role_name}${local_rank}]:"


def line_prefix(
    plan: LaunchPlan, rank: RankPlan, hostname: str, *, teed: bool = False, copied: bool = False
) -> Prefix:
    """Return what goes before each line of a rank.

    Args:
        plan: Holds the template, if one was given.
        rank: Whose lines.
        hostname: Name of this machine.
        teed: Whether the lines go to a file too, so that torchrun would have ``[default0]:``.
        copied: Whether they go to a file of copied lines, where that stands in for coordinates.
    """
    asked = plan.request.console
    is_torchruns = asked.prefix == "torchrun"
    if is_torchruns and not (teed or copied):
        return b""
    template = asked.template or (_TORCHRUNS if is_torchruns or copied else None)
    label = rank_label(plan.layout, rank.rank)
    if template is None:
        return f"[{label}] ".encode(errors="backslashreplace") if asked.prefix == "mesh" else b""
    fields = {
        "role_name": plan.request.role,
        "local_rank": str(rank.local_rank),
        "rank": str(rank.rank),
        "hostname": hostname,
        "host": hostname,
        "node_rank": str(rank.node_rank),
        "coordinate": label,
    }
    filled = Template(template).safe_substitute(fields)
    if "${time}" not in filled and "$time" not in filled:
        return filled.encode(errors="backslashreplace")

    def with_time() -> bytes:
        now = time.strftime("%Y-%m-%d %H:%M:%S") + f".{time.time_ns() // 1_000_000 % 1000:03d}"
        return Template(filled).safe_substitute(time=now).encode(errors="backslashreplace")

    return with_time
