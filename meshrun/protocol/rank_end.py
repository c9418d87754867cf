"""How a rank ended: its program's exception, in a few words too, and its process's status. Pure."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from meshrun.host.printable import first_words, one_line
from meshrun.protocol.packing import Line, Rank, Time

LOST_PEER = "lost a connection to a peer"
_LONGEST = 240
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Connection refused|Broken pipe|Socket closed"
    r"|remote process exited|failed to (recv|send|write|read)|recvValue failed|sendBytes failed"
    r"|ncclRemoteError|this error originated at tensorpipe/|reached monitoredBarrier, but received"
)
"""Messages of torch's backends when a peer is gone, or if rank 0 reports on a barrier."""
_NCCLS = re.compile(r"^(nccl\w+): .*\n *Last error: *\n *(?!Exception raised )(\S.*)", re.MULTILINE)
"""NCCL's description of an error, last in the messages of torch's ``NCCLUtils``."""
_IN_A_THREAD = re.compile(
    r"^ *what\(\): +(?:.*terminated with exception: )?(?:\[Rank \d+\] )?(.+)"
    r"|terminated with exception: (?:\[Rank \d+\] )?(.+)"
    r"|^\[rank\d+\]:\[F[^]]*\] (?:\[[^]]*\] )*(.+)",
    re.MULTILINE,
)
"""Printed before SIGABRT: by C++ for an exception that leaves a thread, by NCCL's watchdog in torch
for its own, and by its monitor, which logs a fatal error."""
_GLOOS = "gloo/transport"
"""Part of the source path with which gloo's messages begin."""
_GLOOS_PLACE = re.compile(rf"^\[\S*{_GLOOS}/\S+:\d+\] +")
_TRANSPORTS = (_GLOOS, "tensorpipe/")
"""Parts of the source paths in the messages of gloo and of RPC's transport."""
_TORCHS = frozenset({"RuntimeError", "DistError", "DistBackendError", "DistNetworkError"})
_WORD = re.compile(r"\w")
_FILE = re.compile(r'^ +File "(.*)", line \d+', re.MULTILINE)
_BELOW = (
    re.compile(r"Caught \S+ in (.+)\.\nOriginal Traceback "),
    re.compile(r"-- (Process \d+) terminated with the following error:\nTraceback "),
    re.compile(r"(?:\w+: )?An exception occurred in a subprocess:\n\nName=(.+)\nTraceback "),
)
"""How torch re-raises an exception of a subprocess or thread: ``torch/_utils.py``,
``torch/multiprocessing/spawn.py``, and Inductor's ``subproc_pool.py``, with a kernel's name."""
_STACK = "\nException raised from "
"""Before the stack of C++ in torch's messages."""
_WORKER_GONE = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Messages of Python and of C++."""
_FORKS = ("os.fork()", "fork_exec(", "posix_spawn(")
"""In the last frame of a process that Python cannot start."""
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: [\w ]*\w")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRaised:
    """An exception ended a rank's program, or meshrun's start of the rank."""

    rank: Rank
    at_ns: Time
    kind: Line
    """The name of the exception's class, such as ``ValueError``."""
    message: str
    traceback: str
    """The whole text, as ``python`` prints it."""
    shown: bool
    """Whether the program's own excepthook has already printed it."""
    handled: bool = False
    """Whether the program called ``sys.exit()`` while it handled the exception."""
    threads: Line = ""
    """The threads that must end before its process exits, such as that of a checkpoint."""


class RankExited(Struct, frozen=True, kw_only=True):
    """A rank's process has ended."""

    rank: Rank
    pid: int
    wait_status: Annotated[int, Meta(ge=0, le=0xFFFF)]
    """The status from ``os.waitpid``."""
    at_ns: Time
    unasked: bool = False
    """Whether it was exiting before meshrun sent it a signal."""
    error: Line = ""
    """The error that it printed before SIGABRT killed it, if it did."""

    def __post_init__(self) -> None:
        os.waitstatus_to_exitcode(self.wait_status)  # raises an error if it has not ended

    @property
    def aborted(self) -> bool:
        """Whether SIGABRT killed it, as gloo and NCCL's watchdog do."""
        return os.WIFSIGNALED(self.wait_status) and os.WTERMSIG(self.wait_status) == signal.SIGABRT


def describe_raised(raised: RankRaised) -> str:
    """Return ``raised ValueError: the loss is nan``, or what the program did instead."""
    return f"{'exited while handling' if raised.handled else 'raised'} {headline(raised)}"


def headline(raised: RankRaised) -> str:
    """Return an exception as one short line: ``ValueError: the loss is nan``.

    An exception that was re-raised from a subprocess or thread is described as it was there.
    """
    message = _GLOOS_PLACE.sub("", raised.message.strip())
    below = next(filter(None, (words.match(message) for words in _BELOW)), None)
    if below and (there := _last_words(message)):
        return f"{_short(_first_line(there))}, in {below[1].replace('Process', 'process')}"
    if _WORKER_GONE.match(message) and (killed := killed_worker(raised)):
        message = killed
    if detail := nccl_error(message):
        message = detail
    first = _first_line(message)
    return _short(f"{raised.kind}: {first}" if first else raised.kind)


def nccl_error(message: str) -> str | None:
    """Return NCCL's own words in a message of torch's, if there are any.

    ``ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60``
    """
    found = _NCCLS.search(message)
    return f"{found[1]}: {found[2].strip()}" if found else None


def why_aborted(lines: Sequence[str]) -> str:
    """Return the last error of C++ in a rank's last lines; "" if there is none.

    A thread of torch, such as NCCL's watchdog, may meet an error before the program does.
    """
    printed = "\n".join(lines)
    errors = [next(filter(None, found)) for found in _IN_A_THREAD.findall(printed)]
    if not errors:
        return ""
    is_nccls = errors[-1].startswith("NCCL error")
    return _short((nccl_error(printed) if is_nccls else None) or errors[-1].strip())


def as_torch_prints(traceback: str, rank: int) -> str:
    """Return a traceback with ``[rank6]: `` before each line, as torch's excepthook prints it."""
    return re.sub(r"^(?=.)", f"[rank{rank}]: ", traceback, flags=re.MULTILINE)


def lost_connection(raised: RankRaised) -> bool:
    """Return whether an exception means that torch lost a connection to a peer."""
    if raised.kind not in _TORCHS or not _LOST_CONNECTION.search(raised.message):
        return False
    if any(path in raised.message for path in _TRANSPORTS):  # `wait()` has no frame of torch's
        return True
    files = _FILE.findall(raised.traceback) if raised.kind == "RuntimeError" else ()
    return not files or f"{os.sep}torch{os.sep}" in files[-1]


def aborted_for_lost_peer(error: str) -> bool:
    """Return whether a rank's last error before SIGABRT means that it lost a connection."""
    is_torchs = error.lower().startswith("nccl") or _GLOOS in error
    return is_torchs and _LOST_CONNECTION.search(error) is not None


def killed_worker(raised: RankRaised) -> str | None:
    """Return torch's message about a loader worker killed by a signal, if one was."""
    found = _WORKER_KILLED.search(raised.traceback)
    return found[0] if found else None


def lacks_processes(raised: RankRaised) -> bool:
    """Return whether an exception means that no process or thread could be started."""
    if raised.kind == "RuntimeError":
        return raised.message in _NO_THREAD
    return raised.kind == "BlockingIOError" and any(call in raised.traceback for call in _FORKS)


def _last_words(traceback: str) -> str | None:
    """Return the text that follows the last frame of a traceback."""
    *_, after = re.split(r'^ +File ".*\n', f"{traceback}\n", flags=re.MULTILINE)
    found = re.search(r"^[^ \n].*", after, re.MULTILINE | re.DOTALL)
    return found[0] if found else None


def _first_line(message: str) -> str:
    """Return the first line of a message, with the next if it ends with a colon.

    Between them, Triton's errors have the source, with a caret below the place.
    """
    first, *others = _lines(message)
    if first.endswith(":"):  # as in the errors of load_state_dict()
        _, caret, after = message.rpartition("^\n")
        others = _lines(after) if caret else others
        first = f"{first} {next(filter(None, others), '')}".rstrip()
    return first


def _lines(message: str) -> list[str]:
    """Return the lines of a message, without those that say nothing, such as ``=====``."""
    lines = [line.strip() for line in message.split("\n")]
    return [line for line in lines if _WORD.search(line)] or lines


def _short(line: str) -> str:
    if len(line) > _LONGEST:
        line = first_words(line, _LONGEST)
    elif not line.endswith(".."):
        line = line.removesuffix(".")
    return one_line(line)


def aborted_for_timeout(error: str) -> bool:
    """Return whether torch aborted a rank because an NCCL collective took too long."""
    return error.startswith("Watchdog caught collective operation timeout")


def timed_out(message: str, traceback: str) -> bool:
    """Return whether an exception means that a collective exceeded its group's timeout."""
    said = message.partition(_STACK)[0]
    is_late = re.search(r"timed? ?out", said, re.IGNORECASE) is not None
    return is_late and is_of_collective(message, traceback)


def ended_collective(traceback: str) -> bool:
    """Return whether an exception ended a call of a collective that torch has recorded.

    ``monitored_barrier()`` is not recorded, nor a wait for torch's store, as in ``new_group()``.
    """
    is_recorded = _GLOOS in traceback or "DistBackendError" in traceback
    return is_recorded and "monitoredBarrier" not in traceback


def is_of_collective(message: str, traceback: str) -> bool:
    """Return whether an exception comes from one of torch's collectives."""
    return "torch/distributed/" in traceback or _GLOOS in message
