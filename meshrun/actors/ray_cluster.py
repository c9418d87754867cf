"""A Ray cluster as hosts of a launch, with a command that reaches them."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable

from msgspec.structs import replace

from meshrun.actors import bundles
from meshrun.errors import HostError
from meshrun.host.folder import remove_if_stale
from meshrun.host.printable import one_line
from meshrun.host.stderr import note
from meshrun.plan.hostfile import Host
from meshrun.plan.request import HostAccess, RemoteHosts
from meshrun.protocol.packing import pack, unpack
from meshrun.start import own_command

_EXIT_TAKES_S = 10.0
_MOST_LINES = 8


class RayCluster:
    """A cluster, and the child process that is connected to it.

    Args:
        call: The folder with the call that ranks make, to which their results are written.
        grace_s: How long a launch may take to end.
    """

    def __init__(self, *, call: str | None, grace_s: float) -> None:
        self._call, self._grace_s = call, grace_s
        self._owner = os.getpid()
        self._folder = ""
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                own_command("ray-driver"),
                stdin=theirs.fileno(),
                stdout=self._log,  # Ray prints many lines about what this process reports in one
                stderr=self._log,
                start_new_session=True,
            )
        atexit.register(self.close)

    def place(
        self, request: bundles.PlacementRequest, access: HostAccess, note: Callable[[str], None]
    ) -> RemoteHosts:
        """Return the hosts that the cluster provides.

        Raises:
            HostError: If the cluster cannot provide them, or there is none.
        """
        order = bundles.PlaceNodes(request, self._call, self._grace_s)
        self._control.sendall(pack(order) + b"\n")
        with self._control.makefile("rb") as lines:
            for line in lines:
                match unpack(line, bundles.Reply):
                    case bundles.PlacementWaits(note=text):
                        note(text)
                    case bundles.PlacementFailed(error=error, hint=hint):
                        raise HostError(error, hint=hint)
                    case bundles.NodesPlaced(hosts=hosts, address=address):
                        self._folder = os.path.dirname(address)
                        return RemoteHosts(
                            hosts=tuple(Host(name, workers) for name, workers in hosts),
                            access=replace(access, starter="Ray"),
                            start_command=tuple(own_command("ray-relay", address)),
                        )
        raise self._broken(self._process.wait())

    def close(self) -> None:
        """End the agents, and release the cluster's resources."""
        if os.getpid() != self._owner:  # in a fork
            return
        atexit.unregister(self.close)
        self._control.close()
        try:
            self._process.wait(self._grace_s + _EXIT_TAKES_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if code := self._process.wait():
            note(self._broken(code).message)
        self._log.close()
        remove_if_stale(self._folder)

    def _broken(self, code: int) -> HostError:
        self._log.seek(0)
        last = one_line(" / ".join(self._log.read().splitlines()[-_MOST_LINES:]))
        return HostError(f"the process that is connected to Ray exited with code {code}: {last}")
