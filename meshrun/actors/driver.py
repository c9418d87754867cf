"""The process that is connected to Ray: makes the placement group, and carries agents' streams.

It has Ray's threads, so nothing else is done in it. What it is asked for, and what came of that,
are lines of JSON on a socket to the launch; once that closes, it ends all that runs, and itself.
The streams of each node are handed to it by a process of ``way.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshrun.actors.bundles import PlacementRequest
from meshrun.actors.node_group import NodeGroup, Refused, first_line
from meshrun.host.leftovers import private_folder
from meshrun.host.title import set_title

_NOTE_S = 5.0
"""After which it is said that resources are waited for."""
_CONNECT_S = 10.0
_HINT = "run this on a node of the cluster, or with `ray job submit`; RAY_ADDRESS chooses a cluster"
_LONGEST_NAME = 1024


class _Over(Exception):
    """Nobody is there any more."""


def main(_: object) -> None:
    """Serve the launch at the other end of the socket that stdin is."""
    control = socket.socket(fileno=os.dup(0))
    set_title("ray-driver")
    with control.makefile("rb") as lines:
        order = json.loads(lines.readline())
    with private_folder() as folder:
        try:
            asyncio.run(_serve(control, order, os.path.join(folder, "ways")))
        except Refused as refused:
            _answer(control, error=refused.message, hint=refused.hint)
        except _Over:
            pass
    os._exit(0)  # whatever threads of Ray's are doing


def _answer(control: socket.socket, **values: object) -> None:
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(values).encode() + b"\n")


async def _serve(control: socket.socket, order: Mapping[str, Any], address: str) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def hear() -> None:
        loop.remove_reader(control)
        over.set()

    loop.add_reader(control, hear)
    ray = _connect()
    group = NodeGroup(ray, PlacementRequest(**order["placement"]), call=order["call"])
    try:
        hosts = await _place(group, over, lambda text: _answer(control, note=text))
        ways = _Ways(group, address, [name for name, _ in hosts])
        _answer(control, hosts=hosts, address=address)
        await over.wait()
        await ways.end(order["grace_s"])
    finally:
        group.remove()
        ray.shutdown()


def _connect() -> Any:
    """Return Ray, connected.

    Raises:
        Refused: If it is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise Refused(
            f"cannot import ray: {error}", "install it with pip install 'meshrun[ray]'"
        ) from error
    address = os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in address:  # a dashboard, or Ray Client
        raise Refused(f"--submit ray needs HOST:PORT of a cluster, found `{address}`", _HINT)
    host, colon, port = address.rpartition(":")
    try:
        if colon:  # Ray would try for more than a minute
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # of many kinds, for each way in which there is none
        raise Refused(
            f"cannot connect to a Ray cluster at {address}: {first_line(error)}",
            _HINT,
        ) from error
    # `ray job stop` sends it to every process, and Ray would leave; the launch says when to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return ray


async def _place(
    group: NodeGroup, over: asyncio.Event, note: Callable[[str], None]
) -> list[tuple[str, int]]:
    """Return (name, workers) of each node.

    Raises:
        Refused: If there are too few resources.
        _Over: If nobody waits for it any more.
    """
    placed, gone = asyncio.ensure_future(group.place()), asyncio.ensure_future(over.wait())
    limit_s: float | None = _NOTE_S
    while not placed.done():
        await asyncio.wait((placed, gone), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            placed.cancel()
            raise _Over
        if limit_s is not None and not placed.done():
            note(f"waiting for a placement group: {group.description}")
            limit_s = None
    gone.cancel()
    return placed.result()


class _Ways:
    """Where processes of ``way.py`` hand in the streams of nodes."""

    def __init__(self, group: NodeGroup, address: str, names: Sequence[str]) -> None:
        self._group, self._names = group, names
        self._carried: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            way, _ = self._listener.accept()
            way.setblocking(True)
            name, streams, _, _ = socket.recv_fds(way, _LONGEST_NAME, 3)
            if len(streams) == 3:
                number = self._names.index(name.decode())
                self._carried.add(task := asyncio.create_task(self._carry(number, streams, way)))
                task.add_done_callback(self._carried.discard)

    async def _carry(self, number: int, streams: Sequence[int], way: socket.socket) -> None:
        stdin, stdout, stderr = streams
        orders = await _reader(stdin)
        out, err = await _writer(stdout), await _writer(stderr)

        async def show(stream: int, data: bytes) -> None:
            writer = out if stream == 1 else err
            writer.write(data)
            with contextlib.suppress(OSError):  # nobody reads it any more
                await writer.drain()

        def end(code: int) -> None:
            out.close()
            err.close()
            with contextlib.suppress(OSError), way:
                way.sendall(str(code).encode())

        await self._group.run(number, orders, show, end)

    async def end(self, grace_s: float) -> None:
        """Take no more, and leave those that run so long to end."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        if self._carried:
            await asyncio.wait(self._carried, timeout=grace_s)


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
