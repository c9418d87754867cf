"""One launcher a node of an allocation that this shell or batch script is in, through srun."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence

from meshrun.host.processes import die_with_parent
from meshrun.supervise.signals import SignalQueue

_SECRET = ("MESHRUN_SECRET", "MESHRUN_SECRET_FILE")


def run_step(argv: Sequence[str], *, nnodes: int, job_id: str, signums: Sequence[int]) -> int:
    """Run a command once on each node, as one step of the job; return its exit code.

    Signals to this process reach the launchers alone: srun would kill them on SIGTERM, and show
    their state on Ctrl-C.

    Args:
        argv: The words of the launcher.
        nnodes: On how many nodes.
        job_id: The job of this shell.
        signums: The signals to pass on.
    """
    name = f"meshrun-{secrets.token_hex(4)}"
    command = _srun(name, nnodes, os.environ)
    caught = SignalQueue(signums, always=(signal.SIGCHLD,))
    own_pid = os.getpid()
    with subprocess.Popen(
        [*command, *argv],
        env=_environment(os.environ),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is ours to pass on
        preexec_fn=lambda: die_with_parent(own_pid, signal.SIGTERM),  # noqa: PLW1509 - no threads
    ) as srun:
        while srun.poll() is None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ())
            for signum in _next(caught):
                if signum != signal.SIGCHLD and srun.poll() is None:
                    _signal_step(name, job_id, signum, srun)
    caught.restore()
    code = srun.returncode
    return code if code >= 0 else 128 - code


def _srun(name: str, nnodes: int, env: Mapping[str, str]) -> list[str]:
    """Return the words of srun.

    The step may use all that the job has on each node: without ``--cpu-bind=none`` some clusters
    bind a task to one core. What the job said of tasks was for other steps than this one.
    """
    return [
        *("srun", f"--job-name={name}", f"--nodes={nnodes}", f"--ntasks={nnodes}"),
        *("--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL"),
    ]


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    if any(env.get(name) for name in _SECRET):
        return dict(env)
    return {**env, "MESHRUN_SECRET": secrets.token_hex(32)}
