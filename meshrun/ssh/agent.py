"""The part of ``--hosts`` on each host: starts its launcher, and stops it with the connection.

The controller sends arguments and environment over stdin. When stdin ends, or nothing has come for
a while, nobody is there any more for whom the launcher could work: it is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Any, NoReturn

from meshrun.errors import MeshrunError
from meshrun.host.folder import open_private
from meshrun.host.interfaces import interface_of, is_loopback, outward_address
from meshrun.host.leftovers import private_folder
from meshrun.host.machine_id import boot_id, own_namespaces
from meshrun.host.processes import die_with_parent, send_signal
from meshrun.host.reactor import Reactor
from meshrun.host.sockets import listen_on
from meshrun.host.title import set_title
from meshrun.protocol.caller import MET, PARENT_FOLDER, PARENT_PID, WHY
from meshrun.protocol.result import signal_name
from meshrun.ssh.framing import BEAT_S, ERR, OUT, LineSplitter, frame, greeting, news
from meshrun.ssh.remote_command import ADDRESS, without_own
from meshrun.ssh.write_buffer import WriteBuffer
from meshrun.start import own_command

_CHUNK = 64 * 1024
_FULL = 1024 * 1024
"""With more than this on its way to the controller, the launcher's output waits."""
_AFTER_GRACE_S = 10.0


def main(order: Mapping[str, Any], version: str) -> NoReturn:
    """Serve the controller that sent ``order`` until it goes or the launcher ends.

    Args:
        order: The first line from the controller.
        version: That of this meshrun.
    """
    signal.signal(signal.SIGINT, lambda *_: None)  # the controller's to pass on; no SIG_IGN, which
    signal.signal(signal.SIGPIPE, lambda *_: None)  # the launcher would inherit
    die_with_parent(os.getppid(), signal.SIGCONT)  # a stopped agent would not see the end of stdin
    set_title("agent", "of", order["controller"])
    os._exit(Agent(order, version).run())


class Agent:
    """Talks to the controller and watches the launcher."""

    def __init__(self, order: Mapping[str, Any], version: str) -> None:
        self._order, self._version = order, version
        self._reactor = Reactor()
        self._out = WriteBuffer(1, self._reactor)
        self._lines = LineSplitter()
        self._listener: socket.socket | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._folder, self._holder = "", contextlib.ExitStack()
        self._pipes: dict[int, tuple[bytes, IO[bytes]]] = {}
        """The launcher's streams that are open: kind and pipe."""
        self._heard_ns = self._reactor.now_ns()
        self._reactor.call_later(order["lease_s"], self._look_who_is_there)
        self._is_ending = False
        """Whether the launcher was told to end."""
        self._gone = False
        """Whether the controller is gone."""
        self._over = False
        self._why = ""
        """Why the launcher was ended, if it was for want of a controller that can be heard."""
        self._woken, wake = os.pipe()
        for end in (0, self._woken, wake):
            os.set_blocking(end, False)
        self._reactor.add_reader(0, self._hear)
        self._reactor.add_reader(self._woken, self._wake)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda signum, _: self._stop(signum))

    def run(self) -> int:
        """Follow the controller's orders until the end."""
        self._out.write(greeting(self._order["nonce"]))
        if not self._refuses():
            self._tell(ready=self._describe())
            self._reactor.every(BEAT_S, self._beat)
            while not self._over:
                self._turn()
        self._say_last_words()
        return 0

    def _refuses(self) -> bool:
        theirs, folder = self._order["version"], self._order["cwd"]
        if theirs != self._version:
            self._tell(
                refused=f"it has meshrun {self._version}, but {theirs} is required",
                hint="install the same version of meshrun on every host",
            )
            return True
        try:
            os.chdir(folder)
        except OSError as error:
            self._tell(
                refused=f"its folder {folder}: {error.strerror}",
                hint="run meshrun in a folder that exists on every host",
            )
            return True
        return False

    def _describe(self) -> dict[str, Any]:
        """Return which machine this is, by which addresses others may reach it, and who asks."""
        theirs, _, own, _ = (os.environ.get("SSH_CONNECTION", "") + "   ").split(" ")[:4]
        return {
            "own": os.environ.pop(ADDRESS, "") or own,
            "theirs": theirs,
            "outward": outward_address() or "",
            "machine": _machine(),
        }

    # ---- the loop ---------------------------------------------------------------------------

    def _turn(self) -> None:
        for fd in self._pipes:
            if self._out.queued_bytes < _FULL:
                self._reactor.add_reader(fd, partial(self._pass_on, fd))
            else:
                self._reactor.remove(fd)
        self._reactor.turn()
        if self._out.is_broken:
            self._lose_controller()
        if self._launcher is not None and self._launcher.poll() is not None:
            self._over = True

    def _beat(self) -> None:
        if not self._out.queued_bytes:
            self._tell(beat=1)

    def _look_who_is_there(self) -> None:
        """Give the controller up, unless it is we who have not listened."""
        silent_s = (self._reactor.asleep_ns - self._heard_ns) / 1e9
        left_s = self._order["lease_s"] - silent_s
        if left_s > 0:
            self._reactor.call_later(max(left_s, BEAT_S), self._look_who_is_there)
        elif not self._gone:
            self._why = f"no message from the host where meshrun was started for {silent_s:.0f} s"
            _say(self._why)
            self._lose_controller()

    def _wake(self) -> None:
        os.read(self._woken, 4096)

    def _hear(self) -> None:
        try:
            received = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._lose_controller()
            return
        self._heard_ns = self._reactor.now_ns()
        for words in self._lines.feed(received):
            self._handle(words)

    def _handle(self, words: Mapping[str, Any]) -> None:
        if "listen" in words:
            self._listen(words["listen"])
        elif "start" in words:
            self._start(words["start"], words["env"], listens=words["listens"])
        elif "signal" in words and self._launcher is not None:
            met = os.path.exists(os.path.join(self._folder, MET))
            if words["even_if_met"] or not met:
                send_signal(self._launcher.pid, words["signal"])
        elif "end" in words:
            self._end(words["end"])

    def _lose_controller(self) -> None:
        if not self._gone:
            self._gone = True
            self._reactor.remove(0)
            self._end(self._why or "the connection to the host where meshrun was started was lost")

    def _stop(self, signum: int) -> None:
        if self._launcher is None:
            _say(f"it received {signal_name(signum)}")
        self._end(f"the agent on its host received {signal_name(signum)}")

    def _end(self, why: str) -> None:
        """Have the launcher end, or end at once where there is none."""
        if self._launcher is None:
            self._over = True
        elif not self._is_ending:
            self._is_ending = True
            self._reactor.call_later(self._order["grace_s"] + _AFTER_GRACE_S, self._launcher.kill)
            path = os.path.join(self._folder, WHY)
            with contextlib.suppress(OSError), open(path, "w", opener=open_private) as file:
                file.write(why)
            send_signal(self._launcher.pid, signal.SIGTERM)

    # ---- the launcher -----------------------------------------------------------------------

    def _listen(self, addresses: Sequence[str]) -> None:
        """Bind the socket where the nodes meet; it stays bound until the launcher has it."""
        own = [each for each in addresses if each and interface_of(each) is not None]
        outward = [each for each in own if not is_loopback(each)]
        address = (*outward, outward_address() or "", *own, "127.0.0.1")
        try:
            self._listener = listen_on(next(filter(None, address)), 0)
        except MeshrunError as error:
            self._tell(
                refused=error.message,
                hint="pass --rdzv-endpoint HOST:PORT with an address of the first host",
            )
            return
        self._tell(listening=self._listener.getsockname()[:2])

    def _start(self, argv: Sequence[str], env: Mapping[str, str], *, listens: bool) -> None:
        self._folder = self._holder.enter_context(private_folder())
        whole = {
            **without_own(os.environ),
            **env,
            PARENT_PID: str(os.getpid()),
            PARENT_FOLDER: self._folder,
        }
        passed: tuple[int, ...] = ()
        if listens and self._listener is not None:
            passed = (self._listener.fileno(),)
            whole["MESHRUN_LISTENER"] = str(self._listener.fileno())
        report = os.path.join(self._folder, "report.json")
        self._launcher = subprocess.Popen(
            own_command("launcher", f"--report={report}", *argv),
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=passed,
        )
        if self._listener is not None:
            self._listener.close()
        for kind, pipe in ((OUT, self._launcher.stdout), (ERR, self._launcher.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes[pipe.fileno()] = (kind, pipe)

    def _pass_on(self, fd: int) -> bool:
        """Pass on what has come of a stream; return whether anything has."""
        kind, pipe = self._pipes[fd]
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._out.write(frame(kind, data))
        else:
            del self._pipes[fd]
            self._reactor.remove(fd)
            pipe.close()
        return bool(data)

    def _say_last_words(self) -> None:
        if self._launcher is not None:
            for fd in list(self._pipes):
                while self._pass_on(fd):
                    pass
            for name in ("error", "report"):
                self._tell_file(name)
            self._holder.close()
            code = self._launcher.returncode
            self._tell(ended=code, why=self._why if code else "")
        while self._out.queued_bytes and not self._gone:
            self._turn()

    def _tell_file(self, name: str) -> None:
        try:
            path = os.path.join(self._folder, f"{name}.json")
            with open(path, opener=open_private) as file:
                self._tell(**{name: file.read()})
        except OSError:  # it left none, or somebody else did
            pass

    def _tell(self, **values: object) -> None:
        self._out.write(news(**values))


def _machine() -> str:
    """Return what tells this machine, or the container that looks like one, from all others."""
    booted, spaces = boot_id(), own_namespaces()
    return " ".join([booted, *spaces, os.uname().nodename]) if booted and spaces else ""


def _say(text: str) -> None:
    """Print why the agent exits, for ssh to pass on if it can."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
