"""Starts a rank as a new interpreter, or as any command."""

from __future__ import annotations

import os
import socket
import subprocess

from meshrun.host.cores import bind_to_cpus
from meshrun.host.processes import die_with_parent
from meshrun.host.sockets import packet_pair
from meshrun.plan.rank_program import Program
from meshrun.protocol import codec
from meshrun.protocol.codec import StartRank
from meshrun.start import own_command


def spawn_fresh(  # noqa: PLR0917
    order: StartRank,
    program: Program,
    reports: socket.socket,
    gate_fd: int,
    stdout: int,
    stderr: int,
    stacks: int,
    questions: int,
) -> int:
    """Start a rank as a new interpreter, which reads its order, and return its process id."""
    ours, theirs = packet_pair()  # a pipe is too small for the longest order
    fds = (theirs.fileno(), reports.fileno(), gate_fd, stacks, questions)
    numbers = [str(number) for number in (*fds, os.getpid())]
    words = (*numbers, program.kind, program.target, *program.args)
    with ours, theirs:
        ours.send(codec.encode(order))
        process = subprocess.Popen(
            own_command("rank", *words, unbuffered=True),
            stdin=_stdin(order, stdout),
            stdout=stdout,
            stderr=stderr,
            pass_fds=fds,
            env=_environment(order),  # for sitecustomize and readers of /proc/PID/environ
            start_new_session=True,
            restore_signals=True,
        )
    process.returncode = 0  # reaped by the loop, with all other children
    return process.pid


def spawn_command(order: StartRank, program: Program, stdout: int, stderr: int) -> int:
    """Start a rank that is a command and return its process id."""
    program = program.for_local_rank(order.local_rank)
    zygote = os.getpid()

    def prepare() -> None:  # between fork and exec; this process has a single thread
        die_with_parent(zygote)
        bind_to_cpus(order.cpus)

    process = subprocess.Popen(
        [program.target, *program.args],
        stdin=_stdin(order, stdout),
        stdout=stdout,
        stderr=stderr,
        env=_environment(order),
        start_new_session=True,
        restore_signals=True,
        preexec_fn=prepare,  # noqa: PLW1509
    )
    process.returncode = 0  # reaped by the loop, with all other children
    return process.pid


def _environment(order: StartRank) -> dict[str, str]:
    removed = {*order.unset, "MESHRUN_WORKER_PID"}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, **order.environment}


def _stdin(order: StartRank, terminal: int) -> int | None:
    if order.debug:
        return terminal
    return None if order.stdin else subprocess.DEVNULL
