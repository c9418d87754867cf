"""The launcher's end of the zygote: starts it, sends it orders, receives its events."""

from __future__ import annotations

import errno
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from meshrun.errors import HostError, InternalError
from meshrun.host.network import packet_pair
from meshrun.host.own_variables import LAUNCH_MARK
from meshrun.host.process_state import marked_processes
from meshrun.host.processes import EndedChildren, send_signal, signals_blocked
from meshrun.host.reactor import Steps
from meshrun.host.shortage import TOO_FEW_PROCESSES, hint_for
from meshrun.plan.rank_env import zygote_environment
from meshrun.plan.rank_program import Program
from meshrun.protocol import codec, zygote_messages
from meshrun.start import own_command
from meshrun.zygote.control import LEFT_TO_LAUNCHER, killing_orphans

if TYPE_CHECKING:
    from meshrun.warm.client import WarmRun, WarmZygote

EXIT_TAKES_S = 10.0
"""How long the zygote may take to exit once its socket is closed, and then after SIGKILL."""
_BETWEEN_LOOKS_S = 0.001
"""The zygote exits within milliseconds, and steps wait for times only, not for processes."""


class ZygoteClient:
    """The running zygote.

    ``control`` carries its events and our orders, ``reports`` the ranks' own reports.

    Args:
        stacks: A descriptor for its stacks.
        stdin: Its standard input, as for ``subprocess``; this process's if ``None``.
        warm: Has a warm server fork the zygote, if there is one.
    """

    def __init__(
        self,
        program: Program,
        prepare: zygote_messages.Prepare,
        *,
        stacks: int,
        stdin: int | None = None,
        warm: WarmRun | None = None,
    ) -> None:
        self._barrier = -1
        self._mark = mark = os.urandom(8).hex()
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

    def send(self, order: zygote_messages.ToZygote, fds: Sequence[int] = ()) -> None:
        """Send an order; if the zygote is gone, :meth:`receive` reports that."""
        if self.control.fileno() < 0:
            return
        try:
            socket.send_fds(self.control, [codec.encode(order)], list(fds))
        except ConnectionError:
            pass

    def receive(self) -> zygote_messages.FromZygote | zygote_messages.RankEvent | None:
        """Return the zygote's next event, or ``None`` once it has exited."""
        message = _receive(self.control)
        if not isinstance(message, zygote_messages.FromZygote | zygote_messages.RankEvent | None):
            raise InternalError(f"the zygote sent an unexpected message: {message}")
        return message

    def receive_report(self) -> zygote_messages.FromRank | zygote_messages.FromNegotiation | None:
        """Return the next message of a rank, or ``None`` if there is none.

        Raises:
            WireError: If it is malformed, as when a program writes to descriptors of meshrun's.
        """
        message = _receive(self.reports)
        if not isinstance(
            message, zygote_messages.FromRank | zygote_messages.FromNegotiation | None
        ):
            raise codec.WireError(f"a rank sent a message that is not a rank's: {message}")
        return message

    def start_store(self, listener: socket.socket | None) -> None:
        """Begin a generation: start a store on ``listener``, and close the exit barrier."""
        self.release_ranks()
        barrier_read, self._barrier = os.pipe()
        fds = [barrier_read] if listener is None else [barrier_read, listener.fileno()]
        self.send(zygote_messages.StartStore(), fds)
        os.close(barrier_read)

    def release_ranks(self) -> None:
        """Let ranks that have finished leave."""
        if self._barrier >= 0:
            os.close(self._barrier)
            self._barrier = -1

    def notice_end(self) -> None:
        """Have :meth:`receive` report the zygote's end on macOS, whose packet sockets do not."""
        if sys.platform == "darwin" and self.process.has_ended:
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RD)

    def abandon(self) -> None:
        """Have :meth:`receive` report the end of a zygote that SIGKILL does not end.

        Its ranks would die only with it, and it can no longer be asked to end them.
        """
        if self.control.fileno() >= 0:
            for pid in marked_processes(f"{LAUNCH_MARK}={self._mark}"):
                send_signal(pid, signal.SIGKILL)
            with suppress(OSError):
                self.control.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close our ends of its sockets."""
        self.release_ranks()
        for end in (self.control, self.reports, self._ranks_end):
            end.close()


def _receive(end: socket.socket) -> codec.Message | None:
    """Return the next message; ``None`` if there is none, or at the end of the connection."""
    try:
        packet = end.recv(codec.PACKET_BYTES)
    except (BlockingIOError, ConnectionError):
        return None
    return codec.decode(packet) if packet else None


class _NewZygote:
    """A zygote in a new interpreter, a child of this process."""

    def __init__(
        self, program: Program, fds: Sequence[int], *, mark: str, stdin: int | None
    ) -> None:
        self._dead_by_s, self._mark = math.inf, mark
        words = (*map(str, fds), *program.words)
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
            is_full = error.errno in (errno.EMFILE, errno.ENFILE)
            hint = hint_for(error.errno) if is_full else TOO_FEW_PROCESSES
            raise HostError(
                f"cannot start `{sys.executable}`: {error.strerror}", hint=hint
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._dead_by_s = min(self._dead_by_s, time.monotonic() + EXIT_TAKES_S)

    def ending(self) -> Steps[tuple[int, EndedChildren]]:
        """Wait for its end; return its wait status, and what could not be ended."""
        kill_at_s = time.monotonic() + EXIT_TAKES_S
        while (code := self._process.poll()) is None:
            if (now_s := time.monotonic()) > self._dead_by_s:
                return signal.SIGKILL, EndedChildren(1, survivors=(self.pid,))
            if now_s > kill_at_s:  # such as where a module in it executed another program
                self.kill()
            yield _BETWEEN_LOOKS_S
        yield from killing_orphans(self._mark)
        return (-code if code < 0 else code << 8), EndedChildren(0)
