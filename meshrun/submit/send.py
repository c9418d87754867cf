"""Runs sbatch or kubectl to submit a job, and shows their message if they refuse it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshrun.errors import HostError
from meshrun.plan.parse import split_words

Hints = Mapping[str, str]


def run_with_input(
    command: Sequence[str],
    text: str,
    *,
    extras: Sequence[str] = (),
    hints: Hints = MappingProxyType({}),
) -> str:
    """Run a scheduler's command with ``text`` on its stdin; return what it printed.

    Args:
        command: The words of the command.
        text: The script or manifest.
        extras: The user's additional options, each a text of one or more words.
        hints: Hints by a text that an error message contains.

    Raises:
        UsageError: If the user's options cannot be split into words.
        HostError: If the command is not installed, or fails.
    """
    added = [word for extra in extras for word in split_words(extra, "--submit-arg")]
    name = command[0]
    if shutil.which(name) is None:
        raise HostError(
            f"{name} is not installed on this machine",
            hint=f"write the job with --dry-run -o FILE, and run {name} where it is installed",
        )
    done = subprocess.run(
        [*command, *added], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        hint = next((hint for part, hint in hints.items() if part in reason), None)
        raise HostError(f"{name} refused the job: {reason}", hint=hint)
    return done.stdout.strip()
