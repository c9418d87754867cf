"""How a rank ends: with the program's own status, every time.

Python's finalization forces C++ threads that still want the interpreter's lock to unwind, and
torch's backends have such threads: every second run of a program that keeps its mesh in a global
ends with "terminate called without an active exception". A rank therefore goes through the same
steps (joins threads, runs atexit handlers, frees the program's objects, flushes its files and
streams) and then calls ``os._exit``. Modules imported before the fork are not torn down, which
also saves some 80 ms.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

from meshrun.host.own_variables import FULL_EXIT
from meshrun.host.users_files import is_installed, is_users_file, names_of
from meshrun.plan.parse import is_on
from meshrun.protocol.zygote_messages import RankFinished, RankLeaves
from meshrun.worker.group_lifetime import PEERS_TAKE_S, destroyed
from meshrun.worker.import_record import record_imports, write_import_record
from meshrun.worker.reporter import Reporter

_CANNOT_FLUSH = 120
"""The exit status of ``python`` if it cannot flush its standard streams at the end."""
_SWITCH_S = 0.005
"""Python's default. A rank that gives up the interpreter's lock at its end, to write or close a
file, gets it back from a busy thread after this time."""
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - only inspected


class ExitHandler:
    """The exit handler of a process; made before all imports, so that it runs last."""

    def __init__(self) -> None:
        self._status = 0
        self._pid = 0
        """The process whose end this is; 0 until :meth:`arm`."""
        self._kept_modules: frozenset[str] = frozenset()
        self._handler = self._leave
        self._earlier = _EarlierHandlers()
        atexit.register(self._handler)

    def keep_modules(self) -> None:
        """Do not tear down the modules imported so far when this process or a fork of it ends.

        Called before ranks are forked, so that none copies the memory that this writes to.
        """
        if len(sys.modules) != len(self._kept_modules):
            self._kept_modules = frozenset(sys.modules)
            _disarm_finalizers()

    def arm(self, reporter: Reporter, barrier_fd: int, imports_file: str = "") -> None:
        """Take over the end of a rank, before its program runs.

        Args:
            reporter: Reports that the program has ended.
            barrier_fd: A pipe whose other end is closed once all ranks may leave.
            imports_file: The file that records what was imported; "" for none.

        ``MESHRUN_FULL_EXIT=1`` leaves the end to Python and the C library, for tools that hook it.
        """
        if is_on(os.environ.get(FULL_EXIT)):
            return
        self._pid = os.getpid()
        self._reporter, self._barrier_fd = reporter, barrier_fd
        self._imports_file = imports_file
        self._environment = dict(os.environ) if imports_file else {}
        self.keep_modules()

    def note(self, error: BaseException) -> None:
        """Remember the exit status that follows from ``error``."""
        if isinstance(error, KeyboardInterrupt):
            self._status = -signal.SIGINT
        elif isinstance(error, SystemExit):
            self._status = _status_of(error.code)
        else:
            self._status = 1

    def _leave(self) -> None:
        is_rank = self._pid == os.getpid()
        if not self._pid or not (is_rank or destroyed.any_connected):
            return
        self._earlier.run()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # this process is leaving, with its own status
        if self._status:
            self._reporter.report(RankLeaves)  # before peers notice
        # Daemon threads run on while their globals vanish; only Python's own end can stop them.
        sys.setswitchinterval(_SWITCH_S)
        threading.excepthook = lambda _: None
        _if_memory_allows(_flush_files)
        if is_rank:
            _if_memory_allows(self._write_import_record)
            # A fork would wait forever for the groups' threads, which it does not have.
            _if_memory_allows(_drop_exit_handlers, self._handler)
            _if_memory_allows(_drop_signal_handlers)
            _if_memory_allows(_free_program, self._kept_modules)
        status = self._status if _flush_streams() or self._status else _CANNOT_FLUSH
        destroyed.hold()
        dist = sys.modules.get("torch.distributed")
        has_group = dist is not None and dist.is_available() and dist.is_initialized()
        if is_rank and status == 0 and (destroyed or has_group):  # peers may still be talking to it
            self._wait_for_peers()
        if status == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if is_rank and _maps_named_memory():
            ctypes.CDLL(None).exit(status)  # libraries remove it in C exit handlers, as vLLM does
        os._exit(status)

    def _write_import_record(self) -> None:
        if self._imports_file:
            write_import_record(
                self._imports_file, record_imports(sys.modules, self._environment, os.environ)
            )

    def _wait_for_peers(self) -> None:
        """Keep connections open until all ranks of this node have finished, or for a few seconds.

        A rank that leaves at once cuts off peers that are a little behind and still connecting a
        group, although it is connected on this side. Meanwhile, no alarm of the program goes off:
        it would have ended before.
        """
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        self._reporter.report(RankFinished)
        select.select([self._barrier_fd], [], [], PEERS_TAKE_S)


def _if_memory_allows(step: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(MemoryError):
        step(*args)


class _EarlierHandlers:
    """The exit handlers of ``.pth`` files and ``sitecustomize``, which run after ours.

    ``atexit`` does not list its handlers, but ``unregister`` compares each with its argument.
    """

    def __init__(self) -> None:
        self._kept: list[object] = []
        self._is_complete = False
        atexit.unregister(self)  # type: ignore[arg-type]
        self._is_complete = True

    def __eq__(self, handler: object) -> bool:
        """Collect ``handler`` in the first pass; later, return whether to unregister it."""
        if not self._is_complete:
            self._kept.append(handler)
        return all(handler is not kept for kept in self._kept)

    __hash__ = None  # type: ignore[assignment]

    def run(self) -> None:
        """Unregister all others, which have run, and run these, the last one first."""
        if self._kept:
            atexit.unregister(self)  # type: ignore[arg-type]
            atexit._run_exitfuncs()


def _status_of(code: object) -> int:
    """Return the status for an argument of ``sys.exit``; an int beyond C's long counts as -1."""
    if not isinstance(code, int):
        return 0 if code is None else 1
    return code & 0xFF if -sys.maxsize - 1 <= code <= sys.maxsize else 0xFF


def _flush_files() -> None:
    """Flush open files: the collection of a cycle may close a file before its buffer."""
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            try:
                thing.flush()
            except (OSError, ValueError):  # a closed file, a full disk
                continue


def _drop_exit_handlers(running: object) -> None:
    """Drop the exit handlers, which have run: they keep the program's functions alive.

    Since Python 3.14, they are called from a copy of their list, which also holds ``running``.
    """
    atexit._clear()
    if sys.version_info >= (3, 14):
        for handlers in (thing for thing in gc.get_objects() if type(thing) is list):
            if any(type(entry) is tuple and entry and entry[0] is running for entry in handlers):
                handlers.clear()


def _drop_signal_handlers() -> None:
    """Ignore the signals that the program handles: a handler may be a method, and hold a file."""
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):  # SIGCHLD, if ignored, loses the status of children
            default = signum == signal.SIGCHLD
            signal.signal(signum, signal.SIG_DFL if default else signal.SIG_IGN)


def _free_program(kept: frozenset[str]) -> None:
    """Free what the program's own modules hold, in Python's order, so that files get written.

    Source:
        ``finalize_modules`` in CPython's ``Python/pylifecycle.c``: modules are dropped, cycles
        collected, and what is still alive loses its names, the latest import first.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    gc.callbacks.clear()  # Python calls none from here on
    main = sys.modules.get("__main__")  # the same module as __mp_main__ in some programs
    package = _installed_package(main)
    own = [
        (name, weakref.ref(module))
        for name, module in list(sys.modules.items())
        if (main is not None and module is main)
        or (name.partition(".")[0] == package and names_of(module))
        or (name not in kept and _is_programs_own(module))
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


def _installed_package(main: object) -> str:
    """Return the package of an installed program that runs with ``-m``, "" for any other."""
    spec = getattr(main, "__spec__", None)
    if not isinstance(spec, ModuleSpec) or not is_installed(spec.origin):
        return ""
    top = spec.name.partition(".")[0]
    return top if top not in ("torch", "meshrun") else ""


def _is_programs_own(module: object) -> bool:
    file = names_of(module).get("__file__")
    return file is not None and is_users_file(str(file))


def _clear(module: ModuleType) -> None:
    names = names_of(module)
    private = [name for name in names if name.startswith("_") and not name.startswith("__")]
    others = [name for name in names if name not in private and name != "__builtins__"]
    for name in (*private, *others):
        names[name] = None


def _flush_streams() -> bool:
    """Flush Python's and C's standard streams; return ``False`` if one of Python's failed."""
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


def _maps_named_memory() -> bool:
    """Whether this process maps shared memory, or a semaphore, that would outlive it."""
    try:
        if not os.listdir(_SHARED_MEMORY):
            return False
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return any(_SHARED_MEMORY in line and "(deleted)" not in line for line in maps)
    except (OSError, ValueError, MemoryError):
        return False


def _disarm_finalizers() -> None:
    """Cancel the cleanup at exit that imported modules have registered.

    torch unregisters each of its operator libraries this way, which takes 70 ms in every rank.
    """
    registered: list[weakref.finalize[..., object]] = list(
        weakref.finalize._registry  # type: ignore[attr-defined]
    )
    for finalizer in registered:
        finalizer.atexit = False
