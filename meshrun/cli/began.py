"""How this process of the command line came to be."""

from __future__ import annotations

from dataclasses import dataclass

from meshrun.protocol.caller import Caller


@dataclass(frozen=True, slots=True)
class Began:
    """How this process came to be."""

    at_ns: int
    """Monotonic time at which the user's wait began."""
    hosts_present: int = 0
    """Hosts of the ``--hosts`` launch that started this one, at its start; 0 if none did."""
    is_quiet: bool = False
    """Whether another of its hosts prints what concerns all of them."""
    caller: Caller | None = None
    """Who started it and uses it, if anybody does."""
    step: str = ""
    """The step of Slurm that it is a task of, if the meshrun that started it is told the end."""
    is_first_task: bool = False
    """Whether it is the first task there."""
