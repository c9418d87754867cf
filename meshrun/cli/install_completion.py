"""``--install-completion``: write a completion script and have the user's shell load it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from meshrun.cli.completion import render_completion
from meshrun.cli.option import ParsedOptions
from meshrun.errors import HostError, UsageError
from meshrun.host.whole_file import write_whole

_SHELLS = ("bash", "zsh", "fish")
_OPTION = "--install-completion"


def install_completion(
    table: type[ParsedOptions], env: Mapping[str, str], shell: str | None = None
) -> str:
    """Write a completion script for a shell, by default the one that runs this process.

    Returns:
        A message that says what was written.

    Raises:
        UsageError: If the shell is not supported.
        HostError: If a file cannot be written.
    """
    shell = shell or _shell(env)
    home = Path(env.get("HOME") or Path.home())
    if shell == "fish":
        config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
        script, startup = config / "fish" / "completions" / "meshrun.fish", None
    else:
        data = Path(env.get("XDG_DATA_HOME") or home / ".local" / "share")
        script = data / "meshrun" / f"completion.{shell}"
        startup = Path((env.get("ZDOTDIR") if shell == "zsh" else None) or home) / f".{shell}rc"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        write_whole(str(script), render_completion(shell, table) + "\n", _OPTION)
        done = [f"wrote {script}"]
        path = shlex.quote(str(script))
        line = f"[ -r {path} ] && . {path}  # completion of meshrun"
        if startup is not None and _add_line(startup, line):
            done.append(f"added a line to {startup} that loads it")
    except OSError as error:
        raise HostError(f"{_OPTION}: cannot write `{error.filename}`: {error.strerror}") from error
    return "\n".join([*done, f"start a new {shell} to use it; run this again after an upgrade"])


def _add_line(startup: Path, line: str) -> bool:
    """Append a line to a file unless it contains the line; return whether it was appended."""
    text = startup.read_text(errors="surrogateescape") if startup.exists() else ""
    if line in text.splitlines():
        return False
    newline = "\n" if text and not text.endswith("\n") else ""
    with startup.open("a") as file:
        file.write(f"{newline}{line}\n")
    return True


def _shell(env: Mapping[str, str]) -> str:
    """Return the nearest shell among this process's ancestors, else the login shell."""
    import psutil

    ancestors = [process.name().lstrip("-") for process in psutil.Process().parents()]
    login = os.path.basename(env.get("SHELL", ""))
    for name in (*ancestors, login):
        if name in _SHELLS:
            return name
    raise UsageError(
        f"{_OPTION} supports {', '.join(_SHELLS)}, found SHELL={login}",
        hint="print a script to install by hand: `meshrun --print-completion SHELL`",
    )
