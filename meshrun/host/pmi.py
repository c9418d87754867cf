"""Exchange of values between the processes of a job, through their process manager (PMI)."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping

_LONGEST = 1000
"""Maximum length of a value; PMI's own limit is 1024."""
_WAIT_S = 60.0
"""How long to wait for the other processes."""


def exchange(env: Mapping[str, str], value: str) -> tuple[str, list[str]] | None:
    """Return the name of the job's key space and each process's value, by rank; a collective.

    Return ``None`` if there is no process manager, or it does not answer.

    ``init`` and ``finalize`` are left to the program, as MPI can be initialized only once. Intel's
    Hydra, unlike others, treats a process that exits without ``finalize`` after a request as
    failed.

    Source:
        PMI-1's wire protocol, as served by Hydra and Flux (Flux RFC 13).
    """
    try:
        fd, rank, size = (int(env[f"PMI_{name}"]) for name in ("FD", "RANK", "SIZE"))
    except (KeyError, ValueError):
        return None
    if len(value) > _LONGEST or set(value) & set(" \n="):
        return None
    manager = _Manager(fd, time.monotonic() + _WAIT_S, is_strict="I_MPI_HYDRA_UUID" in env)
    try:
        return manager.exchange(rank, size, value)
    except (OSError, ValueError, KeyError, EOFError):
        return None


class _Manager:
    """The process manager at the other end of a descriptor."""

    def __init__(self, fd: int, deadline: float, *, is_strict: bool) -> None:
        self._fd, self._deadline, self._is_strict = fd, deadline, is_strict

    def exchange(self, rank: int, size: int, value: str) -> tuple[str, list[str]]:
        space = self._ask("cmd=get_my_kvsname")["kvsname"]
        # Several launches of one script use different keys.
        turn = 0
        while self._get(space, turn, rank) is not None:
            turn += 1
        self._ask(f"cmd=put kvsname={space} key=meshrun-{turn}-{rank} value={value}")
        self._ask("cmd=barrier_in")
        values = [self._get(space, turn, each) or "" for each in range(size)]
        if self._is_strict:
            self._ask("cmd=finalize")
        return f"{space}.{turn}", values

    def _get(self, space: str, turn: int, rank: int) -> str | None:
        got = self._ask(f"cmd=get kvsname={space} key=meshrun-{turn}-{rank}")
        return got["value"] if got.get("rc", "0") == "0" else None

    def _ask(self, line: str) -> dict[str, str]:
        os.write(self._fd, f"{line}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                raise TimeoutError
            data = os.read(self._fd, 4096)
            if not data:
                raise EOFError
            answer += data
        pairs = (word.partition("=") for word in answer.decode(errors="replace").split())
        return {name: text for name, _, text in pairs}
