"""Submits a job with sbatch or kubectl, and shows their message if they refuse it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from meshrun.errors import HostError
from meshrun.plan.parse import split_words

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
        hints: What to try if a refusal contains a word.

    Raises:
        UsageError: If what the user adds cannot be read.
        HostError: If the command is not here, or refuses.
    """
    theirs = [word for extra in extras for word in split_words(extra, "--submit-arg")]
    name = command[0]
    if shutil.which(name) is None:
        raise HostError(
            f"{name} is not installed on this machine",
            hint=f"write the job with --dry-run -o FILE, and run {name} where it is installed",
        )
    done = subprocess.run(
        [*command, *theirs], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        hint = next((hint for word, hint in hints.items() if word in said), None)
        raise HostError(f"{name} refused the job: {said}", hint=hint)
    return done.stdout.strip()
