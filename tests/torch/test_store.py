"""The launch's store, which serves on a socket that the launcher has bound."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from meshrun.zygote.store import serve_store

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
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((bound, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = serve_store(port, listener.detach())
    store.set("key", "value")
    client = TCPStore(
        reached, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )

    assert client.get("key") == b"value"
