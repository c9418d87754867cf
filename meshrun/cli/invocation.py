"""Who started this command line, and when."""

from __future__ import annotations

from dataclasses import dataclass

from meshrun.protocol.caller import Caller


@dataclass(frozen=True, slots=True)
class Invocation:
    """How this process was started."""

    began_ns: int
    """Monotonic time at which the user's wait began."""
    hosts_present: int = 0
    """Hosts of the ``--hosts`` launch that started this process, at its start; 0 without one."""
    is_quiet: bool = False
    """Whether another host of that launch prints what concerns all of them."""
    caller: Caller | None = None
    """The program that started this process and waits for it, if any."""
    step: str = ""
    """The Slurm step that this process is a task of, if a meshrun process waits for its end."""
    is_first_task: bool = False
    """Whether it is the first task of that step."""
