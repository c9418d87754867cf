"""The store process: serves the ranks' store, a torch TCPStore, and guards the launch.

If launcher or zygote is killed, the other adopts all orphans and kills them. If both are, the
kernel kills the ranks, but init adopts what they started. The store process, which has little else
to do, then kills every process that was started with the launch's mark in its environment.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from meshrun.errors import HostError, UsageError
from meshrun.host import processes
from meshrun.host.descriptors import allow_many_descriptors
from meshrun.host.folder import remove_if_stale
from meshrun.host.network import address_of, names_from_files_only
from meshrun.host.own_variables import LAUNCH_MARK
from meshrun.host.process_state import is_stopped, parent_of, started_at
from meshrun.host.reactor import finish
from meshrun.host.shortage import TOO_FEW_PROCESSES
from meshrun.host.stderr import note
from meshrun.worker.imports import check_torch_version
from meshrun.zygote.control import is_hung_up, killing_marked, killing_orphans, launcher_pid

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOPBACK_FOR = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here
_CHECK_LAUNCHER_EVERY_S = 1.0
_LOOK_EVERY_S = 0.02


def serve_store(listen_fd: int) -> Store:
    """Serve the ranks' store on a listening socket, whose descriptor the store will own.

    torch then connects to its own store, and gives up after 5 minutes if it cannot.
    """
    import torch.distributed as dist

    check_torch_version()
    with socket.socket(fileno=os.dup(listen_fd)) as listener:
        name = listener.getsockname()
    address = address_of(name)
    return dist.TCPStore(
        _LOOPBACK_FOR.get(address, address),
        name[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def run_store(listeners: list[int], guard: Guard) -> NoReturn:
    """Guard the launch until the zygote ends; serve the store if there is a listener for it."""
    processes.set_title("store")
    allow_many_descriptors()  # connections from outsiders must not keep ranks out
    # torch's server would look up the name of the first rank, and serve no other in the meantime.
    with names_from_files_only():
        try:
            _kept = [serve_store(listen_fd) for listen_fd in listeners]
        except RuntimeError as error:  # torch could not start its thread, or connect to itself
            _fail(f"{error}; {TOO_FEW_PROCESSES}")
        except (ImportError, UsageError) as error:  # unlike forks, new interpreters import it here
            _fail(f"{error} ({sys.executable})")
        guard.run()


def _fail(why: str) -> NoReturn:
    note(f"cannot serve the ranks' store: {why}")
    os._exit(HostError.exit_code)


class Guard:
    """Created in the zygote, which knows the launcher; runs in the store process."""

    def __init__(self, scratch_dir: str, control: socket.socket) -> None:
        self._scratch_dir = scratch_dir
        self._mark = os.environ.get(LAUNCH_MARK, "")
        self._launcher = launcher_pid(control)
        self._launcher_born = started_at(self._launcher)
        if is_hung_up(control):  # it is dead, and another process may have the id by now
            self._launcher_born = None
        self._launchers_parent = parent_of(self._launcher)
        self._zygote = 0

    def begin(self, zygote: int) -> None:
        """Have the kernel wake this process when the zygote ends, or kill it if it cannot guard."""
        processes.become_guard()
        if self._launcher_born is None or not self._mark:
            processes.die_with_parent(zygote)
            return
        self._zygote = zygote
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})  # for sigtimedwait()
        processes.die_with_parent(zygote, signal.SIGCONT)

    def run(self) -> NoReturn:
        """Wait until launcher and zygote are dead, then kill what is left.

        In an ordinary launch, the zygote kills this process first.
        """
        if not self._zygote:
            while True:
                signal.pause()
        while os.getppid() == self._zygote:
            if not self._launcher_lives():  # wake it even if its parent is a shim, stopped too
                processes.send_signal(self._zygote, signal.SIGCONT)
            self._wake_orphaned_launcher()
            signal.sigtimedwait({signal.SIGCONT}, _CHECK_LAUNCHER_EVERY_S)
        self._wait_for_launcher()
        finish(killing_marked(self._mark))
        self.remove_scratch()
        os._exit(0)

    def kill_orphans(self) -> None:
        """Kill what ranks left behind, if the zygote has not adopted it."""
        finish(killing_orphans(self._mark))

    def remove_scratch(self) -> None:
        """Remove the launcher's temporary folder once the launcher is dead."""
        if self._scratch_dir:
            self._wait_for_launcher()
            remove_if_stale(self._scratch_dir)

    def _wake_orphaned_launcher(self) -> None:
        """Continue a launcher whose parent has ended while it was stopped, as it is to end too."""
        parent = parent_of(self._launcher)
        if parent != self._launchers_parent and is_stopped(self._launcher):
            processes.send_signal(self._launcher, signal.SIGCONT)
        self._launchers_parent = parent

    def _wait_for_launcher(self) -> None:
        # It is no child of ours, and not every system has a descriptor for its end.
        while self._launcher_lives():
            time.sleep(_LOOK_EVERY_S)

    def _launcher_lives(self) -> bool:
        return self._launcher_born is not None and (
            started_at(self._launcher) == self._launcher_born
        )
