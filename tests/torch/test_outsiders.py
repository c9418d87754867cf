"""Connections of outsiders to the ranks' store do not disturb the launch."""

from __future__ import annotations

import random
import re
import resource
import shlex
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit import Running, command, wait_until
from tests.variations import ordinary

pytestmark = pytest.mark.torch

_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)
"""The first bytes of a client of torch's store (TCPStoreBackend.hpp): VALIDATE, and a number."""
_SET = b"\x01"
_PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist

print("up", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.002)
if not dist.is_initialized():
    dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
"""


@contextmanager
def launch(tmp_path: Path, *words: str, descriptors: int) -> Iterator[tuple[Running, int]]:
    """Start two ranks with few descriptors; yield the launch and the port of its store."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    ours = command("-v", *words, tmp_path / "program.py", tmp_path / "go")
    limited = ["sh", "-c", f"ulimit -S -n {descriptors}; exec {shlex.join(map(str, ours))}"]
    with open(tmp_path / "stdout", "wb") as out, open(tmp_path / "stderr", "wb") as err:
        process = subprocess.Popen(limited, stdout=out, stderr=err, start_new_session=True)
    running = Running(process, tmp_path)
    try:
        wait_until(lambda: "nothing else" in running.stderr, lambda: running.stderr)
        found = re.search(r"127\.0\.0\.1 port (\d+)", running.stderr)
        assert found is not None
        yield running, int(found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def connect() -> Iterator[Callable[[int, int], list[socket.socket]]]:
    """Return a function that opens many connections, which are closed after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    opened: list[socket.socket] = []

    def open_many(port: int, count: int) -> list[socket.socket]:
        new = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        opened.extend(new)
        return new

    yield open_many
    for each in opened:
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def finish(running: Running, tmp_path: Path) -> None:
    """Let the ranks connect, and wait for success."""
    (tmp_path / "go").touch()

    assert running.wait() == 0, running.stderr
    assert running.stdout.count("sum 2") == 2


SENT = {
    "garbage": random.Random(1).randbytes(65536),
    "a line of text": b"GET / HTTP/1.0\r\n\r\n",
    "half a greeting": _HELLO[:3],
    "an endless key": _HELLO + _SET + struct.pack("<Q", 2**62),
    "an endless value": _HELLO + _SET + struct.pack("<Q", 1) + b"k" + struct.pack("<Q", 2**40),
    "an unknown request": _HELLO + b"\xff" * 64,
    "a list of 2**60 keys": _HELLO + b"\x05" + struct.pack("<Q", 2**60),
}


@pytest.mark.parametrize(
    "words", ordinary([["--mesh", "dp=2"], ["--nproc-per-node", "2"]], ["--mesh", "dp=2"])
)
def test_ranks_connect_whatever_outsiders_send(
    words: list[str], connect: Callable[[int, int], list[socket.socket]], tmp_path: Path
) -> None:
    """Before the store accepts, and while ranks run, whether they have joined or not."""
    with launch(tmp_path, *words, descriptors=256) as (running, port):
        for sent in SENT.values():
            (outsider,) = connect(port, 1)
            outsider.sendall(sent)
        running.wait_for("up", 2)
        for sent in SENT.values():
            (outsider,) = connect(port, 1)
            outsider.sendall(sent)
        finish(running, tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="too few descriptors here"
)
def test_idle_connections_do_not_keep_ranks_out(
    connect: Callable[[int, int], list[socket.socket]], tmp_path: Path
) -> None:
    """More than the soft limit of descriptors, half of them before the store accepts."""
    with launch(tmp_path, "--nproc-per-node", "2", descriptors=1024) as (running, port):
        connect(port, 600)
        running.wait_for("up", 2)
        connect(port, 600)
        finish(running, tmp_path)


@pytest.mark.nightly
def test_a_slow_client_does_not_delay_ranks(
    connect: Callable[[int, int], list[socket.socket]], tmp_path: Path
) -> None:
    """It has sent half a request when the ranks start."""
    with launch(tmp_path, "--nproc-per-node", "2", descriptors=256) as (running, port):
        slow = connect(port, 20)
        for each in slow:
            each.sendall(_HELLO + _SET + struct.pack("<Q", 100) + b"k")
        running.wait_for("up", 2)
        for each in slow:
            each.sendall(b"k")
        finish(running, tmp_path)
