"""Processes that SIGKILL does not end, as they wait for a file system that does not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit import ENDED_TOO, PROGRAMS, ZYGOTE, start_meshrun, wait_until

pytestmark = pytest.mark.nightly
HOST = os.uname().nodename
SURVIVES = "survived SIGKILL: the kernel cannot kill a process that is waiting for"
KILLED = f"{ZYGOTE} was killed by SIGKILL, {ENDED_TOO}"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """Return a file that holds each process that looks at it, until the test ends."""
    folder = tmp_path / "elsewhere" / "mount"
    folder.mkdir(parents=True)
    server = subprocess.Popen(
        [sys.executable, PROGRAMS / "hung_mount.py", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            pytest.skip("no file system can be mounted with FUSE here")
        yield folder / "file"
    finally:
        server.kill()
        server.communicate()
        subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def accessed(hung: Path) -> Callable[[], bool]:
    """Return a function that tells whether a process has looked at the file."""
    return hung.parent.with_name("accessed").exists


def test_a_rank_that_survives_sigkill_costs_no_node(
    fake_torch: object, hung: Path, tmp_path: Path
) -> None:
    """Its launcher answers the other ones, even if they expect that sooner than a rank's end."""
    (program := tmp_path / "held.py").write_text(
        "import os, time\n"
        f"os.stat({str(hung)!r}) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--node-timeout", "2", program)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    with start_meshrun("--node-rank", "0", "--master-port", "0", *words, folder=first) as run:
        wait_until(lambda: "--rdzv-endpoint" in run.stderr, lambda: run.stderr)
        endpoint = run.stderr.partition("--rdzv-endpoint ")[2].split()[0]
        with start_meshrun("--rdzv-endpoint", endpoint, *words, folder=second) as other:
            wait_until(accessed(hung), lambda: other.stderr)
            os.kill(other.zygote(), signal.SIGKILL)

            assert (run.wait(), other.wait()) == (137, 137), run.stderr
    assert run.stderr.endswith(f"error: on {HOST}, {KILLED}\n"), run.stderr
    assert SURVIVES in other.stderr


def test_a_zygote_that_survives_sigkill_is_left(
    fake_torch: object, hung: Path, tmp_path: Path
) -> None:
    """The launch says so and ends, as with a rank."""
    (tmp_path / "looks.py").write_text(f"import os\nos.stat({str(hung)!r})\n")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ['PYTHONPATH']}"}
    words = ("--preload", "looks", PROGRAMS / "echo.py")
    with start_meshrun(*words, env=env, folder=tmp_path) as running:
        wait_until(accessed(hung), lambda: running.stderr)
        zygote = running.zygote()
        running.signal(signal.SIGTERM)

        assert running.wait() == 143
    assert f"process {zygote} {SURVIVES}" in running.stderr
