"""The process that represents a node here: hands its streams to the one connected to Ray.

It ends as the agent on the node does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

LOST = 255
"""How it ends if the node is lost, as ssh does."""


def main(_: object) -> None:
    """Serve one node: ``ADDRESS NAME``."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `ray job stop` sends it to every process
    address, name = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as way:
        try:
            way.connect(address)
            socket.send_fds(way, [name.encode()], [0, 1, 2])
        except OSError as error:
            os.write(2, f"the connection to Ray is gone: {error.strerror}\n".encode())
            sys.exit(LOST)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # whose other end sees when the agent closes them
            os.dup2(nothing, stream)
        ended = way.recv(16)
    if not ended:
        os.write(2, b"the process that is connected to it was lost\n")
    os._exit(int(ended) if ended else LOST)
