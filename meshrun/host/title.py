"""What others see of meshrun's processes: titles in ``ps``, names in ``top -H``, a variable."""

from __future__ import annotations

import ctypes
import os

from meshrun.host.processes import read_stat

_ARG_START = 48 - 3
"""Index of fields 48 and 49 of ``/proc/PID/stat`` in a list that begins with field 3 (proc(5))."""


def set_title(*words: str) -> None:
    """Set the title to ``meshrun`` and these words; do nothing if the system cannot.

    The title overwrites the process's arguments, of which Python has a copy, and is cut to their
    length. The last byte is not zero, which makes the kernel end the command line with the title;
    otherwise, each byte left would show as an empty argument (``get_mm_cmdline`` in
    ``fs/proc/base.c``).
    """
    try:
        start, end = map(int, read_stat(os.getpid())[_ARG_START : _ARG_START + 2])
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        memory = os.open("/proc/self/mem", os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError):  # not Linux, or a sandbox
        return
    try:
        room = end - start
        if 0 < len(shown) <= room and room > 2 and os.pread(memory, len(shown), start) == shown:
            title = " ".join(("meshrun", *words)).encode(errors="surrogateescape")
            os.pwrite(memory, title[: room - 2].ljust(room - 1, b"\0") + b".", start)
    except OSError:
        pass
    finally:
        os.close(memory)


def name_thread(name: str) -> None:
    """Name the calling thread, with up to 15 letters; do nothing if the system cannot."""
    try:
        with open("/proc/thread-self/comm", "w", encoding="utf-8") as file:
            file.write(name)
    except OSError:  # not Linux, or a sandbox
        pass


class EnvironVariable:
    """A variable in the memory that ``/proc/PID/environ`` shows; forks may change their copies.

    Create it before Python changes the variable.

    Source:
        proc(5): ``environ`` shows the memory to which the kernel wrote the initial environment.
    """

    def __init__(self, name: str) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.getenv.restype = ctypes.c_void_p
        self._name = name
        self._length = len(os.fsencode(os.environ.get(name, "")))
        self._address = self._libc.getenv(os.fsencode(name))

    def set(self, value: str) -> None:
        """Set a value, as long as the initial one, in ``os.environ`` and ``/proc/PID/environ``.

        Raises:
            ValueError: If the lengths differ.
        """
        text = os.fsencode(value)
        if len(text) != self._length:
            raise ValueError(f"{self._name} has {self._length} bytes, and {value!r} {len(text)}")
        if self._address:
            ctypes.memmove(self._address, text, len(text))
        os.environ[self._name] = value
