"""Starts one launcher on each node of this shell's or batch script's allocation with srun."""

from __future__ import annotations

import enum
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from meshrun.cluster.cluster_facts import read_number
from meshrun.console.outlet import Outlet, is_reader_gone
from meshrun.errors import HostError, NodeLostError, UsageError, exit_code_of
from meshrun.host.descriptors import read_now
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.own_variables import SECRET, SECRET_VARIABLES, STEP
from meshrun.host.processes import die_with_parent
from meshrun.host.reactor import Reactor
from meshrun.host.shortage import MemoryWatch
from meshrun.host.stderr import note
from meshrun.plan.plan import check_elsewhere
from meshrun.plan.request import LaunchRequest
from meshrun.protocol.caller import SILENT, StepReports
from meshrun.protocol.result import signal_name
from meshrun.start import own_command
from meshrun.submit.sbatch import end_options
from meshrun.supervisor.program_file import check_program
from meshrun.supervisor.signals import SignalQueue

_NOTE_AFTER_S = 5.0
"""How long after the first launcher's end to print a note if srun still runs."""
_OTHERS_TAKE_S = 60.0
"""The least time that the other launchers get to end."""
_MARGIN_S = 30.0
"""How long launchers may take beyond the time that their ranks have to exit."""
_MOST_INTERRUPTS = 3
"""On the third, launchers kill their ranks."""
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
        "srun", f"--job-name={name}", *nodes,
        "--ntasks-per-node=1", "--cpu-bind=none", "--export=ALL", "--input=all",
        "--disable-status",  # so that srun passes on the first SIGINT
        *end_options(is_elastic=request.rendezvous.is_elastic),
    ]  # fmt: skip
    signals = SignalQueue(
        request.stop_signals,
        even_if_ignored=request.stop_even_if_ignored,
        always=(signal.SIGQUIT, signal.SIGCHLD, *request.forwarded_signals),
    )
    has_secret = any(map(os.environ.get, SECRET_VARIABLES))
    secret = {} if has_secret else {SECRET: secrets.token_hex(32)}  # launchers authenticate by it
    own_pid = os.getpid()
    # Launchers report on stderr, unless that goes elsewhere.
    reports = not any(map(os.environ.get, _OTHER_STDERR))
    with subprocess.Popen(
        [*srun, *own_command("launcher", *words)],
        env={**os.environ, **secret, STEP: name if reports else f"{name} {SILENT}"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE if reports else None,
        start_new_session=True,  # so that Ctrl-C reaches only this process
        preexec_fn=lambda: die_with_parent(own_pid, signal.SIGTERM),  # noqa: PLW1509 - one thread
    ) as process:
        code = _Step(request, process, job=job, name=name, signals=signals).run()
    signals.restore_late()
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
        assert srun.stdin is not None  # noqa: S101 - a pipe
        self._orders = srun.stdin.fileno()
        os.set_blocking(self._orders, False)
        self._commands: list[subprocess.Popen[bytes]] = []
        self._reactor = Reactor()
        self._reports = StepReports(name)
        self._errors: _Errors | None = None
        if srun.stderr is not None:
            self._errors = _Errors(srun.stderr, self._reports, self._reactor)
        self._interrupts = 0
        self._force = _Force.ASK
        self._stopped_by = 0
        self._overdue = self._reactor.call_at(None, self._on_overdue)
        self._has_noted_wait = False
        # Other nodes may notice the end only after the node timeout, and their ranks then save.
        slowest_s = request.rendezvous.node_timeout_s + request.shutdown_timeout_s + _MARGIN_S
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
            if (errors := self._errors) is not None:
                self._reactor.run_until(lambda: self._force is _Force.LEAVE or errors.is_done())
        is_forced = self._force is not _Force.ASK or (self._stopped_by and not self._has_begun)
        if self._force is _Force.LEAVE:
            self._srun.kill()
        code = self._srun.wait()
        if is_forced and not self._reports.is_over:  # srun may exit with 0 though it has lost tasks
            return exit_code_of(self._stopped_by)
        if code < 0 and not self._reports.is_over:
            raise self._killed(-code)
        if self._errors is None:
            return code
        reported = self._reports.code(max(code, 0))
        if reported is None and not self._errors.is_cut:
            raise NodeLostError(
                "srun exited with 0, but no launcher has reported the end of the launch",
                hint=f"`scontrol show job {self._job}` may show which node was lost",
            )
        return code if reported is None else reported

    @property
    def _has_begun(self) -> bool:
        """Whether a launcher is there to read signals, as far as is known."""
        return self._errors is None or self._reports.step_id is not None

    def _killed(self, signum: int) -> HostError:
        """Return the error for a srun that was killed, which ends the launch."""
        reason = self._memory.why_killed() if signum == signal.SIGKILL else None
        return HostError(
            f"srun was killed by {signal_name(signum)} on this host"
            f"{f': {reason}' if reason else ''}; the launch ends with it",
            hint=f"`squeue --steps --jobs={self._job}` shows step {self._name} while launchers run",
            exit_code=exit_code_of(signum),
        )

    def _check_for_end(self) -> None:
        if self._reports.is_over and not (self._overdue.is_pending or self._has_noted_wait):
            self._overdue.restart(_NOTE_AFTER_S)

    def _on_overdue(self) -> None:
        """Note, and later end, a srun that still runs though a launcher has ended.

        Ranks of other nodes may be saving, or srun may wait for tasks that it has lost.
        """
        if not self._has_noted_wait:
            self._has_noted_wait = True
            wait = f"waiting up to {self._others_take_s:g} s for those of other nodes"
            note(f"a launcher has exited; {wait}; Ctrl-C makes srun kill them")
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
            if signum in self._request.stop_signals:
                self._stopped_by = signum
            if signum == self._stopped_by != signal.SIGTERM:
                self._stop(signum)
            elif signum != signal.SIGCHLD:
                self._pass_on(signum)

    def _stop(self, signum: int) -> None:
        """Pass on a stop signal, but have srun kill launchers that several have not ended.

        On the third, launchers kill their ranks. SIGTERM is left out, as Slurm repeats it.
        """
        self._interrupts += 1
        again = signal_name(signum) + " again" * (self._interrupts > 1)
        may_pass = self._interrupts <= _MOST_INTERRUPTS and not self._reports.is_over
        if self._force is _Force.ASK and may_pass:
            self._pass_on(signum)
        elif self._force is not _Force.END_SRUN:
            self._end_srun(again)
        else:
            self._leave(again)

    def _pass_on(self, signum: int) -> None:
        """Send a signal to the launchers, or to srun before any of them reads signals."""
        size = read_number(os.environ, "SLURM_HET_SIZE") or 0
        names = (f"SLURM_JOB_ID_HET_GROUP_{number}" for number in range(size))
        jobs = [os.environ[name] for name in names if os.environ.get(name)]
        if not self._has_begun:
            self._srun.send_signal(signum)
        elif jobs:  # each component of a heterogeneous job reads a part of srun's stdin
            signal_word = f"--signal={signal_name(signum).removeprefix('SIG')}"
            command = ["scancel", signal_word, *(f"{job}.{self._reports.step_id}" for job in jobs)]
            self._commands.append(subprocess.Popen(command, start_new_session=True))
        else:
            with suppress(OSError):  # srun has exited, or its tasks have not read for long
                os.write(self._orders, bytes([signum]))


class _Errors:
    """Passes on srun's stderr, without the launchers' reports to this process."""

    def __init__(self, pipe: IO[bytes], reports: StepReports, reactor: Reactor) -> None:
        self._pipe, self._reports, self._reactor = pipe, reports, reactor
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
        data = read_now(self._pipe.fileno(), _READ_BYTES)
        if data is None:
            return False
        self._outlet.write(self._reports.feed(data))
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

    ASK = enum.auto()
    END_SRUN = enum.auto()
    LEAVE = enum.auto()


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
