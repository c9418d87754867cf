"""Launches on kernels that lack newer system calls."""

import os
import signal
from pathlib import Path

from tests.kit import FAKES, PROGRAMS, start_meshrun, wait_until


def folders() -> list[Path]:
    """Return the temporary folders that exist."""
    return [*Path(os.environ["TMPDIR"]).glob("meshrun_*")]


def test_nothing_is_left_behind_on_an_older_kernel(fake_torch: object, tmp_path: Path) -> None:
    """If launcher and zygote are killed; and --warm says what it needs."""
    words = ("--warm", "--nproc-per-node", "2", PROGRAMS / "wait.py", "children")
    with start_meshrun(*words, caller=FAKES / "older_kernel.py", folder=tmp_path) as running:
        running.wait_for("up", 2)
        both = (running.zygote(), running.process.pid)
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in both:
                os.kill(pid, signum)
        assert running.wait() == 137
        wait_until(lambda: not folders(), lambda: str(folders()))
    assert running.stderr.startswith(
        "meshrun: --warm needs pidfd_open(2) of Linux 5.3 (Function not implemented);"
        " starting without it\n"
    )
