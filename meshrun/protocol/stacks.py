"""Parses, merges and describes Python stacks that ``faulthandler`` writes in ranks. Pure."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from meshrun.host.printable import one_line
from meshrun.host.users_files import LIBRARIES, OURS, is_users_file
from meshrun.wording import count

if sys.platform == "darwin":
    STACKS_SIGNAL, MAIN_STACK_SIGNAL = signal.SIGINFO, signal.SIGEMT
else:
    STACKS_SIGNAL, MAIN_STACK_SIGNAL = signal.SIGRTMAX - 4, signal.SIGRTMAX - 3
"""Request all stacks of a rank from Python, and that of the main thread from a handler in C.
Nothing else uses these signals, and Python can catch them."""

CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that ``faulthandler`` handles."""

_THREAD = re.compile(
    r"(?:(?:(Current) t|T)hread 0x[0-9a-fA-F].*|Stack \(most recent call first\)):"
)
_BEGIN, _END = "\2", "\3"
_ANSWER = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)
"""``faulthandler`` writes no control characters. An answer may interrupt a line of a handler."""
_MOST_BYTES = 128 * 1024
_MORE_THREADS = re.compile(r"^\.\.\.$", re.MULTILINE)
"""Ends a dump of more than 100 threads."""
_FRAME = re.compile(r'\s+File "(.*)", line (\d+|\?\?\?) in (.*)')
_TRACEBACK_FRAME = re.compile(r'^ +(?:\| +)?File "(.*|[^"]*)", line (\d+), in (.*)$', re.MULTILINE)
"""A path may contain quotes, or else line breaks."""
_PARTS_OF_GROUP = re.compile(r"^ +\+-\+-", re.MULTILINE)
"""Begins the tracebacks of an ``ExceptionGroup``'s members, which follow its own."""
_FATAL = re.compile(r"Fatal Python error: (.*)")
_MOST_FRAMES = 40
_IMPORT = "<frozen importlib"
_DEBUGGER = (f"{os.sep}bdb.py", f"{os.sep}pdb.py")
_RUNPY = ("<frozen runpy>", f"{os.sep}runpy.py")
_HANDLER = os.path.join("meshrun", "worker", "stack_handler.py")
_WAITS = {
    os.path.join("meshrun", "worker", "call_channel.py"): "between calls",
    os.path.join("meshrun", "worker", "exit.py"): "finished",
}
"""The state of a rank that waits in one of these files, for a call or for its peers' end."""
_WRAPPERS = frozenset(
    {"wrapper", "inner", "_call_impl", "_wrapped_call_impl", "__call__", "<lambda>"}
)
"""The usual names of functions around the one that was called."""


class Frame(Struct, frozen=True):
    """A stack frame."""

    file: str
    line: str
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is not in Python, an installed library or meshrun."""
        return is_users_file(self.file)

    def place(self, folder: str) -> str:
        """Return ``train.py:41``, relative to ``folder`` if it is below that."""
        return f"{one_line(short_path(self.file, folder))}:{self.line}"


class StackDump(Struct, frozen=True):
    """The stacks of one process; frames are innermost first."""

    main: tuple[Frame, ...]
    """The main thread's stack."""
    others: tuple[tuple[Frame, ...], ...] = ()
    fatal: str | None = None
    """The error that ended the process, such as ``Segmentation fault``."""
    has_more: bool = False
    """Whether there are too many threads for all of them to be in ``others``."""


def mark_answer(dump: bytes) -> bytes:
    """Return a dump of all threads as the answer to a request, to write at once."""
    return _BEGIN.encode() + dump[-_MOST_BYTES:] + _END.encode()


def is_answered(text: str) -> bool:
    """Return whether a text contains a whole answer."""
    return _ANSWER.search(text) is not None


def lacks_main_thread(text: str) -> bool:
    """Return whether an answer is of so many threads that it lacks the main one, the last."""
    return any(map(_MORE_THREADS.search, _ANSWER.findall(text)))


def parse_dump(text: str) -> StackDump | None:
    """Return the last dump in the output of ``faulthandler``; ``None`` if there is none.

    An answer has the stacks of all threads, any other dump that of the main thread. After a crash,
    the thread that crashed counts as the main thread.
    """
    fatal, threads = _threads(_ANSWER.sub("", text))
    crashed = [at for at, (is_current, _) in enumerate(threads) if is_current and fatal]
    if crashed:
        threads.append(threads.pop(crashed[0]))
    stacks = [frames for _, frames in threads]
    has_more = fatal is None and lacks_main_thread(text)
    if fatal is None and (answers := _ANSWER.findall(text)):
        # CPython lists the main thread last, unless there are too many (``Python/traceback.c``).
        answer = [frames for _, frames in _threads(answers[-1])[1]]
        stacks = [*answer, *stacks[-1:]] if has_more or not answer else answer
    if not stacks:
        return None
    *others, main = stacks
    others = [frames for frames in others if not all(map(_is_ours, frames))]
    return StackDump(_without_ours(main), tuple(map(_without_ours, others)), fatal, has_more)


def _threads(text: str) -> tuple[str | None, list[tuple[bool, list[Frame]]]]:
    """Return the last fatal error, and the stack of each thread, with whether it is the current."""
    fatal = None
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if found := _FATAL.match(line):
            fatal, threads = found[1], []
        elif thread := _THREAD.match(line):
            threads.append((thread[1] is not None, []))
        elif (frame := _FRAME.match(line)) and threads:
            threads[-1][1].append(Frame(frame[1], frame[2], frame[3]))
    return fatal, threads


def _is_ours(frame: Frame) -> bool:
    return frame.file.startswith(OURS)


def _without_ours(frames: list[Frame]) -> tuple[Frame, ...]:
    """Return the frames of the program, without those of ``runpy``, meshrun and its handler."""
    frames = [frame for frame in frames if not _surrounds(frame)]
    until = len(frames)
    while until and (_is_ours(frames[until - 1]) or frames[until - 1].file.endswith(_RUNPY)):
        until -= 1
    return tuple(frames[:until] or (frames[:1] if _wait_in(frames) else frames))


def _surrounds(frame: Frame) -> bool:
    """Return whether a frame is of the handler that dumps the stack, or of a replaced method."""
    is_replaced = _is_ours(frame) and frame.function == "around"
    return is_replaced or frame.file.endswith(_HANDLER)


def _wait_in(stack: Sequence[Frame]) -> str | None:
    """Return the state of a rank that waits in meshrun, ``None`` for any other."""
    file = stack[0].file if stack else ""
    return next((found for end, found in _WAITS.items() if file.endswith(end)), None)


def merge(dumps: Mapping[int, StackDump]) -> list[tuple[tuple[int, ...], StackDump]]:
    """Return groups of ranks whose main threads have the same stack, the largest first."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(dumps):
        groups.setdefault(dumps[rank].main, []).append(rank)
    merged = [(tuple(ranks), dumps[ranks[0]]) for ranks in groups.values()]
    return sorted(merged, key=lambda group: (-len(group[0]), group[0]))


def stack_place(stack: tuple[Frame, ...], folder: str) -> str:
    """Return where a stack is: ``all_reduce at train.py:41``."""
    place = next((at for at, frame in enumerate(stack) if frame.is_users), None)
    if not stack:
        return "no Python frame"
    if place is None and (waits := _wait_in(stack)):
        return waits
    if place is None:
        last = next((frame for frame in stack if not _is_machinery(frame)), stack[0])
        return f"{last.function} at {last.place(folder)}"
    users = stack[place]
    calls = _unwrapped(stack[:place])
    where = users.place(folder)
    return f"{calls} at {where}" if calls else f"{where} in {users.function}"


def describe(stack: tuple[Frame, ...], folder: str) -> Iterator[str]:
    """Yield a line for each frame, the innermost last, as in a traceback.

    Frames of importlib are left out as there, and those of pdb too, except for the innermost one.
    """
    frames = [*stack[:1], *(frame for frame in stack[1:] if not _is_machinery(frame))]
    shown = frames[:_MOST_FRAMES]
    if len(shown) < len(frames):
        yield f"... {count(len(frames) - len(shown), 'more frame')}"
    for frame in reversed(shown):
        yield f"{frame.place(folder)} in {frame.function}"


def _is_machinery(frame: Frame) -> bool:
    return frame.file.startswith(_IMPORT) or frame.file.endswith(_DEBUGGER)


def user_place(traceback: str, folder: str) -> str:
    """Return where in the user's files an exception came from; "" if from none of them.

    The frames of ``traceback`` are as Python prints them, and paths relative to ``folder``.
    """
    own = _PARTS_OF_GROUP.split(traceback, maxsplit=1)[0]
    frames = [Frame(*found) for found in _TRACEBACK_FRAME.findall(own)]
    return stack_place(tuple(reversed(frames)), folder) if any(f.is_users for f in frames) else ""


def current_folder() -> str:
    """Return the working directory, to which paths are relative; "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def short_path(file: str, folder: str) -> str:
    """Return a path relative to the folder of a library or to ``folder``, if it is below one."""
    _, found, rest = file.rpartition(f"{os.sep}site-packages{os.sep}")
    if found:
        return rest
    if folder and os.path.isabs(file) and file.startswith(os.path.join(folder, "")):
        return os.path.relpath(file, folder)
    library = next((path for path in LIBRARIES if file.startswith(path)), "")
    return file.removeprefix(library)


def _unwrapped(calls: tuple[Frame, ...]) -> str:
    """Return the function that the user called, rather than a decorator around it.

    It is ``import`` for the code of a module, ``breakpoint`` in pdb, and "" for a special method,
    as ``x[0]`` calls ``__getitem__``, and ``Linear()`` calls ``__init__``.
    """
    if calls and (calls[-1].function == "<module>" or calls[-1].file.startswith(_IMPORT)):
        return "import"
    if calls and calls[-1].file.endswith(_DEBUGGER):
        return "breakpoint"
    names = [frame.function for frame in reversed(calls)]
    called = next((name for name in names if name not in _WRAPPERS), next(iter(names), ""))
    return "" if called.startswith("__") and called.endswith("__") else called
