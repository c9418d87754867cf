"""Ranks that keep running: one launch, and any number of calls on all of its ranks."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

from meshrun.api import child_launcher, launch, remote_call
from meshrun.api.exchange import (
    Exchange,
    GroupRank,
    TerminalOwner,
    describe_missing,
    describe_others,
)
from meshrun.errors import MeshrunError, UsageError
from meshrun.host.folder import private_folder, writing_to
from meshrun.host.own_variables import SERVE
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import reporting_shortages
from meshrun.layout.parameters import check_parameter, check_parameters
from meshrun.layout.spec import AnyMesh
from meshrun.plan.parse import parse_seconds
from meshrun.protocol.result import RankFailed
from meshrun.worker.call_channel import CallDone, Channel, accept, listen_in
from meshrun.worker.pickling import unpickle_error
from meshrun.worker.serve_calls import PROGRAM

_R = TypeVar("_R")
_STACKS_S, _QUIET_S = 10.0, 0.3
"""How long to wait for the ranks' stacks, and after how much silence they are complete."""
_SHUTDOWN_S = 5
_CLOSE_S = 10
_POLL_S = 0.05
"""How often to check whether the launcher has ended: not every system has a descriptor for that."""
_CALLER_FRAMES = ("meshrun/worker/", "pluggy/", "_pytest/")
"""Parts of frames that lead to a call or a test."""


class GroupLost(MeshrunError):
    """A call that not all ranks have finished; the group is closed."""


class WorkerGroup:
    """Workers with a mesh that keep running, and keep their state, until :meth:`close`.

    Args:
        mesh: As for :func:`meshrun.launch`, like the parameters below.
        names: Names of the dims.
        nproc_per_node: Number of workers.
        device: A torch device type, or ``auto``.
        preload: Modules to import once, before the ranks are forked.
        env: Variables for the ranks, in addition to those of this process.
        cwd: Their working directory.
        options: Command-line options without a parameter; all ranks are on this machine.
        stdout: Where the ranks' output goes; the current ``sys.stdout`` if ``None``.
        stderr: Where their errors go; the current ``sys.stderr`` if ``None``.

    Raises:
        MeshrunError: If the workers cannot be started.
    """

    def __init__(
        self,
        *,
        mesh: AnyMesh | None = None,
        names: launch.AnyText | None = None,
        nproc_per_node: int | str | None = None,
        device: str | None = None,
        preload: launch.AnyText = (),
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        options: launch.AnyWords = (),
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        serve: str = PROGRAM,
        program: Sequence[str] = (),
    ) -> None:
        check_parameters(WorkerGroup.__init__, locals())
        launch.check_cwd(cwd)
        parameters = {
            "mesh": mesh,
            "names": names,
            "nproc_per_node": nproc_per_node,
            "standalone": True,
            "device": device,
            "preload": preload,
            "shutdown_timeout": _SHUTDOWN_S,
            "hang_timeout": 0,  # ranks that wait for a call do nothing
            "max_restarts": 0,  # new ranks would lack the state of earlier calls
        }
        flags = launch.to_flags(parameters, options)
        self.members: tuple[GroupRank, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._stdout, self._stderr = (
            child_launcher.RankOutput("stdout", stdout),
            child_launcher.RankOutput("stderr", stderr),
        )
        self._sent = 0
        """The number of messages that the ranks were sent."""
        self._owner = os.getpid()
        self._turn = threading.RLock()
        """Held by the thread whose call is in progress."""
        self._calling_thread: int | None = None
        """The thread that waits for answers."""
        self._was_hung_up = False
        """Whether the group was closed during a call."""
        self._output: threading.Thread | None = None
        self._closing = contextlib.ExitStack()
        self._folder = self._closing.enter_context(private_folder())
        self._began_ns = time.monotonic_ns()
        started: Future[subprocess.Popen[bytes]] = Future()
        try:
            with reporting_shortages(), contextlib.ExitStack() as starting:
                with writing_to(self._folder):
                    remote_call.write_path(self._folder)
                    listener = starting.enter_context(listen_in(self._folder))
                command, environ = self._launcher(flags, program, serve, env or {})
                start = partial(
                    subprocess.Popen,
                    command,
                    env=environ,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
                self._output = threading.Thread(
                    target=_run_launcher,
                    args=[start, started, (self._stdout, self._stderr), self._closing],
                    daemon=True,
                )
                self._output.start()
                self._process = started.result()
                self._accept(listener)
        except BaseException:
            if not started.cancel() and started.exception() is None:
                self._process = started.result()
            self._stderr.keep()  # the launcher would report a signal that the user did not send
            self._end(0.0)
            raise

    # ---- calls -----------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., _R],
        /,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[_R]:
        """Call a function on all ranks; return what each returned, in rank order.

        Args:
            function: As for :func:`meshrun.launch`.
            *args: Its arguments.
            timeout: How many seconds to wait; ``None`` for no limit.
            **kwargs: Its keyword arguments.

        Raises:
            Exception: What the first rank raised. The group stays open if all ranks have finished.
            GroupLost: If a rank did not finish; the message has its stack.
            KeyboardInterrupt: If the call was interrupted, and with it the ranks.
            MeshrunError: If the first rank raised ``SystemExit`` with exit code 0.
        """
        check_parameter("timeout", timeout, float | None)
        timeout_s = None if timeout is None else parse_seconds(str(timeout), "timeout")
        try:
            return self.make_call(function, args, kwargs, timeout_s=timeout_s)
        except SystemExit as error:
            if error.code:
                raise
            # It must not end this process.
            raise remote_call.exited_early("a rank") from error.__cause__

    def make_call(
        self,
        function: Callable[..., _R],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout_s: float | None = None,
    ) -> list[_R]:
        """Call a function as :meth:`call` does, for a caller that exits as its ranks do.

        Raises:
            SystemExit: If a rank raised it, as for any other exception.
        """
        message = remote_call.pickle_call(function, args, kwargs)
        with self._own_turn():
            try:
                answers = self.exchange(message, timeout_s=timeout_s)
            finally:
                if self.members:
                    self._stdout.wait_for(self._sent)
                    self._stderr.wait_for(self._sent)
        if self._was_hung_up and answers.missing:
            raise GroupLost("these workers were closed during the call")
        if answers.is_rank_gone and answers.trouble is not None:
            raise answers.trouble  # the other ranks' errors are about lost connections
        done: CallDone
        for member, done in answers.by_member.items():
            if done.has_failed:
                description = "\n".join(
                    [
                        f"{member.label}, pid {member.pid}:\n{done.traceback.rstrip()}",
                        *describe_others(answers, member),
                        *describe_missing(answers),
                    ]
                )
                kind = GroupLost if answers.missing else MeshrunError
                copy = unpickle_error(done.error) or kind(f"{member.label} raised {done.headline}")
                raise copy from remote_call.RankTraceback(description)
        if answers.missing:
            raise GroupLost("\n".join(describe_missing(answers)))
        values = {member.rank: done.value for member, done in answers.by_member.items()}
        return [remote_call.load_value(io.BytesIO(values[rank]), rank) for rank in sorted(values)]

    def exchange(
        self,
        message: object,
        *,
        timeout_s: float | None = None,
        terminal: TerminalOwner | None = None,
    ) -> Exchange:
        """Send a message to all ranks and collect their answers; close the group if one is missing.

        Args:
            message: A message for the module that the ranks ``serve``.
            timeout_s: How long to wait.
            terminal: As for :class:`Exchange`.

        Raises:
            GroupLost: If the group is closed.
        """
        with self._own_turn():
            if not self.members:
                raise GroupLost("these workers were closed", hint="start a new group")
            return self._exchange(message, timeout_s, terminal or TerminalOwner())

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Wait for the calls of other threads."""
        if os.getpid() != self._owner:  # first: in a fork, nobody may be left to release the lock
            raise GroupLost(f"these workers belong to process {self._owner}, not to its fork")
        with self._turn:
            if self._calling_thread is not None:
                raise UsageError(
                    "a signal handler called these workers during another call of its thread",
                    hint="make the call after the other one, or in a separate thread",
                )
            yield

    def _exchange(
        self, message: object, timeout_s: float | None, terminal: TerminalOwner
    ) -> Exchange:
        self._calling_thread = threading.get_ident()
        raised: BaseException = KeyboardInterrupt()
        try:
            with Reactor() as reactor:
                exchange = Exchange(self.members, reactor, terminal)
                with child_launcher.signals_deferred(reactor, exchange.interrupt):
                    exchange.send(message, timeout_s)
                    self._sent += 1
                    while not exchange.is_done:
                        try:
                            reactor.run_until(lambda: exchange.is_done)
                        except BaseException as error:  # from the program's signal handler
                            raised = error
                            exchange.interrupt()
        finally:
            self._calling_thread = None
        if exchange.missing:
            try:
                if exchange.is_interrupted:
                    self._stderr.keep()  # the launcher would report a signal, which no user sent
                if not exchange.is_rank_gone:
                    exchange.stacks = self._collect_stacks()
            finally:
                may_end = exchange.is_rank_gone and not exchange.is_interrupted
                exchange.trouble = self._end(_CLOSE_S if may_end else 0.0)
            if exchange.is_interrupted:
                raise raised from GroupLost("\n".join(describe_missing(exchange)))
        elif exchange.is_interrupted:
            raise raised
        return exchange

    # ---- the launch ------------------------------------------------------------------------

    @property
    def labels(self) -> list[str]:
        """The coordinate of each rank, such as ``dp0 tp1``; empty once the group is closed."""
        return [member.label for member in self.members]

    @property
    def is_open(self) -> bool:
        """Whether there are ranks to call."""
        return bool(self.members)

    def print_stacks(self) -> None:
        """Make the launcher print the stacks of its ranks."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)

    def close(self) -> None:
        """End the ranks, and wait until no process of theirs is left.

        A call in progress in another thread raises :class:`GroupLost`.

        Raises:
            RankFailed: If a rank failed while it exited.
            GroupLost: If they did not exit within 10 seconds, and were stopped.
        """
        trouble = self.end(_CLOSE_S)
        if trouble is not None:
            raise trouble

    def end(self, timeout_s: float | None = _CLOSE_S) -> MeshrunError | None:
        """End the ranks as :meth:`close` does, and return what it would raise."""
        if os.getpid() != self._owner:
            return None
        if self._calling_thread is not None:
            self._was_hung_up = True
            for member in self.members:
                member.channel.hang_up()
            # In a signal handler during a call, which closes the group.
            if self._calling_thread == threading.get_ident():
                return None
        with self._turn:
            late = GroupLost(f"the ranks were stopped, as they did not exit within {timeout_s} s")
            return self._end(timeout_s, late)

    def __enter__(self) -> WorkerGroup:
        """Return the group, to be closed at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close it; an exception of the block comes before one of its ranks' end."""
        trouble = self.end()
        if trouble is not None and kind is None:
            raise trouble

    def _launcher(
        self, flags: list[str], program: Sequence[str], serve: str, env: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        from meshrun.cli.options import HOSTS, KINDS_OF_PROGRAM, RENDEZVOUS, SUBMIT, Options

        # These variables describe the job that this process is part of.
        job_panels = (HOSTS, RENDEZVOUS, SUBMIT)
        unread = {Options.nnodes, *(row for row in Options.rows() if row.panel in job_panels)}
        words, own = [*program], {SERVE: self._folder}
        if not program:
            unread |= {*KINDS_OF_PROGRAM}
            words, own = [PROGRAM, self._folder, serve], {}
            flags = [*flags, "--module"]
        command, variables = launch.launcher_command(self._folder, flags, words)
        inherited = launch.without_variables(unread, {**os.environ, **env})
        return command, {**inherited, **variables, **own}

    def _accept(self, listener: socket.socket) -> None:
        """Wait until every rank has connected; raise MeshrunError if the launch ends first."""
        process, found, world_size = self._process, dict[int, GroupRank](), 1
        assert process is not None  # noqa: S101 - just started
        with Reactor() as reactor:

            def accept_rank() -> None:
                channel = accept(listener)
                if channel is not None:
                    reactor.add_reader(channel, partial(meet, channel))

            def meet(channel: Channel) -> None:
                nonlocal world_size
                try:
                    message = channel.receive_now()
                except EOFError:  # the launch fails
                    reactor.drop(channel)
                    return
                if message is not None:
                    reactor.remove(channel)
                    rank, world_size, pid, label = message
                    found[rank] = GroupRank(rank, pid, label, channel)

            reactor.add_reader(listener, accept_rank)
            reactor.every(_POLL_S, lambda: None)
            reactor.run_until(lambda: len(found) == world_size or process.poll() is not None)
        self.members = tuple(found[rank] for rank in sorted(found))
        if len(found) < world_size:
            raise self._end(_CLOSE_S) or remote_call.no_rank_started("there is none to call")

    def _end(
        self, timeout_s: float | None, late: MeshrunError | None = None
    ) -> MeshrunError | None:
        """Let the ranks exit, or stop them after a time; return how the launch has failed.

        Args:
            timeout_s: How long they may take; ``None`` for no limit.
            late: What to return if they took longer.
        """
        for member in self.members:
            member.channel.hang_up()  # a fork of this process may have it open
            member.channel.close()
        process, self.members = self._process, ()
        with self._closing:
            if process is None:
                return None
            try:
                process.wait(timeout_s)
            except BaseException as error:
                child_launcher.stop_launcher(process, _SHUTDOWN_S + _CLOSE_S)
                self._finish_output(process, _CLOSE_S)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return late
            trouble = self._trouble(process.returncode)
            self._finish_output(process, None)
            return trouble

    def _finish_output(self, process: subprocess.Popen[bytes], timeout_s: float | None) -> None:
        """Pass on the remaining output of a launcher that has ended, and release it."""
        if self._output is not None:
            self._output.join(timeout_s)
        self._stdout.close()
        self._stderr.close()
        child_launcher.end_launcher(process)
        self._process = None

    def _trouble(self, code: int) -> MeshrunError | None:
        try:
            result = launch.read_result(self._folder, code, began_ns=self._began_ns)
        except MeshrunError as error:
            return error
        if not result.exit_code:
            return None
        trouble = result.trouble or RankFailed(result)
        trouble.is_reported_elsewhere = bool(result.best_steps)  # unless the launcher was killed
        return trouble

    def _collect_stacks(self) -> str:
        """Return the stacks of the ranks that are in a call, as the launcher reports them."""
        self._stderr.keep()
        self.print_stacks()
        lines = self._stderr.wait_for_silence(_QUIET_S, most_s=_STACKS_S).splitlines()
        return "\n".join(_stacks_of_calls(lines[1:]))


def _run_launcher(
    start: Callable[[], subprocess.Popen[bytes]],
    started: Future[subprocess.Popen[bytes]],
    streams: Sequence[child_launcher.RankOutput],
    folder: object,
) -> None:
    """Start a launcher, and pass on its output until its end.

    In a thread of its own: a launcher is stopped when the thread that started it ends, which
    the caller's may do while the group is in use; and no signal handler can raise an exception
    here, after the fork but before the process is known. This thread does not refer to the group:
    one that is no longer in use is freed, which closes the channels, and the ranks end.

    Args:
        start: Starts the launcher.
        started: Receives its process.
        streams: Take its output and its errors.
        folder: The owner of its folder, which is thus kept until the launcher has ended.
    """
    if not started.set_running_or_notify_cancel():
        return
    try:
        process = start()
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(process)
    pipes = zip((process.stdout, process.stderr), streams, strict=True)
    with process:
        child_launcher.copy_output([(pipe, stream) for pipe, stream in pipes if pipe is not None])
    del folder


def _stacks_of_calls(lines: Iterable[str]) -> Iterator[str]:
    """Drop ranks that wait for the next call, and the frames that lead to the user's function."""
    is_idle = is_above = False
    for line in lines:
        if not line.startswith(" "):
            is_idle, is_above = ": between calls" in line, True
        elif is_above and any(part in line for part in _CALLER_FRAMES):
            continue
        else:
            is_above = False
        if not is_idle:
            yield line
