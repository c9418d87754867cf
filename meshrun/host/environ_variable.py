"""A variable as ``/proc/PID/environ`` shows it: as the process began, whatever came later."""

from __future__ import annotations

import ctypes
import os


class EnvironVariable:
    """Made before Python changes the variable; forks may each give it another value.

    Source:
        proc(5): ``environ`` is the memory in which the kernel laid the variables down.
    """

    def __init__(self, name: str) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.getenv.restype = ctypes.c_void_p
        self._name = name
        self._length = len(os.fsencode(os.environ.get(name, "")))
        self._address = self._libc.getenv(os.fsencode(name))

    def set(self, value: str) -> None:
        """Give it a value of the same length as the one that it had, here and as it is seen.

        Raises:
            ValueError: If the lengths differ.
        """
        text = os.fsencode(value)
        if len(text) != self._length:
            raise ValueError(f"{self._name} has {self._length} bytes, and {value!r} {len(text)}")
        if self._address:
            ctypes.memmove(self._address, text, len(text))
        os.environ[self._name] = value
