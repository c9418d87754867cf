"""The title of meshrun's own processes in ``ps``, and of its threads in ``top -H``."""

from __future__ import annotations

import os

from meshrun.host.processes import read_stat

_ARG_START = 48 - 3
"""Place of fields 48 and 49 of ``/proc/PID/stat``, which begin with the third (proc(5))."""


def set_title(*words: str) -> None:
    """Show ``meshrun`` and these words; where that cannot be, nothing changes.

    They are written over the process's own arguments, of which Python has a copy, and are cut
    where those end. With a last byte that is not zero, what is read there ends with the title, in
    place of one empty argument per byte that is left (``get_mm_cmdline`` in the kernel's
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
    """Give the calling thread a name of up to 15 letters; where that cannot be, change nothing."""
    try:
        with open("/proc/thread-self/comm", "w") as file:
            file.write(name)
    except OSError:  # not Linux, or a sandbox
        pass
