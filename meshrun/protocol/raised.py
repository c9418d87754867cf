"""Describes an exception that ended a rank's program, in a few words. Pure."""

from __future__ import annotations

import os
import re

from meshrun.protocol.rank_end import RankRaised

_LONGEST = 240
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed"
    r"|remote process exited|failed to (recv|send|write|read)|recvValue failed|sendBytes failed"
)
"""What torch's backends print when the other end of a collective is gone."""
_GLOOS = "gloo/transport"
"""Part of the place in gloo's source with which its messages begin."""
_TORCHS = frozenset({"RuntimeError", "DistError", "DistBackendError", "DistNetworkError"})
_FILE = re.compile(r'^ +File "(.*)", line \d+', re.MULTILINE)
_BELOW = (
    re.compile(r"Caught \S+ in (.+)\.\nOriginal Traceback "),
    re.compile(r"-- (Process \d+) terminated with the following error:\nTraceback "),
)
"""torch's words for an exception of a process or thread below: ``torch/_utils.py``, and
``torch/multiprocessing/spawn.py``."""
_WORKER_GONE = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: [\w ]*\w")


def describe_raised(raised: RankRaised) -> str:
    """Return ``raised ValueError: the loss is nan``, or what the program did instead."""
    return f"{'exited while handling' if raised.handled else 'raised'} {headline(raised)}"


def headline(raised: RankRaised) -> str:
    """Return an exception in one line of bearable length: ``ValueError: the loss is nan``.

    One that passed through a process below is told as it was there.
    """
    message = raised.message.strip()
    below = next(filter(None, (words.match(message) for words in _BELOW)), None)
    if below and (there := _last_words(message)):
        return f"{_bearable(there)}, in {below[1].replace('Process', 'process')}"
    if _WORKER_GONE.match(message) and (killed := killed_worker(raised)):
        message = killed
    first, *others = (line.strip() for line in message.split("\n"))
    if first.endswith(":"):  # such as what is wrong with a state_dict
        first = f"{first} {next(filter(None, others), '')}".rstrip()
    return _bearable(f"{raised.kind}: {first}" if first else raised.kind)


def as_torch_prints(traceback: str, rank: int) -> str:
    """Return a traceback with ``[rank6]: `` before its lines, as torch's own hook prints it."""
    return re.sub(r"^(?=.)", f"[rank{rank}]: ", traceback, flags=re.MULTILINE)


def lost_connection(raised: RankRaised) -> bool:
    """Return whether an exception means that torch lost a connection to a peer."""
    if raised.kind not in _TORCHS or not _LOST_CONNECTION.search(raised.message):
        return False
    if _GLOOS in raised.message:  # also of `work.wait()`, which has no frame of torch's
        return True
    files = _FILE.findall(raised.traceback)
    return not files or f"{os.sep}torch{os.sep}" in files[-1]


def killed_worker(raised: RankRaised) -> str | None:
    """Return what torch says of a loader worker that a signal ended, if that was the reason."""
    found = _WORKER_KILLED.search(raised.traceback)
    return found[0] if found else None


def _last_words(traceback: str) -> str | None:
    """Return the line that follows the last frame of a traceback."""
    *_, after = re.split(r'^ +File ".*\n', f"{traceback}\n", flags=re.MULTILINE)
    return next((line for line in after.split("\n") if line and not line.startswith(" ")), None)


def _bearable(line: str) -> str:
    if len(line) > _LONGEST:
        line = line[:_LONGEST] + "..."
    elif not line.endswith(".."):
        line = line.removesuffix(".")
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def timed_out(message: str, traceback: str) -> bool:
    """Return whether an exception means that a collective took longer than its group allows."""
    is_late = re.search(r"timed? ?out", message, re.IGNORECASE) is not None
    return is_late and is_of_collective(message, traceback)


def is_of_collective(message: str, traceback: str) -> bool:
    """Return whether an exception comes from a collective of torch."""
    return "torch/distributed/" in traceback or _GLOOS in message
