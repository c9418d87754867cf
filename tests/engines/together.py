"""A launcher on each of several hosts, and what each prints."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.engines.hosts import Hosts
from tests.kit import command, wait_until

_LIMIT_S = 90.0


class Launch:
    """One node's launcher; its stdout and stderr are read together as they come."""

    def __init__(
        self, hosts: Hosts, host: int, words: Sequence[str | Path], *, around: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.host = host
        self._hosts = hosts
        self._lines: list[str] = []
        self.process = hosts.popen(
            host, [*around, *command(*words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, **kwargs,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._lines.extend(iter(lines.readline, ""))

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._lines)

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Wait until the output contains a text so many times."""
        wait_until(lambda: self.text.count(text) >= times or self._is_over(), lambda: self.text)
        assert self.text.count(text) >= times, self.text

    def end(self) -> int:
        """Wait for the launcher to exit and return its exit code."""
        try:
            code = self.process.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the launcher on host {self.host} did not exit:\n{self.text}"
            ) from None
        self._reader.join(timeout=_LIMIT_S)
        return code

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the launcher."""
        self.process.send_signal(signum)

    def _is_over(self) -> bool:
        return not self._reader.is_alive()


def launch_on(
    hosts: Hosts, *words: str | Path, each: Callable[[int], Sequence[str]] = lambda _: (),
    **kwargs: Any,
) -> list[Launch]:  # fmt: skip
    """Start a launcher on every host: the arguments ``each(host)`` gives, then ``words``."""
    return [
        Launch(hosts, host, [*each(host), *words], **kwargs) for host in range(len(hosts.names))
    ]


def wait_for_all(launches: Iterable[Launch], *texts: str, times: int = 1) -> None:
    """Wait until the output of each launcher contains each of the texts so many times."""
    for launch in launches:
        for text in texts:
            launch.wait_for(text, times=times)


def end_all(launches: Sequence[Launch]) -> list[int]:
    """Wait for all launchers to exit and return their exit codes."""
    return [launch.end() for launch in launches]


def all_gone(hosts: Hosts) -> None:
    """Wait until no process is left on any host."""
    names = range(len(hosts.names))
    wait_until(
        lambda: not any(hosts.processes(host) for host in names),
        lambda: str([hosts.processes(host) for host in names]),
    )


def rank_lines(text: str) -> list[str]:
    """Return the ranks' lines without prefixes, sorted."""
    lines = (re.sub(r"^\[.*?\] ", "", line) for line in text.splitlines())
    return sorted(line for line in lines if line.startswith("rank "))


def as_shell(code: int) -> int:
    """Return an exit code as a shell would report it."""
    return 128 - code if code < 0 else code
