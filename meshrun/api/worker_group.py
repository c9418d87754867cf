"""Ranks that stay: one launch, and any number of calls that all of its ranks make."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from meshrun.api.answers import (
    Answers,
    Asking,
    Member,
    describe_missing,
    describe_others,
    has_raised,
    interrupts_of,
)
from meshrun.api.child_launcher import copy_output, end_launcher
from meshrun.api.launch import (
    AnyText,
    AnyWords,
    check_folder,
    launcher_command,
    mesh_options,
    read_result,
    to_flags,
    without_variables,
)
from meshrun.api.lent_terminal import Lender
from meshrun.api.rank_output import RankOutput
from meshrun.api.remote_call import (
    RankTraceback,
    exited_early,
    load_value,
    pickle_call,
    write_path,
)
from meshrun.errors import MeshrunError, UsageError
from meshrun.host.leftovers import private_folder, writing_to
from meshrun.host.reactor import Reactor
from meshrun.layout.parameters import check_parameter, check_parameters
from meshrun.layout.spec import AnyMesh
from meshrun.protocol.result import RankFailed
from meshrun.worker.call_channel import accept, listen_in
from meshrun.worker.error_copy import unpickle_error
from meshrun.worker.serve_calls import SERVE

if TYPE_CHECKING:
    from meshrun.cli.option import Option

_R = TypeVar("_R")
_STACKS_S, _QUIET_S = 10.0, 0.3
"""How long the launcher may take to say where ranks are, and when it has."""
_SHUTDOWN_S = 5
_CLOSE_S = 10.0
_LOOK_S = 0.05
_ABOVE = ("<frozen runpy>", "meshrun/worker/", "pluggy/", "_pytest/")
"""In the frames above a call or a test."""


class GroupLost(MeshrunError):
    """A call that not all ranks have finished; the group is closed."""


class WorkerGroup:
    """Workers that stay until :meth:`close`, with their mesh; calls find what earlier ones left.

    Args:
        mesh: As of :func:`meshrun.launch`, like all that follows.
        names: Names of the dims.
        nproc_per_node: How many workers.
        device: A torch device type, or ``auto``.
        preload: Modules to import once, before the ranks are forked.
        env: Variables for the ranks, in addition to those of this process.
        cwd: Their working directory.
        options: Command-line options without a parameter; all ranks are on this machine.
        stdout: Where the ranks' output goes; ``sys.stdout`` at that time if ``None``.
        stderr: The same.

    Raises:
        MeshrunError: If they cannot be started.
    """

    def __init__(
        self,
        *,
        mesh: AnyMesh | None = None,
        names: AnyText | None = None,
        nproc_per_node: int | str | None = None,
        device: str | None = None,
        preload: AnyText = (),
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        options: AnyWords = (),
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        serve: str = "meshrun.worker.serve_calls",
        program: Sequence[str] = (),
    ) -> None:
        check_parameters(WorkerGroup.__init__, locals())
        check_folder(cwd)
        from meshrun.cli.options import HOSTS, KINDS_OF_PROGRAM, RENDEZVOUS, SUBMIT, Options

        given: dict[Option[Any], object] = {
            **mesh_options(mesh, names),
            Options.nproc_per_node: nproc_per_node,
            Options.device: device,
            Options.shutdown_timeout: _SHUTDOWN_S,
            Options.hang_timeout: 0,  # ranks that wait for a call do nothing
            Options.max_restarts: 0,  # others would not have what earlier calls left
        }
        flags = [f"{Options.nnodes.flag}=1", *to_flags(given, {Options.preload: preload}, options)]
        # Such variables mean the job that this process is part of.
        of_a_job = (HOSTS, RENDEZVOUS, SUBMIT)
        unread = {Options.nnodes, *(row for row in Options.rows() if row.panel in of_a_job)}
        self.members: tuple[Member, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._printed, self._said = RankOutput("stdout", stdout), RankOutput("stderr", stderr)
        self._calls = 0
        self._turn, self._owner = threading.RLock(), os.getpid()
        """Held by the thread whose call is under way."""
        self._asks_in: int | None = None
        """The thread that waits for answers."""
        self._was_hung_up = False
        """Whether the group was closed meanwhile."""
        self._output: threading.Thread | None = None
        self._closing = contextlib.ExitStack()
        self._folder = self._closing.enter_context(private_folder())
        self._began_ns = time.monotonic_ns()
        try:
            with writing_to(self._folder):
                write_path(self._folder)
                listener = self._closing.enter_context(listen_in(self._folder))
            words, own = [*program], {SERVE: self._folder}
            if not program:
                unread |= {*KINDS_OF_PROGRAM}
                flags.append("--module")
                words, own = ["meshrun.worker.serve_calls", self._folder, serve], {}
            command, more = launcher_command(self._folder, flags, words)
            self._process = subprocess.Popen(
                command,
                env={**without_variables(unread, {**os.environ, **(env or {})}), **more, **own},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert self._process.stdout is not None  # noqa: S101 - as asked for
            assert self._process.stderr is not None  # noqa: S101
            streams = [
                (self._process.stdout, self._printed),
                (self._process.stderr, self._said),
            ]
            output = threading.Thread(target=copy_output, args=[streams], daemon=True)
            output.start()
            self._output = output
            self._accept(listener)
        except BaseException:
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
        """Have all ranks call a function; return what each returned, in rank order.

        Args:
            function: As of :func:`meshrun.launch`.
            *args: Its arguments.
            timeout: Seconds until the ranks are given up; ``None`` waits for as long as they take.
            **kwargs: Its keyword arguments.

        Raises:
            Exception: What the first rank raised. The group stays if all ranks have finished.
            GroupLost: If a rank did not finish; the message says where it is.
            KeyboardInterrupt: If it was interrupted; the ranks were, too.
            MeshrunError: If the first rank raised ``SystemExit`` with exit code 0.
        """
        check_parameter("timeout", timeout, float | None)
        try:
            return self.make_call(function, args, kwargs, timeout_s=timeout)
        except SystemExit as error:
            if error.code:
                raise
            raise exited_early("a rank") from error.__cause__  # a success of theirs is none of ours

    def make_call(
        self,
        function: Callable[..., _R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        timeout_s: float | None = None,
    ) -> list[_R]:
        """As :meth:`call`, for a caller that ends as its ranks do.

        Raises:
            SystemExit: As all that a rank raises.
        """
        message = pickle_call(function, args, kwargs)
        with self._turn:
            number, self._calls = self._calls, self._calls + 1  # one that is interrupted counts too
            try:
                answers = self.exchange(
                    message, timeout_s=timeout_s, failed=has_raised, takes=Lender().takes
                )
            finally:
                if self.members:
                    self._printed.wait_for(number)
                    self._said.wait_for(number)
        if self._was_hung_up and answers.missing:
            raise GroupLost("these workers were closed during the call")
        if answers.is_rank_gone and answers.trouble is not None:
            raise answers.trouble  # others' errors are those of lost connections
        for member, (value, text, error, headline) in answers.of.items():
            if value is None:
                told = "\n".join(
                    [
                        f"{member.label}, pid {member.pid}:\n{text.rstrip()}",
                        *describe_others(answers, member),
                        *describe_missing(answers),
                    ]
                )
                kind = GroupLost if answers.missing else MeshrunError
                copy = unpickle_error(error) or kind(f"{member.label} raised {headline}")
                raise copy from RankTraceback(told)
        if answers.missing:
            raise GroupLost("\n".join(describe_missing(answers)))
        values = {member.rank: value for member, (value, *_) in answers.of.items()}
        return [load_value(io.BytesIO(values[rank]), rank) for rank in sorted(values)]

    def exchange(
        self,
        message: bytes,
        *,
        timeout_s: float | None = None,
        failed: Callable[[Any], bool] = lambda _: False,
        takes: Callable[[Member, Any], bool] = lambda *_: False,
    ) -> Answers:
        """Send a message to all ranks and collect an answer of each; close if one is missing.

        Args:
            message: What their ``serve`` understands.
            timeout_s: How long to wait.
            failed: Whether an answer means that others may wait for that rank in vain.
            takes: Called with what comes; takes what is no answer yet, and replies. That time does
                not count.

        Raises:
            GroupLost: If the group is closed.
        """
        if os.getpid() != self._owner:
            raise GroupLost(f"these workers are those of process {self._owner}, not of its fork")
        with self._turn:
            return self._exchange(message, timeout_s, failed, takes)

    def _exchange(
        self,
        message: bytes,
        timeout_s: float | None,
        failed: Callable[[Any], bool],
        takes: Callable[[Member, Any], bool],
    ) -> Answers:
        if not self.members:
            raise GroupLost("these workers were closed", hint="start a new group")
        self._asks_in = threading.get_ident()
        raised: BaseException = KeyboardInterrupt()
        try:
            with Reactor() as reactor:
                asking = Asking(self.members, reactor, failed, takes)
                with interrupts_of(reactor, asking.interrupt):
                    try:
                        asking.send(message, timeout_s)
                        reactor.run_until(lambda: asking.is_done)
                    except BaseException as error:  # of a signal's handler, the program's own
                        raised = error
                        asking.interrupt()
                        reactor.run_until(lambda: asking.is_done)
        finally:
            self._asks_in = None
        if asking.is_interrupted:
            if asking.left:
                self._said.keep()  # not that they are stopped, by a signal that nobody sent
                self._end(0.0)
            raise raised
        answers = asking.answers
        if answers.missing:
            if not answers.is_rank_gone:
                answers.stacks = self._ask_where()
            answers.trouble = self._end(_CLOSE_S if answers.is_rank_gone else 0.0)
        return answers

    # ---- the launch ------------------------------------------------------------------------

    @property
    def labels(self) -> list[str]:
        """The coordinate of each rank, such as ``dp0 tp1``; empty once the group is closed."""
        return [member.label for member in self.members]

    @property
    def is_open(self) -> bool:
        """Whether there are ranks to call."""
        return bool(self.members)

    def show_where(self) -> None:
        """Have the launcher say where its ranks are."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)

    def close(self) -> None:
        """Have the ranks exit, and wait until nothing of them is left.

        A call that is under way in another thread raises :class:`GroupLost`.
        """
        if os.getpid() != self._owner:
            return
        if self._asks_in is not None:
            self._was_hung_up = True
            for member in self.members:
                member.channel.hang_up()
            if self._asks_in == threading.get_ident():  # a handler of a signal; the call closes it
                return
        with self._turn:
            self._end(_CLOSE_S)

    def __enter__(self) -> WorkerGroup:
        """Return the group, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        """Wait until every rank has connected.

        Raises:
            MeshrunError: If the launch ends before.
        """
        process, found, world_size = self._process, dict[int, Member](), 1
        assert process is not None  # noqa: S101 - it was just started
        with Reactor() as reactor:

            def hear() -> None:
                nonlocal world_size
                channel = accept(listener)
                if channel is not None:
                    rank, world_size, pid, label = pickle.loads(channel.receive())  # noqa: S301
                    found[rank] = Member(rank, pid, label, channel)

            reactor.add_reader(listener, hear)
            reactor.every(_LOOK_S, lambda: None)
            reactor.run_until(lambda: len(found) == world_size or process.poll() is not None)
        self.members = tuple(found[rank] for rank in sorted(found))
        if len(found) < world_size:
            raise self._end(_CLOSE_S) or UsageError(
                "no rank was started, so there are none to call",
                hint="remove the option that starts nothing, such as --dry-run",
            )

    def _end(self, grace_s: float) -> MeshrunError | None:
        """Let the ranks exit, or stop them after a while; return how the launch had failed."""
        for member in self.members:
            member.channel.close()
        process, self.members = self._process, ()
        with self._closing:
            if process is None:
                return None
            try:
                process.wait(grace_s)
            except BaseException as error:
                _stop(process)
                self._let_go(process, _CLOSE_S)  # who is impatient wants nothing left all the same
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return None
            trouble = self._trouble(process.returncode)
            self._let_go(process, None)
            return trouble

    def _let_go(self, process: subprocess.Popen[bytes], within_s: float | None) -> None:
        """Bring out what is left of the output of a launcher that has ended, and forget it."""
        if self._output is not None:
            self._output.join(within_s)
        self._printed.close()
        self._said.close()
        end_launcher(process)
        self._process = None

    def _trouble(self, code: int) -> MeshrunError | None:
        try:
            result = read_result(self._folder, code, began_ns=self._began_ns)
        except MeshrunError as error:
            return error
        return (result.trouble or RankFailed(result)) if result.exit_code else None

    def _ask_where(self) -> str:
        """Return what the launcher says about where its ranks are; it is not printed."""
        self._said.keep()
        last = ""
        deadline = time.monotonic() + _STACKS_S
        self.show_where()
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            if last and self._said.kept == last:
                break
            last = self._said.kept
        return "\n".join(_where_calls_are(last.splitlines()[1:]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Have a launcher end its ranks and itself; one that does not, because it is stopped, dies."""
    process.terminate()
    try:
        process.wait(_SHUTDOWN_S + _CLOSE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


def _where_calls_are(lines: Iterable[str]) -> Iterator[str]:
    """Leave out ranks that wait for the next call, and the frames that lead to the caller's own."""
    is_idle = is_above = False
    for line in lines:
        if not line.startswith(" "):
            is_idle, is_above = "meshrun/worker/call_channel.py" in line, True
        elif is_above and any(part in line for part in _ABOVE):
            continue
        else:
            is_above = False
        if not is_idle:
            yield line
