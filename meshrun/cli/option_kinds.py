"""Where help shows an option, and which variable it reads besides."""

from __future__ import annotations

from typing import Any

import typer

NO_VALUE = " "
"""What help shows as the value of a switch."""
MESH = "Choose the mesh"
LOOK = "Look first"
SUBMIT = "Hand it to a scheduler"
RUN = "Say what to run"
WORKERS = "Choose the workers"
SEE = "See what ranks print"
FILES = "Keep logs in files"
FAIL = "Stop, fail and restart"
MEET = "Meet"
HOSTS = "Launch on other hosts"
ACCEPTED = "Accepted from torchrun, without effect"


def own(*names: str, panel: str | None, text: str, metavar: str | None = None) -> Any:
    """An option of meshrun's own, which also reads ``MESHRUN_<NAME>``."""
    return _option("MESHRUN", names, help=text, metavar=metavar, rich_help_panel=panel)


def once(*names: str, panel: str | None, text: str, metavar: str | None = None) -> Any:
    """An option that no variable sets: what inherits it would submit or print, and not run."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel)


def torchrun(*names: str, panel: str | None, text: str, metavar: str | None = None) -> Any:
    """An option of torchrun's, which also reads ``PET_<NAME>``."""
    return _option("PET", names, help=text, metavar=metavar, rich_help_panel=panel)


def _option(family: str, names: tuple[str, ...], **described: Any) -> Any:
    longest = max(names, key=len).lstrip("-").replace("-", "_").upper()
    return typer.Option(*names, envvar=f"{family}_{longest}", show_envvar=False, **described)
