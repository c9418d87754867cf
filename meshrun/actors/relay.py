"""The process that represents a node here: passes its own streams to the driver.

It exits with the exit code of the agent on the node.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

LOST = 255
"""The exit code if the node is lost, as of ssh."""


def main(_: object) -> None:
    """Serve one node: ``ADDRESS NAME``."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `ray job stop` sends it to every process
    address, name = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as driver:
        try:
            driver.connect(address)
            socket.send_fds(driver, [name.encode()], [0, 1, 2])
        except OSError as error:
            os.write(2, f"the connection to Ray is gone: {error.strerror}\n".encode())
            sys.exit(LOST)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # so that only the driver keeps them open
            os.dup2(null, stream)
        code = driver.recv(16)
    if not code:
        os.write(2, b"the process that is connected to it was lost\n")
    os._exit(int(code) if code else LOST)
