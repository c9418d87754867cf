"""How a rank ends: with the program's own status, every time.

Python's own finalisation makes any C++ thread that still wants the interpreter's lock unwind by
force, and the backends of torch have such threads: "terminate called without an active
exception", in every second run of a program that keeps its mesh in a global. So a rank goes
through the same steps (threads joined, atexit handlers, the program's objects freed, its files
and streams flushed), and then leaves by ``os._exit``. What was imported before the fork is left
standing, which also makes the end some 80 ms shorter.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import select
import signal
import sys
import threading
import weakref
from types import ModuleType

from meshrun.host.users_files import is_users_file
from meshrun.plan.parse import is_on
from meshrun.protocol.from_zygote import RankFinished, RankLeaves
from meshrun.worker.group_lifetime import PEERS_TAKE_S, destroyed
from meshrun.worker.learnt import learn, write_learnt
from meshrun.worker.reporter import Reporter

_CANNOT_FLUSH = 120
"""What ``python`` returns when its standard streams cannot be flushed at the end."""


class Ending:
    """Registered before anything else is imported, so that its part of the end comes last."""

    def __init__(self) -> None:
        self._armed = False
        self._status = 0
        self._pid = 0
        self._standing: frozenset[str] = frozenset()
        self._handler = self._leave
        self._earlier = _EarlierHandlers()
        atexit.register(self._handler)

    def leave_standing(self) -> None:
        """Have what is imported so far left as it is at the end of this process and of its forks.

        Done before ranks are forked, so that none copies the memory that this writes to.
        """
        if len(sys.modules) != len(self._standing):
            self._standing = frozenset(sys.modules)
            _disarm_finalizers()

    def arm(self, reporter: Reporter, gate_fd: int, learn_to: str = "") -> None:
        """In a rank, before the program runs: take over the end.

        Args:
            reporter: Told when the program has ended.
            gate_fd: A pipe that is closed at its other end once all ranks may leave.
            learn_to: The file in which to say at the end what was imported; "" for none.

        ``MESHRUN_FULL_EXIT=1`` leaves it to Python and the C library, for tools that hook theirs.
        """
        if is_on(os.environ.get("MESHRUN_FULL_EXIT")):
            return
        self._armed = True
        self._pid = os.getpid()
        self._reporter, self._gate_fd = reporter, gate_fd
        self._learn_to, self._environment = learn_to, dict(os.environ) if learn_to else {}
        self.leave_standing()

    def note(self, error: BaseException) -> None:
        """Remember the status with which ``error`` ends a process."""
        if isinstance(error, KeyboardInterrupt):
            self._status = -signal.SIGINT
        elif isinstance(error, SystemExit):
            self._status = _status_of(error.code)
        else:
            self._status = 1

    def _leave(self) -> None:
        is_rank = self._pid == os.getpid()
        if not self._armed or not (is_rank or destroyed.any_connected):
            return
        self._earlier.run()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # it is about to leave, and with its own status
        if self._status:
            self._reporter.tell(RankLeaves)  # before peers can miss it
        sys.setswitchinterval(3600.0)  # daemon threads do not run on while their globals vanish
        threading.excepthook = lambda _: None
        _flush_files()
        if is_rank and self._learn_to:
            write_learnt(self._learn_to, learn(sys.modules, self._environment, os.environ))
        if is_rank:  # a fork of it would wait forever for threads of groups, which it lacks
            _drop_exit_handlers(self._handler)
            _free_program(self._standing)
        status = self._status if _flush_streams() or self._status else _CANNOT_FLUSH
        destroyed.hold()
        if is_rank and status == 0 and (destroyed or _has_process_group()):
            self._wait_for_peers()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)

    def _wait_for_peers(self) -> None:
        """Keep connections up until each rank here has finished, or for a few seconds.

        A rank that leaves the moment it is done cuts off peers that are a little behind, and
        still connecting a group whose connections this end has seen through.
        """
        self._reporter.tell(RankFinished)
        select.select([self._gate_fd], [], [], PEERS_TAKE_S)


class _EarlierHandlers:
    """What a ``.pth`` file or ``sitecustomize`` has registered: its turn comes after ours.

    ``atexit`` lists its handlers to nobody, but ``unregister`` compares each with what it is given.
    """

    def __init__(self) -> None:
        self._kept: list[object] = []
        self._is_complete = False
        atexit.unregister(self)  # type: ignore[arg-type]
        self._is_complete = True

    def __eq__(self, handler: object) -> bool:
        """Whether ``handler`` is another one, to be forgotten; the first look forgets none."""
        if not self._is_complete:
            self._kept.append(handler)
        return all(handler is not kept for kept in self._kept)

    __hash__ = None  # type: ignore[assignment]

    def run(self) -> None:
        """Run these alone, the last one first; at this point all others have run."""
        if self._kept:
            atexit.unregister(self)  # type: ignore[arg-type]
            atexit._run_exitfuncs()


def _status_of(code: object) -> int:
    """Return the status for what ``sys.exit`` was given; an int beyond C's long is -1 to Python."""
    if not isinstance(code, int):
        return 0 if code is None else 1
    return code & 0xFF if -sys.maxsize - 1 <= code <= sys.maxsize else 0xFF


def _has_process_group() -> bool:
    """Whether peers may still be talking to this process."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _flush_files() -> None:
    """Write what open files hold back; a collected cycle may close a file below its buffer."""
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            try:
                thing.flush()
            except (OSError, ValueError):  # a closed file, a full disk
                continue


def _drop_exit_handlers(running: object) -> None:
    """Forget them, since they have run, and would keep the program's functions alive.

    Since Python 3.14 they are called from a copy of their list, in which ``running`` is, too.
    """
    atexit._clear()
    if sys.version_info >= (3, 14):
        for handlers in (thing for thing in gc.get_objects() if type(thing) is list):
            if any(type(entry) is tuple and entry and entry[0] is running for entry in handlers):
                handlers.clear()


def _free_program(standing: frozenset[str]) -> None:
    """Free what the program's own modules hold, in Python's order, so that files get written.

    Source:
        ``finalize_modules`` in CPython's ``Python/pylifecycle.c``: modules are dropped, cycles
        collected, and what is still alive loses its names, the latest import first.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    gc.callbacks.clear()  # Python's own collections call none from here on
    main = sys.modules.get("__main__")  # which __mp_main__ may be, too
    own = [
        (name, weakref.ref(module))
        for name, module in list(sys.modules.items())
        if (main is not None and module is main)
        or (name not in standing and _is_programs_own(module))
    ]
    del main
    for name, _ in own:
        sys.modules.pop(name, None)
    gc.collect()
    for _, reference in reversed(own):
        module = reference()
        if module is not None:
            _clear(module)
    gc.collect()


def _is_programs_own(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(module, ModuleType) and file is not None and is_users_file(str(file))


def _clear(module: ModuleType) -> None:
    names = vars(module)
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    others = [name for name in names if name not in private and name != "__builtins__"]
    for name in (*private, *others):
        names[name] = None


def _flush_streams() -> bool:
    """Flush Python's and C's standard streams; ``False`` if Python's stdout cannot be."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # None, or closed by the program
            continue
        except OSError:
            flushed = False
    ctypes.CDLL(None).fflush(None)
    return flushed


def _disarm_finalizers() -> None:
    """Leave standing, too, what imports asked to have undone at exit.

    torch unregisters each of its operator libraries this way, 70 ms of every rank's end.
    """
    registered: list[weakref.finalize[..., object]] = list(
        weakref.finalize._registry  # type: ignore[attr-defined]
    )
    for finalizer in registered:
        finalizer.atexit = False
