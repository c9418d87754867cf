"""Connections to node 0 that have not authenticated yet."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from meshrun.host.network import listen_on
from meshrun.host.reactor import Reactor
from meshrun.rendezvous.hub import Hub
from meshrun.rendezvous.this_node import ThisNode
from meshrun.rendezvous.unauthenticated import Unauthenticated
from tests.parties import SECRET, info
from tests.plans import config_of


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Let this process open no further descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_launcher_out_of_descriptors_accepts_connections_later() -> None:
    """It reports this once, does not spin meanwhile, and loses no connection."""
    notes: list[str] = []
    with Reactor() as reactor, listen_on("127.0.0.1", 0) as listener:

        def turn() -> int:
            return reactor.poll(0)

        hub = Hub(reactor, notes.append)
        config = config_of(host="127.0.0.1", port=1)
        node = ThisNode(config=config, info=info("node0"), secret=SECRET, hub=hub)
        unauthenticated = Unauthenticated(listener, node, lambda *_: None)
        with socket.create_connection(listener.getsockname(), timeout=10) as caller:
            with no_more_descriptors():
                assert turn() == 1
                assert turn() == 0
                unauthenticated.check()
                turn()
            unauthenticated.check()
            while turn():  # accepts, then greets
                pass

            assert notes == ["a connection could not be accepted: Too many open files"]
            assert caller.recv(1)  # the greeting
            unauthenticated.close("the launch has ended")
            assert not reactor.watched
