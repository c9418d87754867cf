"""What serves torch's rendezvous goes away just as a node comes to it."""

from __future__ import annotations

import threading

import pytest

from meshrun.host.sockets import listen_on
from tests.kit import PROGRAMS, run_meshrun

pytestmark = pytest.mark.torch


def test_no_longer_than_the_meeting_may_take() -> None:
    """torch would try to connect for a minute, and again."""
    listener = listen_on("127.0.0.1", 0)
    port = listener.getsockname()[1]

    def answer_once() -> None:
        connection, _ = listener.accept()
        listener.close()
        connection.close()

    answering = threading.Thread(target=answer_once)
    answering.start()
    ours = run_meshrun(
        "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
        "--rdzv-conf", "is_host=0,join_timeout=3", PROGRAMS / "wait.py",
    )  # fmt: skip
    answering.join()

    assert ours.returncode == 69, ours.stderr
    assert f"error: c10d at 127.0.0.1:{port}: " in ours.stderr
