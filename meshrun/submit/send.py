"""Submits a job with sbatch or kubectl, and shows their message if they refuse it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshrun.errors import HostError

Hints = Mapping[str, str]


def hand_in(
    command: Sequence[str],
    text: str,
    *,
    extras: Sequence[str] = (),
    hints: Hints = MappingProxyType({}),
) -> str:
    """Run a scheduler's command with ``text`` on its stdin; return what it printed.

    Args:
        command: Its words.
        text: The script or manifest.
        extras: What the user adds to the words.
        hints: What to try where a word stands in a refusal.

    Raises:
        HostError: If the command is not here, or refuses.
    """
    name = command[0]
    if shutil.which(name) is None:
        raise HostError(
            f"{name} is not installed on this machine",
            hint=f"write the job with --dry-run -o FILE, and run {name} where it is installed",
        )
    words = [*command, *(word for extra in extras for word in shlex.split(extra))]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        hint = next((hint for word, hint in hints.items() if word in said), None)
        raise HostError(f"{name} refused the job: {said}", hint=hint)
    return done.stdout.strip()
