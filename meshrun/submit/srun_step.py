"""Starts one launcher per node of this shell's or batch script's allocation with srun."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Sequence

from meshrun.cluster.numbers import read_number
from meshrun.errors import UsageError
from meshrun.host.descriptors import say
from meshrun.host.machine import UNKNOWN_HOST
from meshrun.host.processes import die_with_parent
from meshrun.plan.plan import check_elsewhere
from meshrun.plan.request import LaunchRequest
from meshrun.start import own_command
from meshrun.submit.slurm_options import how_tasks_end
from meshrun.supervisor.program_file import check_program
from meshrun.supervisor.signals import SignalQueue

_SECRETS = ("MESHRUN_SECRET", "MESHRUN_SECRET_FILE")


def launch_on_nodes(request: LaunchRequest, words: Sequence[str], *, job: str) -> int:
    """Run this very command line on each node, as one step of the job; return its exit code.

    Args:
        request: What was asked for.
        words: The command line after ``meshrun``.
        job: The Slurm job of this shell.

    Raises:
        UsageError: If the request does not fit together, before anything is started.
    """
    nnodes = request.nnodes or 1
    which = _which(nnodes)
    _check(request)
    say(f"meshrun: Slurm, job {job}: starting a launcher on each of {nnodes} nodes with srun")
    # The step may use all that the job has on each node: some clusters bind a task to one core
    # else. What the job says of its tasks is for other steps than this one.
    name = f"meshrun-{secrets.token_hex(4)}"
    srun = [
        *("srun", f"--job-name={name}", *which),
        *("--ntasks-per-node=1", "--cpu-bind=none", "--export=ALL"),
        *how_tasks_end(is_elastic=request.rendezvous.least_nodes is not None),
    ]
    passed_on = (*request.stop_signals, *request.forwarded_signals, signal.SIGQUIT)
    caught = SignalQueue(
        passed_on, even_if_ignored=request.stop_even_if_ignored, always=(signal.SIGCHLD,)
    )
    own_pid = os.getpid()
    with subprocess.Popen(
        [*srun, *own_command("launcher", *words)],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is ours to pass on
        preexec_fn=lambda: die_with_parent(own_pid, signal.SIGTERM),  # noqa: PLW1509 - one thread
    ) as process:
        while process.poll() is None:
            for signum in caught.wait():
                if signum != signal.SIGCHLD and process.poll() is None:
                    _pass_on(signum, job, name, process)
    caught.restore()
    code = process.returncode
    return code if code >= 0 else 128 - code


def _which(nnodes: int) -> list[str]:
    """Return the options of srun for one task on each node; of a heterogeneous job on all.

    Raises:
        UsageError: If the job has fewer nodes, or it is to be some of a heterogeneous job.
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


def _check(request: LaunchRequest) -> None:
    """Report mistakes once, rather than on every node, if they are visible here."""
    check_program(request.program)
    check_elsewhere(request, UNKNOWN_HOST)


def _environment() -> dict[str, str]:
    """Return the launchers' environment; they know each other by a secret."""
    if any(os.environ.get(name) for name in _SECRETS):
        return dict(os.environ)
    return {**os.environ, "MESHRUN_SECRET": secrets.token_hex(32)}


def _pass_on(signum: int, job: str, name: str, srun: subprocess.Popen[bytes]) -> None:
    """Send a signal to the launchers; srun itself would kill them on SIGTERM."""
    if _ask("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "COMPLETING":
        return  # a job that is cancelled has signalled them
    listed = _ask("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i %j")
    steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [name]]
    if steps:
        _ask("scancel", f"--signal={signal.Signals(signum).name.removeprefix('SIG')}", steps[0])
    else:
        srun.send_signal(signum)  # it waits for the nodes


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
