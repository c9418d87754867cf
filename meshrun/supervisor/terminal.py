"""Decides which rank reads our stdin, and grants the terminal to a rank that is debugged.

The debugged rank has the terminal's streams and Ctrl-C, and other ranks are quiet meanwhile. It is
in a session of its own, so the kernel never stops it for reading a terminal that is not its
controlling one (``job_control`` in Linux's ``n_tty.c``). For the same reason, Ctrl-C reaches only
the launcher, which forwards it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from meshrun.console.console import Console
from meshrun.errors import UsageError
from meshrun.host.process_state import is_foreground
from meshrun.host.processes import signals_blocked
from meshrun.host.reactor import Reactor
from meshrun.layout.labels import rank_name
from meshrun.lifecycle.state import State
from meshrun.plan.plan import LaunchPlan
from meshrun.protocol.events import Event, ZygoteGone
from meshrun.protocol.generation import RankState
from meshrun.protocol.rank_end import RankExited
from meshrun.protocol.zygote_messages import SignalRanks
from meshrun.supervisor.watcher import Watcher

_TURN_S = 0.05
"""How soon the other ranks' output continues after a line was entered."""
_IN_A_ROW_NS = 2_000_000_000
_MOST_INTERRUPTS = 2
"""Number of Ctrl-C in a row that the rank gets; the next one ends the launch."""
_LOCAL_MODES = 3
_READ = {"x86_64": 0, "aarch64": 63}.get(os.uname().machine)
"""Number of the system call ``read``, from the kernel's tables."""


class Terminal(Watcher):
    """The launcher's stdin and terminal."""

    def __init__(self, plan: LaunchPlan, console: Console, reactor: Reactor) -> None:
        """Take the terminal for the rank that is to be debugged, if there is one.

        Raises:
            UsageError: If there is no terminal to grant.
        """
        self.plan = plan
        self.rank: int | None = None
        """The rank that is debugged, if any."""
        self.stdin: int | None = None
        """The zygote's stdin, as for ``subprocess``; ours if ``None``."""
        self._turn_timer = reactor.call_at(None, lambda: None, skips=False)
        """Causes a turn of the loop, in each of which it checks the terminal."""
        self._is_in_background = False
        """Whether the launch was continued in the background."""
        self._console = console
        self._has_terminal = os.isatty(0)
        self._ranks: Mapping[int, RankState] = {}
        if self._has_terminal:
            console.is_read = self._is_read
        self._noted_breakpoint = False
        self._read_by_all = plan.program.kind == "script" and _is_stdin(plan.program.target)
        if self._has_terminal and not is_foreground(0):
            self.stdin = subprocess.DEVNULL  # the kernel would not stop ranks for reading it
        self._whole_group = plan.program.kind == "command"
        self._interrupts: list[int] = []
        self._modes: list[Any] | None = None
        """The terminal's original modes, while a rank has it."""
        self._was_typing = False
        requested = plan.request.debug_rank
        if requested is None or plan.debugged is None:
            return
        self.rank = plan.debugged
        self.stdin = subprocess.DEVNULL
        self._terminal = _open_terminal(requested)
        self._modes = termios.tcgetattr(self._terminal)
        # If the launcher were stopped, the rank and the shell would compete for the terminal.
        self._stop_handler = signal.signal(signal.SIGTSTP, lambda *_: None)
        console.is_shared = True
        console.is_typed_on = self._is_typing

    def has_stdin(self, local_rank: int) -> bool:
        """Return whether a rank of this node reads our stdin: only one, so as not to split it."""
        return self.stdin is None and (local_rank == 0 or self._read_by_all)

    def resume(self) -> None:
        """Check whether ``fg`` or ``bg`` has continued the launch."""
        if self._has_terminal and self.stdin is None:
            self._is_in_background = not is_foreground(0)
            self._request_turn()

    def steals_input(self) -> bool:
        """Return whether a rank reads the terminal in the background, in place of the shell.

        The kernel stops a job for that, but not a rank, as it is not the rank's terminal.
        """
        if not self._is_in_background:
            return False
        self._request_turn()
        return self._is_read()

    def _is_read(self) -> bool:
        """Return whether the rank that has stdin waits for input from the terminal."""
        if not self._ranks:
            return False
        reader = self._ranks[min(self._ranks)]
        return bool(reader.pid and not reader.exited and _reads_terminal(reader.pid))

    def _request_turn(self) -> None:
        self._turn_timer.restart(_TURN_S)

    def why_empty(self, rank: int) -> str:
        """Return why a rank has no stdin, and how to give it one; "" if it has one."""
        layout = self.plan.layout
        if self.rank is not None or self.has_stdin(layout.local_rank(rank)):
            return ""
        if self.stdin is not None:
            return "a launch in the background has no stdin"
        if layout.nnodes > 1:
            return "only the first rank of each node has stdin"
        return f"only rank 0 has stdin; --debug-rank {rank} gives rank {rank} the terminal"

    def note_skipped_breakpoint(self, rank: int) -> None:
        """Print once that a rank did not stop at a breakpoint because it has no stdin."""
        if self.rank is None and not self._noted_breakpoint:
            self._noted_breakpoint = True
            who, why = rank_name(self.plan.layout, rank), self.why_empty(rank)
            self._console.note(f"{who} skipped a breakpoint: {why}")

    def streams(self, rank: int) -> list[int]:
        """Return the debugged rank's stdout and stderr, for the caller to pass on and close."""
        if rank != self.rank:
            return []
        return [os.dup(self._terminal), os.dup(self._terminal)]

    def intercept(self, signum: int, state: State, send: Callable[[SignalRanks], None]) -> bool:
        """Send the debugged rank Ctrl-C; return whether the signal is handled by that."""
        if signum != signal.SIGINT or self.rank is None or state.stopping:
            return False
        rank_state = state.ranks[self.rank]
        if not rank_state.ready or rank_state.exited or rank_state.raised or rank_state.finished:
            return False
        now_ns = time.monotonic_ns()
        self._interrupts = [at for at in self._interrupts if at > now_ns - _IN_A_ROW_NS]
        self._interrupts.append(now_ns)
        is_last = len(self._interrupts) > _MOST_INTERRUPTS
        # SIGTERM is the only one that has an effect at the rank's prompt.
        signum = signal.SIGTERM if is_last else signal.SIGINT
        send(SignalRanks(ranks=(self.rank,), signum=signum, whole_group=self._whole_group))
        if len(self._interrupts) == _MOST_INTERRUPTS:
            self._console.note("press Ctrl-C once more to stop the launch")
        return not is_last

    # ---- the terminal ----------------------------------------------------------------------

    def update_typing(self) -> bool:
        """Check whether a line is being typed; return whether that has changed.

        Meanwhile the other ranks are quiet. readline and similar libraries put the terminal into a
        mode of their own for exactly that time.
        """
        if self.rank is None:
            return False
        was_typing, self._was_typing = self._was_typing, self._is_typing()
        if self._was_typing:
            self._request_turn()
        return was_typing != self._was_typing

    def _is_typing(self) -> bool:
        if self._modes is None:
            return False
        try:
            return not termios.tcgetattr(self._terminal)[_LOCAL_MODES] & termios.ICANON
        except termios.error:  # the terminal hung up
            return False

    def on_event(self, event: Event, state: State) -> None:
        """Follow the ranks; take the terminal back once the debugged rank has exited."""
        self._ranks = state.ranks
        if isinstance(event, ZygoteGone) or (
            isinstance(event, RankExited) and event.rank == self.rank
        ):
            self._take_back()

    def close(self) -> None:
        """Restore the terminal."""
        if self.rank is None:
            return
        self._take_back()
        os.close(self._terminal)
        signal.signal(signal.SIGTSTP, self._stop_handler)

    def _take_back(self) -> None:
        if self._modes is None:
            return
        if self._is_typing():  # the rank ended in the middle of a line
            os.write(self._terminal, b"\r\n")
        modes, self._modes = self._modes, None
        with signals_blocked({signal.SIGTTOU}), suppress(termios.error):
            termios.tcsetattr(self._terminal, termios.TCSADRAIN, modes)
        self.update_typing()


def _open_terminal(requested: str) -> int:
    """Return a descriptor of the terminal that is our stdin, for reading and writing."""
    if not os.isatty(0):
        raise UsageError(
            f"--debug-rank {requested} needs a terminal, but stdin is not one",
            hint="run meshrun without redirecting or piping stdin; over ssh, use `ssh -t`",
        )
    if not is_foreground(0):
        raise UsageError(
            f"--debug-rank {requested} needs the terminal, but another job has it",
            hint="run meshrun without `&`",
        )
    try:
        return os.open(os.ttyname(0), os.O_RDWR | os.O_NOCTTY)
    except OSError:  # in a container, its path may not exist
        return os.dup(0)


def _is_stdin(path: str) -> bool:
    """Return whether a program is read from stdin, as ``/dev/stdin``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(0))
    except OSError:
        return False


def _reads_terminal(pid: int) -> bool:
    """Return whether a process waits in ``read()`` for the terminal that is our stdin."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            number, fd = (int(word, 0) for word in file.read().split()[:2])
        return number == _READ and os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), os.fstat(0))
    except (OSError, ValueError):  # the process is running, or not accessible
        return False
