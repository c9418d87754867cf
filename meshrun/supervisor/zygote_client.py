"""The launcher's end of the zygote: starts it, sends it orders, receives its events."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshrun.errors import HostError, InternalError
from meshrun.host.processes import Ended, signals_blocked
from meshrun.host.shortage import HINTS, TOO_FEW_PROCESSES
from meshrun.host.sockets import packet_pair
from meshrun.plan.rank_env import zygote_environment
from meshrun.plan.rank_program import Program
from meshrun.protocol import codec
from meshrun.protocol.from_zygote import FromNegotiation, FromRank, FromZygote, RankEvent
from meshrun.protocol.to_zygote import Prepare, StartStore, ToZygote
from meshrun.start import own_command
from meshrun.zygote.control import LEFT_TO_LAUNCHER
from meshrun.zygote.guard import LAUNCH_MARK

if TYPE_CHECKING:
    from meshrun.warm.client import WarmRun, WarmZygote

_EXIT_TAKES_S = 10.0
"""How long the zygote may take to exit once its socket is closed."""


class ZygoteClient:
    """The running zygote.

    ``control`` carries its events and our orders, ``reports`` the ranks' own reports.

    Args:
        program: What ranks run.
        prepare: The first order.
        stacks: A descriptor for its stacks.
        stdin: Its standard input, as for ``subprocess``; this process's if ``None``.
        warm: Has a warm server fork the zygote, if there is one.
    """

    def __init__(
        self,
        program: Program,
        prepare: Prepare,
        *,
        stacks: int,
        stdin: int | None = None,
        warm: WarmRun | None = None,
    ) -> None:
        self._gate = -1
        mark = secrets.token_hex(8)
        process: WarmZygote | _NewZygote | None = None
        if warm is not None and prepare.start_method == "fork":
            with self._new_sockets() as ends:
                process = warm.start_zygote((*ends, stacks), mark=mark, stdin=stdin)
            if process is None:  # a slow server may still hold the ends of these sockets
                self.close()
        if process is None:
            with self._new_sockets() as ends:
                process = _NewZygote(program, (*ends, stacks), mark=mark, stdin=stdin)
        self.process = process
        """Its process; the kernel ends its ranks with it."""
        self.send(prepare)
        self.reports.setblocking(False)

    @contextmanager
    def _new_sockets(self) -> Iterator[tuple[int, int]]:
        """Make new sockets, and yield the zygote's ends."""
        self.control, theirs = packet_pair()
        # The ranks' end stays open here. Otherwise, once no rank can report, it would wake the loop
        # in every turn until the zygote has ended.
        self.reports, self._ranks_end = packet_pair()
        with theirs:
            yield theirs.fileno(), self._ranks_end.fileno()

    def send(self, order: ToZygote, fds: Sequence[int] = ()) -> None:
        """Send an order; if the zygote is gone, :meth:`receive` reports that."""
        if self.control.fileno() < 0:
            return
        try:
            socket.send_fds(self.control, [codec.encode(order)], list(fds))
        except (BrokenPipeError, ConnectionError):
            pass

    def receive(self) -> FromZygote | RankEvent | None:
        """Return the zygote's next event, or ``None`` once it has exited."""
        try:
            packet = self.control.recv(codec.PACKET_BYTES)
        except ConnectionError:
            return None
        if not packet:
            return None
        message = codec.decode(packet)
        if not isinstance(message, FromZygote | RankEvent):
            raise InternalError(f"the zygote sent an unexpected message: {message}")
        return message

    def receive_report(self) -> FromRank | FromNegotiation | None:
        """Return the next message of a rank, or ``None`` if there is none.

        Raises:
            WireError: If it is malformed, as when a program writes to descriptors of meshrun's.
        """
        try:
            packet = self.reports.recv(codec.PACKET_BYTES)
        except (BlockingIOError, ConnectionError):
            return None
        if not packet:
            return None
        message = codec.decode(packet)
        if not isinstance(message, FromRank | FromNegotiation):
            raise codec.WireError(f"a rank sent a message that is not a rank's: {message}")
        return message

    def start_store(self, listener: socket.socket | None) -> None:
        """Begin a generation: start a store on ``listener``, and close the gate."""
        self.open_gate()
        gate_read, self._gate = os.pipe()
        port = 0 if listener is None else listener.getsockname()[1]
        fds = [gate_read] if listener is None else [gate_read, listener.fileno()]
        self.send(StartStore(port=port), fds)
        os.close(gate_read)

    def open_gate(self) -> None:
        """Let ranks that have finished leave."""
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1

    def close(self) -> None:
        """Close our ends of its sockets."""
        self.open_gate()
        for end in (self.control, self.reports, self._ranks_end):
            end.close()


class _NewZygote:
    """A zygote in a new interpreter, a child of this process."""

    def __init__(
        self, program: Program, fds: Sequence[int], *, mark: str, stdin: int | None
    ) -> None:
        words = (*map(str, fds), program.kind, program.target, *program.args)
        try:
            # Until it can leave them to us, it is to survive signals to all processes of the job.
            with signals_blocked(LEFT_TO_LAUNCHER):
                self._process = subprocess.Popen(
                    own_command("zygote", *words, unbuffered=True),
                    stdin=stdin,
                    pass_fds=fds,
                    start_new_session=True,
                    env={**zygote_environment(os.environ), LAUNCH_MARK: mark},
                )
        except OSError as error:
            hint = TOO_FEW_PROCESSES
            if error.errno in (errno.EMFILE, errno.ENFILE):
                hint = HINTS[error.errno]
            raise HostError(
                f"cannot start `{sys.executable}`: {error.strerror}", hint=hint
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> tuple[int, Ended]:
        """Wait for its end; return its wait status, and what its keeper could not end."""
        try:
            code = self._process.wait(timeout=_EXIT_TAKES_S)
        except subprocess.TimeoutExpired:  # such as where a module in it executed another program
            self._process.kill()
            code = self._process.wait()
        return (-code if code < 0 else code << 8), Ended(0)  # this process adopts its orphans
