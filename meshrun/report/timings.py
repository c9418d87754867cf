"""How long each phase of a launch took, for ``--timings``."""

from __future__ import annotations

from meshrun.protocol.result import Timings


def render_timings(timings: Timings) -> str:
    """Return one line per phase, in seconds; phases that were not reached are omitted."""
    began = timings.began_ns
    imported = timings.zygote_ready_ns
    steps = [
        ("launcher, until torch is imported", began, imported),
        ("  of which the import itself", 0, timings.import_ns),
        ("ranks started", imported, timings.last_started_ns),
        ("ranks in the process group", timings.last_started_ns, timings.last_joined_ns),
        ("mesh ready, program starts", timings.last_joined_ns or imported, timings.last_ready_ns),
        ("program", timings.last_ready_ns, timings.last_exited_ns),
        ("end", timings.last_exited_ns, timings.ended_ns),
        ("all", began, timings.ended_ns),
    ]
    return "\n".join(
        f"meshrun: {name:<34}{max(0, end - start) / 1e9:8.3f} s"
        for name, start, end in steps
        if start is not None and end is not None
    )
