"""A launch on one node uses only loopback, and looks up no names."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.kit import PROGRAMS, command, start_meshrun
from tests.variations import ordinary

pytestmark = pytest.mark.torch


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    "words", ordinary([["--mesh", "2x2"], ["--nproc-per-node", "2"]], ["--mesh", "2x2"])
)
def test_no_name_is_looked_up(words: list[str], tmp_path: Path) -> None:
    """No packet goes to port 53, with a mesh or with the program's own group."""
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


@pytest.mark.parametrize(
    "words", ordinary([["--mesh", "dp=2,tp=2"], ["--nproc-per-node", "2"]], ["--mesh", "dp=2,tp=2"])
)
def test_nothing_listens_outside_loopback(words: list[str], tmp_path: Path) -> None:
    """Neither the store nor gloo's groups of any dim; and no Unix socket has a name."""
    program = tmp_path / "program.py"
    program.write_text(_EVERY_GROUP)
    ranks = 4 if "--mesh" in words else 2
    with start_meshrun("-v", *words, program, folder=tmp_path) as running:
        running.wait_for("up", ranks)
        family = psutil.Process(running.process.pid).children(recursive=True)
        family.append(psutil.Process(running.process.pid))
        found = [each for process in family for each in process.net_connections("all")]
        running.process.terminate()
        running.wait()
    listening = [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    unix = [each.laddr for each in found if each.family == socket.AF_UNIX]

    assert len(listening) > ranks  # the store's socket, and at least one per rank
    assert {place.ip for place in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert [each for each in found if each.type == socket.SOCK_DGRAM and each.laddr] == []
    assert unix
    # Other processes could connect to a path or an abstract name.
    assert {place for place in unix if place} == set()
    (store,) = re.findall(r"listening: the store on 127.0.0.1 port (\d+),", running.stderr)
    assert int(store) in {place.port for place in listening}
    assert "listening: ranks on lo, so that gloo" in running.stderr


_EVERY_GROUP = """
import signal
import torch
import torch.distributed as dist
from meshrun import current_mesh, has_mesh

if has_mesh():
    groups = [None, *current_mesh().get_all_groups()]
else:
    dist.init_process_group("gloo")
    groups = [None]
for group in groups:
    dist.all_reduce(torch.ones(1), group=group)
print("up", flush=True)
signal.pause()
"""
