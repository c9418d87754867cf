"""Hides from meshrun's own code what macOS does not have; other code sees Linux as it is."""

import builtins
import ctypes
import errno
import fcntl
import os
import resource
import select
import selectors
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

_MESHRUN = str(Path(__file__).parents[3] / "meshrun") + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_MISSING = {
    os: "prlimit sched_getaffinity sched_setaffinity waitid",
    signal: "sigtimedwait SIGRTMAX SIGRTMIN",
    socket: "SO_PEERCRED TCP_USER_TIMEOUT",
    fcntl: "F_NOTIFY F_SETPIPE_SZ",
    resource: "prlimit",
    select: "epoll",
}
_FUNCTIONS = {
    *("prctl", "ptrace", "tgkill", "memfd_create"),
    *("inotify_init1", "inotify_add_watch"),
}


def _is_ours(frame) -> bool:
    """Return whether the innermost code outside the standard library is meshrun's."""
    while frame is not None:
        name = frame.f_code.co_filename
        is_library = name.startswith((_STANDARD, "<frozen")) and "site-packages" not in name
        if not is_library and name != __file__:
            return name.startswith(_MESHRUN)
        frame = frame.f_back
    return False


class _Platform(str):
    def __eq__(self, other: object) -> bool:
        is_ours = sys._getframe(1).f_code.co_filename.startswith(_MESHRUN)
        return ("darwin" if is_ours else "linux") == other

    def __ne__(self, other: object) -> bool:
        is_ours = sys._getframe(1).f_code.co_filename.startswith(_MESHRUN)
        return ("darwin" if is_ours else "linux") != other

    __hash__ = str.__hash__


def _hide_attributes(module: ModuleType, names: frozenset[str]) -> None:
    class Lacking(ModuleType):
        def __getattribute__(self, name: str) -> object:
            is_ours = sys._getframe(1).f_code.co_filename.startswith(_MESHRUN)
            if name in names and is_ours:
                raise AttributeError(f"no `{name}` on macOS")
            return super().__getattribute__(name)

    module.__class__ = Lacking


def _hide_paths(module: ModuleType, name: str) -> None:
    real = getattr(module, name)

    def call(*args, **kwargs):
        path = args[0] if args and isinstance(args[0], str | os.PathLike) else ""
        is_linux = os.fspath(path).startswith(("/proc", "/sys/", "/dev/shm"))
        if is_linux and _is_ours(sys._getframe(1)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(*args, **kwargs)

    setattr(module, name, call)


def _hide_functions() -> None:
    find = ctypes.CDLL.__getattr__

    def find_on_macos(self: ctypes.CDLL, name: str) -> object:
        if name in _FUNCTIONS and _is_ours(sys._getframe(1)):
            raise AttributeError(f"symbol not found: {name}")
        return find(self, name)

    ctypes.CDLL.__getattr__ = find_on_macos


def _refuse_packets() -> None:
    make = socket.socketpair

    def socketpair(family=None, kind=socket.SOCK_STREAM, proto=0):
        if kind == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))
        return make(family, kind, proto)

    socket.socketpair = socketpair


signal.SIGINFO, signal.SIGEMT = signal.SIGRTMAX - 2, signal.SIGRTMAX - 1
for _module, _names in _MISSING.items():
    _hide_attributes(_module, frozenset(_names.split()))
for _name in ("listdir", "lstat", "open", "readlink", "scandir", "stat"):
    _hide_paths(os, _name)
_hide_paths(builtins, "open")
_hide_functions()
_refuse_packets()
selectors.DefaultSelector = selectors.PollSelector
sys.platform = _Platform("linux")
