"""A variable whose value in ``/proc/PID/environ`` can be changed."""

from __future__ import annotations

import ctypes
import os


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
