"""One host as the controller sees it: ssh, the agent behind it, and why a host cannot be used."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from msgspec import Struct

from meshrun.console.console import Console, RankStream
from meshrun.errors import NO_COMMAND, NOT_EXECUTABLE, MeshrunError, RendezvousError, UsageError
from meshrun.host.descriptors import WriteBuffer, read_now
from meshrun.host.network import own_addresses
from meshrun.host.printable import one_line
from meshrun.host.processes import die_with_parent
from meshrun.host.reactor import Reactor
from meshrun.plan.hostfile import Host
from meshrun.protocol.packing import pack, unpack
from meshrun.protocol.result import LaunchResult, signal_name
from meshrun.ssh import agent_messages as messages
from meshrun.ssh.host_phases import HostPhase
from meshrun.ssh.remote_command import BOOT_FOLDER, NO_STDIN, without_own

_LOCAL = ("localhost", "127.0.0.1", "::1")
_CHUNK = 64 * 1024
_MOST_OUTPUT = 16 * 1024
_SSH_ENDS_IN_S = 2.0
_SSH = 255
"""ssh's exit code for errors of its own."""
_MOST_LINES = 8
_WITHOUT_PASSWORD = "`ssh {host} true` must work without a password; use a key or an agent"  # noqa: S105
_HINTS = (
    (
        "HOST IDENTIFICATION HAS CHANGED",
        "if you know why its key is new, remove the old one with `ssh-keygen -R`, then run"
        " `ssh {host}` and accept the new one",
    ),
    ("host key", "run `ssh {host}` once, and check and accept its host key"),
    ("Host key", "run `ssh {host}` once, and check and accept its host key"),
    ("Permission denied", _WITHOUT_PASSWORD),
    ("Could not resolve", "check the name; `ssh -G {host}` shows how ssh resolves it"),
    (
        "Connection refused",
        "check that sshd runs there and on which port; `ssh -G {host}` shows the settings",
    ),
    ("timed out", "check that the host is up and reachable; test with `ssh {host} true`"),
    ("No route", "check that the host is up and reachable; test with `ssh {host} true`"),
    (NO_STDIN, "let ssh pass on its stdin: use neither its option -n nor its setting StdinNull"),
)


class HostSession:
    """A host and the command that connects to it.

    Args:
        starter: The name of the command, such as ``ssh``; ``""`` if it is the agent itself.
        reactor: Waits until more can be sent.
        console: Shows whole lines of its launcher's output.
    """

    def __init__(
        self,
        number: int,
        host: Host,
        command: Sequence[str],
        *,
        starter: str,
        reactor: Reactor,
        console: Console,
    ) -> None:
        self.number, self.host, self.starter = number, host, starter
        self.phase = HostPhase.CONNECTING
        self._reactor, self._console = reactor, console
        self._streams: dict[bytes, RankStream] = {}
        self.nonce = secrets.token_hex(16)
        self._frames = messages.FrameSplitter(self.nonce)
        own = os.getpid()
        self._process = subprocess.Popen(
            list(command),
            env=None if starter else without_own(os.environ),
            cwd=None if starter else BOOT_FOLDER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not end the connection
            preexec_fn=lambda: die_with_parent(own, signal.SIGTERM),  # noqa: PLW1509 - one thread
        )
        process: Any = self._process  # whose streams are not None
        self._stdin: IO[bytes] = process.stdin
        self._stdout: IO[bytes] = process.stdout
        self._stderr: IO[bytes] = process.stderr
        self.buffer = WriteBuffer(self._stdin.fileno(), reactor)
        self._pipes = {pipe.fileno(): pipe for pipe in (self._stdout, self._stderr)}
        for fd in self._pipes:
            os.set_blocking(fd, False)
        self._stderr_tail = bytearray()
        self.began = self.received = reactor.now_s()
        """Since when its agent's answer is awaited, and when the last data arrived."""
        self.ready: messages.Ready | None = None
        """What its agent has answered."""
        self.agent_error: messages.AgentError | None = None
        """Why its agent cannot serve, if it cannot."""
        self.endpoint: tuple[str, int] | None = None
        """Where its launcher will listen."""
        self.ended: messages.LauncherEnded | None = None
        """How its launcher ended."""
        self._protocol_error: str | None = None
        """Why the received data is not from an agent."""
        self.error: MeshrunError | None = None
        """Why its launcher could not launch, if it reported that."""
        self.result: LaunchResult | None = None
        """The result that its launcher reported, if it did."""

    @property
    def output(self) -> str:
        """The output of ssh, and of the shell and Python on the host, since the agent's answer.

        Before the answer it is all of it; what preceded one, such as a banner, is no reason to end.
        """
        return (self._frames.noise + self._stderr_tail).decode(errors="replace")

    @property
    def open_pipes(self) -> list[int]:
        """The descriptors that are still open for reading."""
        return list(self._pipes)

    @property
    def is_closed(self) -> bool:
        """Whether the agent's output has ended; other processes may still hold ssh's stderr."""
        return self._stdout.closed

    def finish(self) -> HostFailure:
        """End ssh, read the rest of its output, and return why there is no agent."""
        end_all([self])
        for fd in self.open_pipes:
            self.read(fd, shows=False)
        if self._protocol_error is not None:
            return HostFailure(self.host.name, self._protocol_error)
        code = self._process.returncode
        return explain_end(self.host, code, self.output, sys.executable, starter=self.starter)

    def ends_by(self, deadline: float) -> bool:
        """Wait until ssh exits or a deadline passes; return whether it exited."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, signum: int) -> None:
        """Send a signal to ssh and its children, as it may be a script that runs ssh."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signum)
            os.killpg(self._process.pid, signal.SIGCONT)  # a stopped process would not act on it

    def greet(self, hello: messages.Hello) -> None:
        """Send the agent its first line."""
        self.buffer.write(messages.format_hello(hello))

    def launch(self, order: messages.StartLauncher) -> None:
        """Have the agent start the launcher."""
        self.phase = HostPhase.LAUNCHED
        self.send(order)

    def send(self, message: messages.ToAgent) -> None:
        """Send the agent a message."""
        self.buffer.write(pack(message) + b"\n")

    def read(self, fd: int, *, shows: bool = True) -> None:
        """Read a descriptor, and show the launcher's output."""
        if fd not in self._pipes:
            return
        data = read_now(fd, _CHUNK)
        if data is None:
            return
        if not data:
            self._close(fd)
            return
        self.received = self._reactor.now_s()
        if self._pipes[fd] is not self._stdout:
            self._stderr_tail += data
            del self._stderr_tail[:-_MOST_OUTPUT]
            return
        try:
            for kind, content in self._frames.feed(data):
                if kind == messages.MESSAGE:
                    self._handle(unpack(content, messages.FromAgent))
                elif shows:
                    self._show(kind, content)
        except ValueError as error:
            self._protocol_error = f"invalid data from its agent: {one_line(str(error), 200)}"
            self._close(fd)

    def _show(self, kind: bytes, content: bytes) -> None:
        if kind not in self._streams:
            self._streams[kind] = self._console.stream(
                rank=self.number, prefix=b"", to_stderr=kind != messages.OUT
            )
        self._console.feed(self._streams[kind], content)

    def _close(self, fd: int) -> None:
        self._reactor.drop(self._pipes.pop(fd))

    def _handle(self, message: messages.FromAgent) -> None:
        from meshrun.report.result_json import parse_error_json, parse_result_json

        match message:
            case messages.Ready() if self.phase is HostPhase.CONNECTING:
                self.phase, self.ready = HostPhase.READY, message
                if not self._stderr.closed:
                    self.read(self._stderr.fileno())  # what preceded the answer
                self._frames.noise = b""
                self._stderr_tail.clear()
            case messages.AgentError():
                self.agent_error = message
            case messages.Listening(address=address, port=port):
                self.endpoint = address, port
            case messages.LauncherError(text=text):
                self.error = parse_error_json(text)
            case messages.LauncherReport(text=text):
                self.result = parse_result_json(text)
            case messages.LauncherEnded():
                self.ended = message

    def hang_up(self) -> None:
        """Close stdin, so that the agent stops its launcher."""
        self.phase = HostPhase.DONE
        if not self._stdin.closed:
            self.buffer.close()
            with contextlib.suppress(BrokenPipeError):
                self._stdin.close()

    def close(self) -> None:
        """End the connection at once, and show incomplete lines."""
        self.finish()
        for stream in self._streams.values():
            self._console.feed(stream, b"")
        self._streams.clear()
        for pipe in self._pipes.values():
            self._reactor.drop(pipe)
        self._pipes.clear()


def end_all(sessions: Sequence[HostSession]) -> None:
    """End some connections, all at the same time; agents close theirs by themselves if they can."""
    for session in sessions:
        if session.phase is HostPhase.CONNECTING and not session.is_closed:
            session.signal(signal.SIGTERM)  # no launcher runs there
        session.hang_up()
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _SSH_ENDS_IN_S
        for session in [each for each in sessions if not each.ends_by(deadline)]:
            session.signal(signum)
    for session in sessions:
        session.ends_by(float("inf"))


def check_distinct(hosts: Sequence[Host]) -> None:
    """Check that not two hosts are this very machine, which would be one node twice.

    Raises:
        UsageError: With their names.
    """
    here = [host.name for host in hosts if is_this_machine(host)]
    if len(here) > 1:
        raise same_machine(*here[:2])


def same_machine(host: str, other: str) -> UsageError:
    """Return the error for a machine that is listed under two names."""
    return UsageError(
        f"{host} and {other} are the same machine",
        hint=f"use {host}:8 to run 8 workers on it; to try two nodes on one machine, run meshrun"
        " --nnodes 2 --rdzv-endpoint HOST:PORT twice",
    )


def is_this_machine(host: Host) -> bool:
    """Return whether a host is this machine, which needs no ssh."""
    name, own = host.destination.lower(), os.uname().nodename.lower()
    if name in (*_LOCAL, own, own.partition(".")[0]):
        return True
    return not set(name) - set("0123456789abcdef.:") and name in own_addresses()


class HostLost(RendezvousError):
    """A host was lost during the launch."""


class FirstLost(HostLost):
    """The first host of an elastic launch was lost; the launch may restart without it."""


class HostFailure(Struct, frozen=True):
    """Why a host cannot be used."""

    host: str
    why: str
    hint: str | None = None


def explain_end(
    host: Host, code: int, output: str, interpreter: str, *, starter: str = "ssh"
) -> HostFailure:
    """Return why there is no agent after ssh, or another starter, has exited.

    ``output`` is that of the starter, and of the shell and Python on the host. ``starter`` is ""
    if the agent was started on this machine, without one.
    """
    lines, hint = _significant(output), ""
    if code in (NOT_EXECUTABLE, NO_COMMAND):
        why = f"it cannot run {interpreter}{_quoted(lines[-1:])}"
        hint = "the interpreter must have the same path on every host"
    elif missing := [line for line in lines if "No module named 'meshrun" in line]:
        why = f"{interpreter} there has no meshrun{_quoted(missing)}"
        hint = "install it there, or set PYTHONPATH to its location"
    elif code < 0:
        why = f"{starter or 'its agent'} was killed by {signal_name(-code)}"
    elif code == _SSH and not lines:
        why = f"{starter} failed without a message; the process it started may have been killed"
    else:
        ends = {0: "its agent exited", _SSH: f"{starter} failed"}
        end = ends.get(code, f"the process that {starter} started exited with code {code}")
        why = end + _quoted(lines[-_MOST_LINES:])
        if starter == "ssh":
            general = "test with `ssh {host} true`" if code else ""  # otherwise, that works too
            hint = next((hint for word, hint in _HINTS if word in output), general)
            hint = hint.format(host=host.destination)
    return HostFailure(host.name, why, hint or None)


def describe_silence(host: Host, timeout_s: float, output: str, *, starter: str) -> HostFailure:
    """Return the failure for a host that has not answered in time."""
    lines = _significant(output)[-_MOST_LINES:]
    hint = "--connect-timeout allows more time"
    if starter == "ssh":
        hint = f"test with `ssh {host.destination} true`; {hint}"
    if lines and lines[-1].endswith((":", "?")):
        hint = f"ssh asked for input: {_WITHOUT_PASSWORD.format(host=host.destination)}"
    return HostFailure(host.name, f"no answer within {timeout_s:g} s{_quoted(lines)}", hint)


def unusable_error(failures: Sequence[HostFailure], total: int, least: int) -> RendezvousError:
    """Return one error for all hosts that cannot be used, if ``least`` of ``total`` are needed."""
    first = failures[0]
    if len(failures) == 1 and least == total:
        return RendezvousError(f"host {first.host}: {first.why}", hint=first.hint)
    needed = "" if least == total else f", but {least} {'is' if least == 1 else 'are'} required"
    lines = [f"cannot use {len(failures)} of {total} hosts{needed}"]
    lines += [f"       {each.host}: {each.why}" for each in failures]
    return RendezvousError("\n".join(lines), hint=first.hint)


def lost_error(lost: Sequence[HostFailure], *, may_restart: bool) -> HostLost:
    """Return the error of a launch that lost hosts."""
    first = lost[0]
    others = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
    kind = FirstLost if may_restart else HostLost
    return kind(f"host {first.host} was lost: {first.why}{others}")


def _significant(output: str) -> list[str]:
    """Return the lines, sanitized, without decorations such as those around ssh's key warnings."""
    lines = (one_line(line.strip()) for line in output.splitlines())
    return [line for line in lines if line.strip("@ ")]


def _quoted(lines: Sequence[str]) -> str:
    return ": " + " / ".join(lines) if lines else ""
