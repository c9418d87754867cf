"""The process that is connected to Ray: creates placement groups, and carries agents' streams.

It does nothing else, because it has Ray's threads. It receives the request and replies in lines of
JSON on a socket to the launcher; once that closes, it ends the agents and itself. A process of
``relay.py`` passes it the streams of each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from meshrun.actors import bundles
from meshrun.actors.node_group import NodeGroup, first_line
from meshrun.errors import HostError
from meshrun.host.folder import private_folder
from meshrun.host.processes import set_title
from meshrun.protocol.packing import pack, unpack

_NOTE_S = 5.0
"""How long to wait for resources before a note says so."""
_CONNECT_S = 10.0
_HINT = "run this on a node of the cluster, or with `ray job submit`; RAY_ADDRESS chooses a cluster"
_LONGEST_NAME = 1024


class _LauncherGone(Exception):
    """The launcher has closed the socket."""


def main(_: object) -> None:
    """Serve the launcher over a socket, which is stdin."""
    control = socket.socket(fileno=os.dup(0))
    set_title("ray-driver")
    with control.makefile("rb") as lines:
        order: bundles.PlaceNodes = unpack(lines.readline(), bundles.PlaceNodes)
    with private_folder() as folder:
        try:
            asyncio.run(_serve(control, order, os.path.join(folder, "relays")))
        except HostError as error:
            _reply(control, bundles.PlacementFailed(error.message, error.hint))
        except _LauncherGone:
            pass
    os._exit(0)  # without waiting for Ray's threads


def _reply(control: socket.socket, reply: bundles.Reply) -> None:
    with contextlib.suppress(OSError):
        control.sendall(pack(reply) + b"\n")


async def _serve(control: socket.socket, order: bundles.PlaceNodes, address: str) -> None:
    loop, launcher_gone = asyncio.get_running_loop(), asyncio.Event()

    def on_close() -> None:
        loop.remove_reader(control)
        launcher_gone.set()

    loop.add_reader(control, on_close)
    ray = _connect()
    group = NodeGroup(ray, order.request, call=order.call)
    try:
        hosts = await _place(
            group, launcher_gone, lambda text: _reply(control, bundles.PlacementWaits(text))
        )
        relays = _Relays(group, address, [name for name, _ in hosts])
        _reply(control, bundles.NodesPlaced(hosts, address))
        await launcher_gone.wait()
        await relays.end(order.grace_s)
    finally:
        group.remove()
        ray.shutdown()


def _connect() -> Any:
    """Connect to the cluster, and return Ray's module; raise HostError if either is missing."""
    try:
        import ray
    except ImportError as error:
        raise HostError(
            f"cannot import ray: {error}", hint="install it with pip install 'meshrun[ray]'"
        ) from error
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:  # a dashboard, or Ray Client
        raise HostError(f"--submit ray needs HOST:PORT of a cluster, found `{address}`", hint=_HINT)
    host, colon, port = address.rpartition(":")
    try:
        if colon:  # fail quickly; Ray would try for more than a minute
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # Ray raises many kinds
        raise HostError(
            f"cannot connect to a Ray cluster at {address}: {first_line(error)}",
            hint=_HINT,
        ) from error
    # `ray job stop` sends it to every process, and Ray would exit; the launcher decides when to.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return ray


async def _place(
    group: NodeGroup, launcher_gone: asyncio.Event, note: Callable[[str], None]
) -> list[tuple[str, int]]:
    """Return (name, workers) of each node.

    Raises:
        HostError: If there are too few resources.
        _LauncherGone: If the launcher ends first.
    """
    placed = asyncio.ensure_future(group.place())
    gone = asyncio.ensure_future(launcher_gone.wait())
    text = f"waiting for a placement group: {group.description}"
    later = asyncio.get_running_loop().call_later(_NOTE_S, note, text)
    await asyncio.wait((placed, gone), return_when=asyncio.FIRST_COMPLETED)
    later.cancel()
    if not placed.done():
        placed.cancel()
        raise _LauncherGone
    gone.cancel()
    return placed.result()


class _Relays:
    """Accepts the streams of nodes from the processes of ``relay.py``, and runs the agents."""

    def __init__(self, group: NodeGroup, address: str, names: Sequence[str]) -> None:
        self._group, self._names = group, names
        self._running: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            relay, _ = self._listener.accept()
            relay.setblocking(True)
            name, streams, _, _ = socket.recv_fds(relay, _LONGEST_NAME, 3)
            if len(streams) == 3:
                number = self._names.index(name.decode())
                self._running.add(task := asyncio.create_task(self._run(number, streams, relay)))
                task.add_done_callback(self._running.discard)

    async def _run(self, number: int, streams: Sequence[int], relay: socket.socket) -> None:
        stdin, stdout, stderr = streams
        orders = await _reader(stdin)
        out, err = await _writer(stdout), await _writer(stderr)

        async def show(stream: int, data: bytes) -> None:
            writer = out if stream == 1 else err
            writer.write(data)
            with contextlib.suppress(OSError):  # its reader is gone
                await writer.drain()

        def end(code: int) -> None:
            out.close()
            err.close()
            with contextlib.suppress(OSError), relay:
                relay.sendall(str(code).encode())

        await self._group.run(number, orders, show, end)

    async def end(self, grace_s: float) -> None:
        """Accept no more, and give those that are running ``grace_s`` to end."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)


async def _reader(fd: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb"))
    return reader


async def _writer(fd: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb")
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
