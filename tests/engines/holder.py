"""Keep the namespaces of one host until stdin ends, then end every process that is in them.

It runs inside the host, so that nothing is left of a test run that was killed.
"""

import os
import signal
import sys


def network_of(pid: int | str) -> str | None:
    """Return what identifies the network namespace of a process, ``None`` for one that ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def processes_in(network: str | None) -> list[int]:
    """Return the processes of a network namespace, the oldest first; zombies are in none."""
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if network_of(pid) == network]


def kill_all_in(network: str | None, *, but: int) -> None:
    """Kill until nobody is left; the oldest first, so that no parent sees its child go."""
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
