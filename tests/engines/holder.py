"""Hold the namespaces of one host until stdin closes, then kill every process in them.

It runs inside the host, so a killed test run leaves no processes behind.
"""

import os
import signal
import sys


def network_of(pid: int | str) -> str | None:
    """Return the identifier of a process's network namespace, ``None`` if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def processes_in(network: str | None) -> list[int]:
    """Return the processes in a network namespace, oldest first; zombies belong to none."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if network_of(pid) == network]


def kill_all_in(network: str | None, *, but: int) -> None:
    """Kill until no process is left; oldest first, so that no parent sees its child die."""
    while pids := [pid for pid in processes_in(network) if pid != but]:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.read()
    kill_all_in(network_of("self"), but=os.getpid())
