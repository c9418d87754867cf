"""XIDs: errors of NVIDIA's GPUs in the kernel log."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from meshrun.host.printable import first_words, one_line

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
"""Buffer size: each read returns one record, and fails if the record is longer."""
_JOURNAL = ("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=cat")
_JOURNAL_TAKES_S = 10.0
_XID = re.compile(
    r"(?:\d+,[^;]*;)?NVRM: Xid \((?:PCI:)?(?P<address>[0-9a-f:]+)[^)]*\): (?P<number>\d+)"
    r"(?:, pid=[^,]*)?(?:, name=[^,]*)?(?:, (?:Ch|channel) [0-9a-fx]+)?(?:, intr [0-9a-f]+\.?)?"
    r"(?:,? (?P<text>.*))?",
    re.IGNORECASE,
)
"""A record of /dev/kmsg, or a message of the journal. Within other messages, the same text may be a
name that any user has chosen, such as that of a control group that ran out of memory."""
_LONGEST = 160
_FATAL = frozenset({46, 48, 62, 64, 74, 79, 95, 119, 120, 140})
"""XIDs after which a GPU must be reset or replaced before anything can run on it.

Source:
    NVIDIA, "Analyzing Xid Errors with the Xid Catalog" and "Health Validation, Xid Checks".
"""
_RECOVERY = 154
_NEEDS_RECOVERY = re.compile(r" to 0x0*[1-9a-f]", re.IGNORECASE)
"""A match in the text of XID 154 means that a reset, a reboot or draining the node is needed."""


class Xid(Struct, frozen=True):
    """An error of a GPU, as in ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off``."""

    address: str
    """Address of the GPU, without the function: ``0000:3b:00``."""
    number: int
    text: str

    def is_on(self, address: str | None) -> bool:
        """Return whether it is an error of the GPU with this address."""
        return address is not None and address.rpartition(".")[0].lower() == self.address

    @property
    def is_fatal(self) -> bool:
        """Whether nothing can run on the GPU until it is reset or replaced."""
        if self.number == _RECOVERY:
            return _NEEDS_RECOVERY.search(self.text) is not None
        return self.number in _FATAL

    def __str__(self) -> str:
        return f"XID {self.number}" + (f" ({self.text})" if self.text else "")


class XidWatch:
    """The kernel log from now on, if this user may read it."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def read(self) -> list[Xid]:
        """Return the XIDs since the last call."""
        return [] if self._fd is None else list(_find_xids(_read_records(self._fd)))

    def close(self) -> None:
        """Close the log."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_xids(path: Path = KERNEL_LOG) -> list[Xid] | None:
    """Return the XIDs since boot; ``None`` if this user may not read the log.

    Source:
        kernel, Documentation/ABI/testing/dev-kmsg; journalctl(1) for users of its groups.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return list(_find_xids(_read_records(fd)))
        finally:
            os.close(fd)
    except OSError:
        return _read_journal()


def _read_journal() -> list[Xid] | None:
    try:
        found = subprocess.run(
            _JOURNAL,
            capture_output=True,
            timeout=_JOURNAL_TAKES_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if found.returncode or not found.stdout:  # it is empty without permission
        return None
    return list(_find_xids(found.stdout.decode(errors="replace").split("\n")))


def _read_records(fd: int) -> Iterator[str]:
    while True:
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:  # the record was overwritten
            continue
        except OSError:
            return
        if not record:
            return
        yield from record.decode(errors="replace").split("\n")


def _find_xids(lines: Iterable[str]) -> Iterator[Xid]:
    for line in lines:
        if found := _XID.match(line):
            text = first_words((found["text"] or "").strip(), _LONGEST)
            yield Xid(found["address"].lower(), int(found["number"]), one_line(text))
