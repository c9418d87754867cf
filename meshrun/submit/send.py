"""Handing a job in: sbatch and kubectl, each with its own words if it refuses."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence

from meshrun.errors import HostError


def hand_in(
    command: Sequence[str], text: str, *, extras: Sequence[str] = (), hint: str | None = None
) -> str:
    """Run a scheduler's command with ``text`` on its stdin; return what it printed.

    Raises:
        HostError: If the command is not here, or refuses.
    """
    name = command[0]
    if shutil.which(name) is None:
        raise HostError(
            f"there is no {name} on this machine",
            hint=f"add --dry-run -o FILE, and run {name} where it is",
        )
    words = [*command, *(word for extra in extras for word in shlex.split(extra))]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise HostError(f"{name} refused the job: {said}", hint=hint)
    return done.stdout.strip()
