"""Machines that have too little of something: a clear error, and nobody left."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import FAKES, MARK, PROGRAMS, command, marked_processes, wait_until

RANKS = 4
NEEDED = 3 + RANKS
"""Launcher, zygote, store, and the ranks."""


@pytest.fixture
def as_nobody() -> Iterator[tuple[list[str], Path]]:
    """Return words that run a command as a user without processes, and a folder of that user."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can be a user who has no process yet")
    uid = random.SystemRandom().randrange(100_000, 2_000_000_000)
    words = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    # The Python that runs this may lie where only root can look.
    words += [f"--{kind}-caps=+dac_override,+dac_read_search" for kind in ("inh", "ambient")]
    folder = Path(tempfile.mkdtemp(prefix="of_nobody_", dir="/tmp"))
    os.chown(folder, uid, uid)
    try:
        if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("setpriv may not make another user of us here")
        yield words, folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("room", range(1, NEEDED + 1))
def test_a_full_process_table(
    room: int, as_nobody: tuple[list[str], Path], fake_torch: object
) -> None:
    """Wherever the last process goes: what cannot be started is said, the rest is ended."""
    words, folder = as_nobody
    ours = subprocess.run(
        [*words, *command("--nproc-per-node", str(RANKS), PROGRAMS / "echo.py")],
        env={
            **os.environ,
            "PYTHONPATH": str(FAKES),
            "TMPDIR": str(folder),
            "FAKE_TORCH_IMPORTS": "",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (room, room)),
    )
    wait_until(lambda: not marked_processes(os.environ[MARK]), lambda: ours.stderr)

    if room == NEEDED:
        assert (ours.returncode, len(ours.stdout.splitlines())) == (0, RANKS), ours.stderr
    else:
        assert ours.returncode == 71, ours.stderr
        assert "could not be started" in ours.stderr
        assert "hint: is the machine out of processes or memory? see `ulimit -u`" in ours.stderr
    assert "Traceback" not in ours.stderr
    assert list(folder.iterdir()) == []
