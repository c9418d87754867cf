"""Starts one launcher on each node of this shell's or batch script's allocation with srun."""

from __future__ import annotations

import enum
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import IO, Any

from meshrun.cluster.read_variables import read_number
from meshrun.console.outlet import Outlet, is_reader_gone
from meshrun.errors import HostError, NodeLostError, UsageError
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.memory import MemoryWatch
from meshrun.host.processes import die_with_parent
from meshrun.host.reactor import Reactor
from meshrun.host.stderr import note
from meshrun.plan.plan import check_elsewhere
from meshrun.plan.rank_env import SECRET_VARIABLES
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.result import signal_name
from meshrun.protocol.step_end import STEP, StepEnds
from meshrun.start import own_command
from meshrun.submit.slurm_options import end_options
from meshrun.supervisor.program_file import check_program
from meshrun.supervisor.signals import SignalQueue

_ANSWER_TAKES_S = 10.0
"""How long Slurm may take to pass on a signal; a busy controller takes seconds."""
_NOTE_AFTER_S = 5.0
"""How long after the first launcher's end to print a note if srun still runs."""
_OTHERS_TAKE_S = 60.0
"""The least time that the other launchers get to end."""
_MARGIN_S = 30.0
"""How long launchers may take beyond the time that their ranks have to exit."""
_PATIENCE_S = 2.0
"""The age from which the next Ctrl-C does not wait for a command of Slurm's."""
_GONE = (b"Invalid job id", b"already complet")
"""Parts of Slurm's errors about a job or a step that has ended."""
_ENDING = "COMPLETING"
"""The state of a job that has ended or been cancelled, while processes of it may still run."""
_MOST_INTERRUPTS = 3
"""On the third, launchers kill their ranks."""
_Commands = Generator[list[str], Any, None]
_READ_BYTES = 1 << 16
_OTHER_STDERR = ("SLURM_STDERRMODE", "SLURM_STDOUTMODE", "SLURM_UNBUFFEREDIO")
"""Variables that make srun write the tasks' stderr to a file, or to stdout."""


def launch_on_nodes(request: LaunchRequest, words: Sequence[str], *, job: str) -> int:
    """Run this command line on each node, as one step of the job; return its exit code.

    ``words`` is the command line after ``meshrun``, and ``job`` the Slurm job of this shell.

    Raises:
        UsageError: If the request is invalid; nothing was started.
    """
    nnodes = request.nnodes or 1
    nodes = _node_options(nnodes)
    # Mistakes that are visible here are reported once, rather than on every node.
    check_program(request.program)
    check_elsewhere(request, UNKNOWN_HOST)
    note(f"Slurm, job {job}: starting a launcher on each of {nnodes} nodes with srun")
    # The step may use everything that the job has on each node: otherwise, some clusters bind a
    # task to one core. What the job specifies about its tasks concerns other steps.
    name = f"meshrun-{secrets.token_hex(4)}"
    srun = [
        *("srun", f"--job-name={name}", *nodes),
        *("--ntasks-per-node=1", "--cpu-bind=none", "--export=ALL"),
        "--disable-status",  # so that srun passes on the first SIGINT
        *end_options(is_elastic=request.rendezvous.least_nodes is not None),
    ]
    signals = SignalQueue(
        request.stop_signals,
        even_if_ignored=request.stop_even_if_ignored,
        always=(signal.SIGQUIT, signal.SIGCHLD, *request.forwarded_signals),
    )
    own_pid = os.getpid()
    # Launchers report their end on stderr, unless that goes elsewhere.
    reports_end = not any(map(os.environ.get, _OTHER_STDERR))
    with subprocess.Popen(
        [*srun, *own_command("launcher", *words)],
        env={**_environment(), **({STEP: name} if reports_end else {})},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE if reports_end else None,
        start_new_session=True,  # so that Ctrl-C reaches only this process
        preexec_fn=lambda: die_with_parent(own_pid, signal.SIGTERM),  # noqa: PLW1509 - one thread
    ) as process:
        code = _Step(request, process, job=job, name=name, signals=signals).run()
    signals.restore()
    return code


class _Step:
    """A running srun, and the signals on their way to its launchers."""

    def __init__(
        self,
        request: LaunchRequest,
        srun: subprocess.Popen[bytes],
        *,
        job: str,
        name: str,
        signals: SignalQueue,
    ) -> None:
        self._request, self._srun, self._job, self._name = request, srun, job, name
        self._signals = signals
        self._waiting: deque[int] = deque()
        """Signals to pass on after the current one."""
        self._signum = 0
        """The signal that is being passed on."""
        self._commands: _Commands | None = None
        """The commands that pass it on."""
        self._command: _Command | None = None
        """The one that is running."""
        self._reactor = Reactor()
        self._late = self._reactor.call_at(None, self._pass_on_without_slurm)
        self._ends = StepEnds(name)
        self._errors: _Errors | None = None
        if srun.stderr is not None:
            self._errors = _Errors(srun.stderr, self._ends, self._reactor)
        self._interrupts = 0
        self._force = _Force.ASK_SLURM
        self._stopped_by = 0
        self._overdue = self._reactor.call_at(None, self._on_overdue)
        self._has_noted_wait = False
        # Other nodes may notice the end only after the node timeout, and their ranks then save.
        slowest_s = request.node_timeout_s + request.shutdown_timeout_s + _MARGIN_S
        self._others_take_s = max(_OTHERS_TAKE_S, slowest_s)
        self._memory = MemoryWatch()

    def run(self) -> int:
        """Wait for the end of srun; return the exit code of the launch."""
        with self._reactor:
            self._reactor.add_reader(self._signals, self._on_signals)
            self._reactor.each_turn(self._check_for_end)
            self._reactor.run_until(
                lambda: self._srun.poll() is not None or self._force is _Force.LEAVE
            )
            self._drop_command()
            if (errors := self._errors) is not None:
                self._reactor.run_until(lambda: self._force is _Force.LEAVE or errors.is_done())
        is_forced = self._force in (_Force.END_SRUN, _Force.LEAVE)
        if self._force is _Force.LEAVE:
            self._srun.kill()
        code = self._srun.wait()
        if is_forced and not self._ends.is_over:  # srun may exit with 0 though it has lost tasks
            return 128 + self._stopped_by
        if code < 0 and not self._ends.is_over:
            raise self._killed(-code)
        if self._errors is None:
            return code
        reported = self._ends.code(max(code, 0))
        if reported is None and not self._errors.is_cut:
            raise NodeLostError(
                "srun exited with 0, but no launcher has reported the end of the launch",
                hint=f"`scontrol show job {self._job}` may show which node was lost",
            )
        return code if reported is None else reported

    def _killed(self, signum: int) -> HostError:
        """Return the error for a srun that was killed, which ends the launch."""
        reason = self._memory.why_killed() if signum == signal.SIGKILL else None
        return HostError(
            f"srun was killed by {signal_name(signum)} on this host"
            f"{f': {reason}' if reason else ''}; the launch ends with it",
            hint=f"`squeue --steps --jobs={self._job}` shows step {self._name} while launchers run",
            exit_code=128 + signum,
        )

    def _check_for_end(self) -> None:
        if self._ends.is_over and not (self._overdue.is_pending or self._has_noted_wait):
            self._overdue.restart(_NOTE_AFTER_S)

    def _on_overdue(self) -> None:
        """Note, and later end, a srun that still runs though a launcher has ended.

        Ranks of other nodes may be saving, or srun may wait for tasks that it has lost.
        """
        if not self._has_noted_wait:
            self._has_noted_wait = True
            wait = f"waiting up to {self._others_take_s:g} s for those of other nodes"
            note(f"a launcher has ended; {wait}; Ctrl-C makes srun kill them")
            self._overdue.restart(self._others_take_s - _NOTE_AFTER_S)
        elif self._force is not _Force.END_SRUN:
            self._end_srun("srun has not exited")
            self._overdue.restart(_OTHERS_TAKE_S)
        else:
            self._leave("srun has not exited")

    def _end_srun(self, reason: str) -> None:
        self._force = _Force.END_SRUN
        note(f"{reason}: making srun kill the launchers; press Ctrl-C again to leave now")
        self._srun.terminate()

    def _leave(self, reason: str) -> None:
        self._force = _Force.LEAVE
        note(
            f"{reason}: leaving without confirmation that the launchers have exited;"
            f" `squeue --steps --jobs={self._job}` shows step {self._name} while they run"
        )

    def _on_signals(self) -> None:
        for signum in self._signals.take():
            if signum == signal.SIGCHLD:
                if self._command is not None and self._command.process.poll() is not None:
                    self._on_output(self._command.output())
            elif signum in self._request.stop_signals and signum != signal.SIGTERM:
                self._stop(signum)
            elif signum not in (self._signum, *self._waiting):
                self._waiting.append(signum)
                self._pass_next()

    def _stop(self, signum: int) -> None:
        """Pass on a stop signal, with more force each time that the last one had no effect.

        On the third, launchers kill their ranks. SIGTERM is left out, as Slurm repeats it.
        """
        self._interrupts += 1
        self._stopped_by = signum
        again = signal_name(signum) + " again" * (self._interrupts > 1)
        may_pass = self._interrupts <= _MOST_INTERRUPTS and not self._ends.is_over
        if self._force is _Force.ASK_SLURM and may_pass:
            stopping = self._command if self._signum in self._request.stop_signals else None
            if stopping is not None and time.monotonic() - stopping.began_s > _PATIENCE_S:
                self._pass_on_without_slurm()
            else:
                self._waiting.append(signum)
                self._pass_next()
        elif self._force is not _Force.END_SRUN:
            self._end_srun(again)
        else:
            self._leave(again)

    def _pass_next(self) -> None:
        if self._commands is None and self._waiting:
            self._signum = self._waiting.popleft()
            self._commands = self._pass_on(self._signum)
            self._late.restart(_ANSWER_TAKES_S)
            self._run_next(None)

    def _pass_on(self, signum: int) -> _Commands:
        """Yield the commands that send a signal to the launchers, and receive their output.

        srun itself would kill the launchers on SIGTERM.
        """
        job = f"--jobs={self._job}"
        states = (yield ["squeue", "--noheader", job, "--format=%A %T"]).splitlines()
        # Other tasks of an array and other components of a heterogeneous job may be listed, too.
        if {_ENDING, f"{self._job} {_ENDING}"}.intersection(states):
            return  # Slurm has signaled the launchers of a cancelled job
        jobs = f"--jobs={','.join(_jobs_of_components() or [self._job])}"
        listed = yield ["squeue", "--noheader", "--steps", jobs, "--format=%i %j"]
        steps = [
            line.split()[0] for line in listed.splitlines() if line.split()[1:] == [self._name]
        ]
        if steps:
            yield ["scancel", f"--signal={signal_name(signum).removeprefix('SIG')}", *steps]
        else:
            self._srun.send_signal(signum)  # it still waits for nodes

    def _on_output(self, output: str | None) -> None:
        self._command = None
        if output is None:
            self._pass_on_without_slurm()
        else:
            self._run_next(output)

    def _run_next(self, output: str | None) -> None:
        """Run the command after one with this output; after the last, pass on the next signal."""
        assert self._commands is not None  # noqa: S101 - a signal is being passed on
        try:
            self._command = _Command(self._commands.send(output))
        except StopIteration:
            self._finish_signal()
            self._pass_next()
        except OSError:
            self._pass_on_without_slurm()

    def _pass_on_without_slurm(self) -> None:
        """Make srun itself pass on a signal, as Slurm's controller does not answer.

        Of the signals that stop a launch, srun passes on only SIGINT.
        """
        signum = self._signum
        self._finish_signal()
        name = f"{signal_name(signum)}: Slurm's controller does not answer;"
        if signum in self._request.stop_signals:
            if self._force is _Force.ASK_SLURM:
                self._force, self._stopped_by = _Force.ASK_SRUN, signum
                note(f"{name} srun sends SIGINT to the launchers")
                self._srun.send_signal(signal.SIGINT)
        elif signum in (signal.SIGUSR1, signal.SIGUSR2):
            self._srun.send_signal(signum)
        else:
            note(f"{name} the launchers do not get it")
        self._pass_next()

    def _finish_signal(self) -> None:
        self._drop_command()
        self._late.cancel()
        self._commands, self._signum = None, 0

    def _drop_command(self) -> None:
        if self._command is not None:
            self._command.kill()
            self._command = None


class _Errors:
    """Passes on srun's stderr, without the launchers' reports to this process."""

    def __init__(self, pipe: IO[bytes], ends: StepEnds, reactor: Reactor) -> None:
        self._pipe, self._ends, self._reactor = pipe, ends, reactor
        self._outlet = Outlet(2)
        self.is_cut = False
        """Whether the reader of our stderr closed it before the end."""
        os.set_blocking(pipe.fileno(), False)
        reactor.add_reader(pipe, self._read)

    def is_done(self) -> bool:
        """Return, after srun's end, whether everything that it left in the pipe is printed."""
        while not self._outlet.queued_bytes and self._read():
            pass
        return not self._outlet.queued_bytes

    def _read(self) -> bool:
        """Pass on the next data; return whether there was any."""
        if self._pipe.closed:
            return False
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        self._outlet.write(self._ends.feed(data))
        error = self._outlet.error
        self.is_cut = error is not None and is_reader_gone(error)
        if not data or self.is_cut:  # if cut, srun must notice
            self._reactor.drop(self._pipe)
            return False
        if self._outlet.queued_bytes:
            self._reactor.remove(self._pipe)
            self._reactor.add_writer(self._outlet, self._flush)
        return True

    def _flush(self) -> None:
        self._outlet.flush()
        if not self._outlet.queued_bytes:
            self._reactor.remove_writer(self._outlet)
            if not self._pipe.closed:
                self._reactor.add_reader(self._pipe, self._read)


class _Force(enum.Enum):
    """How the launchers are stopped, from the gentlest way on."""

    ASK_SLURM = enum.auto()
    ASK_SRUN = enum.auto()
    END_SRUN = enum.auto()
    LEAVE = enum.auto()


class _Command:
    """A running command of Slurm's, which may take long.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.began_s = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    def output(self) -> str | None:
        """Return its output; ``None`` if it failed, but a job's state if the job has ended."""
        with self._output, self._errors:
            for file in (self._output, self._errors):
                file.seek(0)
            output, errors = self._output.read(), self._errors.read()
        if self.process.returncode == 0:
            return output.decode(errors="replace").strip()
        return _ENDING if any(part in errors for part in _GONE) else None

    def kill(self) -> None:
        """End it and discard its output."""
        self._output.close()
        self._errors.close()
        self.process.kill()
        self.process.wait()


def _node_options(nnodes: int) -> list[str]:
    """Return srun's options for one task on each node, or on all nodes of a heterogeneous job.

    Raises:
        UsageError: If the job has fewer nodes, or is heterogeneous and has another number.
    """
    size = read_number(os.environ, "SLURM_HET_SIZE")
    if not size:
        allocated = read_number(os.environ, "SLURM_JOB_NUM_NODES")
        if allocated and nnodes > allocated:
            raise UsageError(
                f"--nnodes {nnodes}, but Slurm allocated {allocated} (SLURM_JOB_NUM_NODES)",
                hint=f"use at most --nnodes {allocated}, or allocate more nodes",
            )
        return [f"--nodes={nnodes}", f"--ntasks={nnodes}"]
    counts = [
        read_number(os.environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}") or 0
        for number in range(size)
    ]
    if sum(counts) != nnodes:
        raise UsageError(
            f"--nnodes {nnodes}, but the components of the Slurm job have"
            f" {' + '.join(map(str, counts))} nodes",
            hint=f"use --nnodes {sum(counts)}, or name components: srun --het-group=0"
            " --ntasks-per-node=1 meshrun ...",
        )
    return [f"--het-group=0-{size - 1}"]


def _jobs_of_components() -> list[str]:
    """Return the ids of a heterogeneous job's components, each of which has a step of its own."""
    size = read_number(os.environ, "SLURM_HET_SIZE") or 0
    names = (f"SLURM_JOB_ID_HET_GROUP_{number}" for number in range(size))
    return [os.environ[name] for name in names if os.environ.get(name)]


def _environment() -> dict[str, str]:
    """Return the launchers' environment, with a secret by which they recognize each other."""
    if any(map(os.environ.get, SECRET_VARIABLES)):
        return dict(os.environ)
    return {**os.environ, "MESHRUN_SECRET": secrets.token_hex(32)}
