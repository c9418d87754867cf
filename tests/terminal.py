"""A terminal for tests: meshrun in a pty, and the screen that a user would see."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyte

from tests.kit import command, wait_until


class Terminal:
    """A screen, and a process whose controlling terminal it is."""

    def __init__(self, words: Sequence[str], env: dict[str, str], columns: int, rows: int) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._lock = threading.Lock()
        self._lines: tuple[int, list[str]] = (-1, [])
        self._master, self.slave = pty.openpty()
        self._set_size(columns, rows)
        self.modes: list[Any] = termios.tcgetattr(self.slave)
        # Without this, Ctrl-C and Ctrl-Z make the kernel drop output that was not read yet.
        self.modes[3] |= termios.NOFLSH
        termios.tcsetattr(self.slave, termios.TCSANOW, self.modes)
        self.process = subprocess.Popen(
            words,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**os.environ, "TERM": "xterm-256color", **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                return
            if not data:
                return
            with self._lock:
                self.raw += data
                self._stream.feed(data)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the window."""
        with self._lock:
            self.screen.resize(rows, columns)
            self._lines = (-1, [])
        self._set_size(columns, rows)

    def type(self, text: str) -> None:
        """Type these keys."""
        os.write(self._master, text.encode())

    @property
    def foreground(self) -> int:
        """The foreground process group: a shell's own while it shows its prompt."""
        return os.tcgetpgrp(self._master)

    @property
    def shown(self) -> list[str]:
        """The visible lines, without trailing blanks or blank lines at the end."""
        with self._lock:
            lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def all_lines(self) -> list[str]:
        """All lines: those scrolled out of view, then the visible ones."""
        with self._lock:
            drawn = len(self.raw)
            if self._lines[0] == drawn:  # waits poll, and reading the screen is slow
                return self._lines[1]
            gone = [
                "".join(row[column].data for column in range(self.screen.columns)).rstrip()
                for row in self.screen.history.top
            ]
        lines = gone + self.shown
        self._lines = (drawn, lines)
        return lines

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until ``text`` has been shown at least ``count`` times."""
        wait_until(
            lambda: "\n".join(self.all_lines).count(text) >= count,
            lambda: f"{count} x {text!r} in:\n" + "\n".join(self.all_lines),
        )

    def wait_for_title(self, title: str) -> None:
        """Wait until the window has this title."""
        wait_until(
            lambda: self.screen.title == title,
            lambda: f"{self.screen.title!r}, not {title!r}, above:\n" + "\n".join(self.all_lines),
        )

    def wait(self) -> int:
        """Wait for the process to end; return its exit code as a shell shows it."""
        code = self.process.wait(timeout=60)
        self._close()
        return 128 - code if code < 0 else code

    def _close(self) -> None:
        if self.slave >= 0:
            self.modes_left = termios.tcgetattr(self.slave)
            os.close(self.slave)
            self.slave = -1
            self._reader.join()
            os.close(self._master)

    def end(self) -> None:
        """Kill the process if it still runs, and close the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._close()


@contextmanager
def open_terminal(
    *args: str | Path, env: dict[str, str] | None = None, columns: int = 100, rows: int = 30
) -> Iterator[Terminal]:
    """Run meshrun in a terminal; kill it at the end if it still runs."""
    terminal = Terminal(command(*args), env or {}, columns, rows)
    try:
        yield terminal
    finally:
        terminal.end()
