"""The part of ``--hosts`` on each host: starts its launcher, and stops it with the connection.

The controller sends its messages over stdin. When stdin ends, or nothing arrives for a while, the
controller is gone, so the agent stops the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from functools import partial
from typing import IO, Any, NoReturn

from meshrun.errors import MeshrunError
from meshrun.host.descriptors import WriteBuffer, read_now
from meshrun.host.folder import private_folder, read_private, write_private
from meshrun.host.network import interface_of, is_loopback, listen_on, outward_address
from meshrun.host.own_variables import LISTENER, NODE_ADDRESS
from meshrun.host.processes import die_with_parent, interrupts_delayed, send_signal, set_title
from meshrun.host.reactor import Reactor
from meshrun.host.sysfs import boot_id
from meshrun.protocol.caller import ERROR, JOINED, REPORT, WHY, as_caller
from meshrun.protocol.packing import pack, unpack
from meshrun.protocol.result import signal_name
from meshrun.ssh import agent_messages as messages
from meshrun.ssh.host_phases import AgentPhase
from meshrun.ssh.remote_command import without_own
from meshrun.start import own_command

_CHUNK = 64 * 1024
_FULL = 1024 * 1024
"""With more bytes than this queued for the controller, the agent reads no output."""
_AFTER_GRACE_S = 10.0


def main(first: Mapping[str, Any], version: str) -> NoReturn:
    """Serve the controller until it disconnects or the launcher exits.

    ``first`` is the first line from the controller.
    """
    hello = messages.read_hello(first)
    signal.signal(signal.SIGINT, lambda *_: None)  # the controller forwards it; the launcher would
    signal.signal(signal.SIGPIPE, lambda *_: None)  # inherit SIG_IGN, but not a handler
    die_with_parent(os.getppid(), signal.SIGCONT)  # a stopped agent would not notice stdin's end
    set_title("agent", "of", hello.controller)
    Agent(hello, version).run()
    os._exit(0)


class Agent:
    """Reads the controller's orders, watches the launcher and writes its output and other news."""

    def __init__(
        self, hello: messages.Hello, version: str, *, orders: int = 0, news: int = 1
    ) -> None:
        self._hello, self._version, self._orders = hello, version, orders
        self._reactor = Reactor()
        self._out = WriteBuffer(news, self._reactor)
        self._phase = AgentPhase.WAITING
        self._line = b""
        """The beginning of a line from the controller."""
        self._listener: socket.socket | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._folder, self._holder = "", contextlib.ExitStack()
        self._pipes: dict[int, tuple[bytes, IO[bytes]]] = {}
        """The launcher's open streams by descriptor: kind and pipe."""
        self._received_ns = self._reactor.now_ns()
        self._reactor.call_later(hello.lease_s, self._check_controller)
        self._why_gone: str | None = None
        """Why the controller is considered gone, "" if the connection was lost; ``None`` if not."""
        os.set_blocking(orders, False)
        self._reactor.add_reader(orders, self._receive)
        self._caught: list[int] = []
        """Signals that have arrived."""
        self._reactor.on_signal(self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a turn looks at what has ended
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda signum, _: self._caught.append(signum))

    def run(self) -> None:
        """Carry out the controller's orders until the end."""
        self._out.write(messages.greeting(self._hello.nonce))
        if (failure := self._why_unfit()) is not None:
            self._send(failure)
        else:
            self._send(_describe_host())
            self._reactor.every(messages.BEAT_S, self._beat)
            while self._phase is not AgentPhase.OVER:
                self._turn()
        self._finish()

    def _why_unfit(self) -> messages.AgentError | None:
        """Return why this host cannot be used; otherwise enter the working folder."""
        theirs, folder = self._hello.version, self._hello.cwd
        if theirs != self._version:
            return messages.AgentError(
                why=f"it has meshrun {self._version}, but {theirs} is required",
                hint="install the same version of meshrun on every host",
            )
        try:
            os.chdir(folder)
        except OSError as error:
            return messages.AgentError(
                why=f"its folder {folder}: {error.strerror}",
                hint="run meshrun in a folder that exists on every host",
            )
        return None

    # ---- the loop ---------------------------------------------------------------------------

    def _turn(self) -> None:
        for fd in self._pipes:
            if self._out.queued_bytes < _FULL:
                self._reactor.add_reader(fd, partial(self._forward, fd))
            else:
                self._reactor.remove(fd)
        self._reactor.turn()
        if self._out.is_broken:
            self._lose_controller()
        if self._launcher is not None and self._launcher.poll() is not None:
            self._phase = AgentPhase.OVER

    def _beat(self) -> None:
        if not self._out.queued_bytes:
            self._send(messages.Alive())

    def _check_controller(self) -> None:
        """Stop the launcher if the controller is silent while this agent was listening."""
        silent_s = (self._reactor.asleep_ns - self._received_ns) / 1e9
        left_s = self._hello.lease_s - silent_s
        if left_s > 0:
            self._reactor.call_later(max(left_s, messages.BEAT_S), self._check_controller)
        elif self._why_gone is None:
            why = f"no message from the host where meshrun was started for {silent_s:.0f} s"
            _print_error(why)
            self._lose_controller(why)

    def _receive(self) -> None:
        received = read_now(self._orders, _CHUNK)
        if received is None:
            return
        if not received:
            self._lose_controller()
            return
        self._received_ns = self._reactor.now_ns()
        *lines, self._line = (self._line + received).split(b"\n")
        for line in lines:
            self._handle(unpack(line, messages.ToAgent))

    def _handle(self, order: messages.ToAgent) -> None:
        match order:
            case messages.Listen():
                self._listen(order)
            case messages.StartLauncher() if self._phase is AgentPhase.WAITING:
                self._start(order)
            case messages.SignalLauncher() if self._launcher is not None:
                if order.even_if_joined or not self._has_joined():
                    send_signal(self._launcher.pid, order.signum)
            case messages.StopLauncher() if order.even_if_joined or not self._has_joined():
                self._end(order.why)

    def _lose_controller(self, why: str = "") -> None:
        if self._why_gone is None:
            self._why_gone = why
            self._reactor.remove(self._orders)
            self._end(why or "the connection to the host where meshrun was started was lost")

    def _stop(self) -> None:
        for signum in self._caught:
            if self._launcher is None:
                _print_error(f"it received {signal_name(signum)}")
            self._end("", signum)  # the launcher reports it as if it alone had received it
        self._caught.clear()

    def _end(self, why: str, signum: int = signal.SIGTERM) -> None:
        """Stop the launcher, which is silent if the controller reports why; without one, exit."""
        if self._launcher is None:
            self._phase = AgentPhase.OVER
        elif self._phase is AgentPhase.RUNNING:
            self._phase = AgentPhase.ENDING
            self._reactor.call_later(self._hello.grace_s + _AFTER_GRACE_S, self._launcher.kill)
            if why:
                with contextlib.suppress(OSError):
                    write_private(os.path.join(self._folder, WHY), why)
            send_signal(self._launcher.pid, signum)

    # ---- the launcher -----------------------------------------------------------------------

    def _listen(self, order: messages.Listen) -> None:
        """Bind the socket of the coordinator, which stays bound until the launcher inherits it."""
        own = [each for each in order.addresses if each and interface_of(each) is not None]
        outward = [each for each in own if not is_loopback(each)]
        address = (*outward, outward_address() or "", *own, "127.0.0.1")
        try:
            self._listener = listen_on(next(filter(None, address)), 0)
        except MeshrunError as error:
            hint = "pass --rdzv-endpoint HOST:PORT with an address of the first host"
            self._send(messages.AgentError(why=error.message, hint=hint))
            return
        bound, port = self._listener.getsockname()[:2]
        self._send(messages.Listening(address=bound, port=port))

    def _start(self, order: messages.StartLauncher) -> None:
        self._folder = self._holder.enter_context(private_folder())
        whole = {**without_own(os.environ), **order.env, **as_caller(self._folder)}
        passed: tuple[int, ...] = ()
        if order.listens and self._listener is not None:
            passed = (self._listener.fileno(),)
            whole[LISTENER] = str(self._listener.fileno())
        report = os.path.join(self._folder, REPORT)
        with interrupts_delayed():
            self._launcher = subprocess.Popen(
                own_command("launcher", f"--report={report}", *order.words),
                env=whole,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=passed,
            )
        self._phase = AgentPhase.RUNNING
        if self._listener is not None:
            self._listener.close()
        for kind, pipe in (
            (messages.OUT, self._launcher.stdout),
            (messages.ERR, self._launcher.stderr),
        ):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes[pipe.fileno()] = (kind, pipe)

    def _has_joined(self) -> bool:
        """Whether all nodes have joined, as far as the launcher knows."""
        return os.path.exists(os.path.join(self._folder, JOINED))

    def _forward(self, fd: int) -> bool:
        """Forward available output of a stream; return whether there was any."""
        kind, pipe = self._pipes[fd]
        data = read_now(fd, _CHUNK)
        if data:
            self._out.write(messages.frame(kind, data))
        elif data is not None:
            del self._pipes[fd]
            self._reactor.drop(pipe)
        return bool(data)

    def _finish(self) -> None:
        if self._launcher is not None:
            for fd in list(self._pipes):
                while self._forward(fd):
                    pass
            if (error := self._read(ERROR)) is not None:
                self._send(messages.LauncherError(text=error))
            if (report := self._read(REPORT)) is not None:
                self._send(messages.LauncherReport(text=report))
            code, has_joined = self._launcher.returncode, self._has_joined()
            self._holder.close()
            why = (self._why_gone or "") if code else ""
            self._send(messages.LauncherEnded(code=code, has_joined=has_joined, why=why))
        while self._out.queued_bytes and self._why_gone is None:
            self._turn()

    def _read(self, name: str) -> str | None:
        """Return what the launcher wrote to a file, ``None`` if it did not or another user did."""
        try:
            return read_private(os.path.join(self._folder, name)).decode()
        except OSError:
            return None

    def _send(self, message: messages.FromAgent) -> None:
        self._out.write(messages.frame(messages.MESSAGE, pack(message)))


def _describe_host() -> messages.Ready:
    """Return this machine's id and addresses, and the controller's address."""
    theirs, _, own, _ = (os.environ.get("SSH_CONNECTION", "") + "   ").split(" ")[:4]
    own = os.environ.pop(NODE_ADDRESS, "") or own
    machine = ""
    if booted := boot_id():
        with contextlib.suppress(OSError):  # a container acts as a machine of its own
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
            machine = " ".join([booted, *spaces, os.uname().nodename])
    return messages.Ready(own=own, theirs=theirs, machine=machine)


def _print_error(text: str) -> None:
    """Print why the agent exits, for ssh to forward if it can."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
