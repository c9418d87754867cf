"""What a launch on one node does on the network: nothing outside loopback, no names."""

import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.kit import PROGRAMS, command, start_meshrun

pytestmark = pytest.mark.torch


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("words", [["--mesh", "2x2"], ["--nproc-per-node", "2"]])
def test_no_name_is_looked_up(words: list[str], tmp_path: Path) -> None:
    """Not one packet goes to port 53, with a mesh and with a group of the program's own."""
    trace = tmp_path / "trace"
    program = PROGRAMS / ("dns.py" if "--mesh" in words else "own_init.py")
    subprocess.run(
        [
            "strace",
            "-f",
            "-e",
            "trace=connect,sendto,sendmsg,sendmmsg",
            "-o",
            trace,
            *command(*words, program),
        ],
        check=True,
        capture_output=True,
    )
    lines = trace.read_text().splitlines()

    assert any("htons" in line for line in lines)
    assert [line for line in lines if re.search(r"htons\(53\)", line)] == []


def test_nothing_listens_outside_loopback(tmp_path: Path) -> None:
    """The store and gloo alike."""
    program = tmp_path / "program.py"
    program.write_text("import time, torch.distributed as d\nd.barrier()\nprint('up')\n"
                       "import signal; signal.pause()\n")  # fmt: skip
    with start_meshrun("--mesh", "2x2", program, folder=tmp_path) as running:
        running.wait_for("up", 4)
        listening = [
            connection.laddr.ip
            for process in psutil.Process(running.process.pid).children(recursive=True)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        running.process.terminate()
        running.wait()

    assert listening
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
