"""How long each phase of a start took, for ``--timings``."""

from __future__ import annotations

from meshrun.protocol.result import Timings


def render_timings(timings: Timings) -> str:
    """Return one line a phase, in seconds; phases that were never reached are left out."""
    began = timings.began_ns
    imported = timings.zygote_ready_ns
    steps = [
        ("launcher, until torch is imported", began, imported),
        ("  of which the import itself", None, None),
        ("ranks started", imported, timings.last_started_ns),
        ("ranks in the process group", timings.last_started_ns, timings.last_joined_ns),
        ("mesh ready, program starts", timings.last_joined_ns or imported, timings.last_ready_ns),
        ("program", timings.last_ready_ns, timings.last_exited_ns),
        ("end", timings.last_exited_ns, timings.ended_ns),
        ("all", began, timings.ended_ns),
    ]
    lines = []
    for name, start, end in steps:
        if name.startswith("  of") and timings.import_ns is not None:
            lines.append(_line(name, timings.import_ns))
        elif start is not None and end is not None:
            lines.append(_line(name, max(0, end - start)))
    return "\n".join(lines)


def _line(name: str, duration_ns: int) -> str:
    return f"meshrun: {name:<34}{duration_ns / 1e9:8.3f} s"
