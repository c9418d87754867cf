"""The prefix of each line of a rank on the console."""

from __future__ import annotations

import time
from string import Template

from meshrun.console.lines import Prefix
from meshrun.layout.labels import rank_label
from meshrun.plan.plan import LaunchPlan, RankPlan

_TORCHRUN_TEMPLATE = "[${role_name}${local_rank}]:"


def line_prefix(
    plan: LaunchPlan, rank: RankPlan, hostname: str, *, teed: bool = False, copied: bool = False
) -> Prefix:
    """Return the prefix of each line of a rank.

    If they are ``teed`` to a file, torchrun prints ``[default0]:``. Those ``copied`` to a file of
    filtered lines have its prefix by default.
    """
    options = plan.request.console
    is_torchruns = options.prefix == "torchrun"
    if is_torchruns and not (teed or copied):
        return b""
    template = options.template or (_TORCHRUN_TEMPLATE if is_torchruns or copied else None)
    label = rank_label(plan.layout, rank.rank)
    if template is None:
        return f"[{label}] ".encode(errors="backslashreplace") if options.prefix == "mesh" else b""
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
