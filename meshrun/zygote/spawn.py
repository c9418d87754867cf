"""Starts a rank as a new interpreter, or as any command."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from typing import Any

from meshrun.host import rank_variables as var
from meshrun.host.cores import bind_to_cpus
from meshrun.host.network import packet_pair
from meshrun.host.own_variables import WORKER_PID
from meshrun.host.processes import die_with_parent
from meshrun.plan.rank_program import Program
from meshrun.protocol import codec
from meshrun.protocol.to_zygote import StartRank
from meshrun.start import own_command


def spawn_fresh(
    order: StartRank, program: Program, reports: socket.socket, barrier_fd: int, fds: Sequence[int]
) -> int:
    """Start a rank as a new interpreter, which reads its order, and return its process id."""
    ours, theirs = packet_pair()  # a pipe is too small for the longest order
    stdout, stderr, stacks, requests = fds
    inherited = (theirs.fileno(), reports.fileno(), barrier_fd, stacks, requests)
    numbers = [str(number) for number in (*inherited, os.getpid())]
    with ours, theirs:
        ours.send(codec.encode(order))
        command = own_command("rank", *numbers, *program.words, unbuffered=True)
        return _start(order, command, stdout, stderr, pass_fds=inherited)


def spawn_command(order: StartRank, program: Program, stdout: int, stderr: int) -> int:
    """Start a rank that is a command and return its process id."""
    program = program.for_local_rank(order.local_rank)
    zygote = os.getpid()

    def prepare() -> None:  # between fork and exec; this process has a single thread
        die_with_parent(zygote)
        bind_to_cpus(order.cpus)

    return _start(order, [program.target, *program.args], stdout, stderr, preexec_fn=prepare)


def _start(
    order: StartRank, command: Sequence[str], stdout: int, stderr: int, **options: Any
) -> int:
    stdin = stdout if order.debug else None if order.stdin else subprocess.DEVNULL
    removed = {*var.THREADS, WORKER_PID}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    process = subprocess.Popen(
        command,
        stdin=stdin,  # the terminal of a rank that is debugged is its stdout
        stdout=stdout,
        stderr=stderr,
        env={**kept, **order.environment},  # for sitecustomize and readers of /proc/PID/environ
        start_new_session=True,
        **options,
    )
    process.returncode = 0  # reaped by the loop, with all other children
    return process.pid
