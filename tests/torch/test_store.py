"""The launch's store, which serves on a socket that the launcher has bound."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from meshrun.zygote.store import Guard, run_store, serve_store
from tests.kit import Running, start_meshrun, wait_until

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("0.0.0.0", "127.0.0.1"),
        ("::1", "::1"),
        ("::", "::1"),
    ],
)
def test_the_store_serves_on_every_address(bound: str, reached: str) -> None:
    """At once, even if it is not bound to 127.0.0.1, as on the first of several nodes."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((bound, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = serve_store(listener.detach())
    store.set("key", "value")
    client = TCPStore(
        reached, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )

    assert client.get("key") == b"value"


def test_the_store_process_never_looks_up_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's server does so for the first rank that connects, and serves no other meanwhile."""
    services: list[str] = []

    @contextmanager
    def files_only() -> Iterator[None]:
        services.append("files")
        yield
        services.append("dns")

    class Ended(Exception):
        pass

    class ServingGuard(Guard):
        def run(self) -> NoReturn:
            assert services == ["files"]
            raise Ended

    for name in ("processes.set_title", "allow_many_descriptors"):
        monkeypatch.setattr(f"meshrun.zygote.store.{name}", lambda *_: None)
    monkeypatch.setattr("meshrun.zygote.store.names_from_files_only", files_only)
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(Ended):
        run_store([listener.detach()], object.__new__(ServingGuard))


@pytest.mark.nightly
def test_requests_for_stacks_do_not_interrupt_a_connection_to_a_store(tmp_path: Path) -> None:
    """Otherwise torch would try again, and wait for its timeout once more."""
    (program := tmp_path / "connects.py").write_text(
        "import os, socket\n"
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "full = socket.create_server(('127.0.0.1', 0), backlog=0)\n"
        "waiting = [socket.socket() for _ in range(3)]\n"
        "for each in waiting:\n"
        "    each.setblocking(False)\n"
        "    each.connect_ex(full.getsockname())\n"
        "os.environ.update(MASTER_PORT=str(full.getsockname()[1]), RANK='1', WORLD_SIZE='2')\n"
        "print('up', flush=True)\n"
        "try:\n"
        "    dist.init_process_group('gloo', timeout=timedelta(seconds=4))\n"
        "except dist.DistNetworkError:\n"
        "    print('late')\n"
    )
    with start_meshrun("--device", "cpu", program, folder=tmp_path) as running:
        running.wait_for("up")
        wait_until(lambda: answers(running), lambda: running.stderr)
        running.wait_for("late")
        assert running.wait() == 0
    assert "Interrupted" not in running.stderr


def answers(running: Running) -> bool:
    """Return whether the rank has shown where it is, in the call."""
    running.signal(signal.SIGQUIT)
    time.sleep(0.3)
    return "connects.py:12 in <module>" in running.stderr
