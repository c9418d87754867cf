"""A rank that the zygote starts as a new interpreter (``--start-method exec``).

ORDER_FD REPORT_FD BARRIER_FD STACKS_FD REQUESTS_FD ZYGOTE_PID KIND TARGET [ARGUMENT ...]
"""

from __future__ import annotations

import os
import signal
import sys

# Until the program begins, SIGINT ends this process without a traceback.
_ON_INTERRUPT = signal.getsignal(signal.SIGINT)
if _ON_INTERRUPT is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import socket

from meshrun.host.processes import die_with_parent
from meshrun.plan.rank_program import Program, first_path
from meshrun.protocol import codec
from meshrun.protocol.zygote_messages import StartRank
from meshrun.worker.bootstrap import become_rank
from meshrun.worker.exit import ExitHandler
from meshrun.worker.imports import put_first
from meshrun.worker.program import inspect_program


def main(known_at_start: frozenset[str]) -> None:
    """Read the zygote's order, become that rank, and run the program."""
    order_fd, report_fd, barrier_fd, stacks_fd, requests_fd, zygote_pid = map(int, sys.argv[1:7])
    program = Program.of_words(sys.argv[7:])
    die_with_parent(zygote_pid)
    os.set_inheritable(barrier_fd, False)
    order = codec.decode(os.read(order_fd, codec.PACKET_BYTES))
    os.close(order_fd)
    reports = socket.socket(fileno=report_fd)
    reports.set_inheritable(False)
    put_first(first_path(program), known_at_start=known_at_start)
    assert isinstance(order, StartRank)  # noqa: S101 - the zygote wrote it
    signal.signal(signal.SIGINT, _ON_INTERRUPT)
    become_rank(
        order,
        program=program,
        source=inspect_program(program),
        reports=reports,
        ending=ExitHandler(),
        barrier_fd=barrier_fd,
        stacks_fd=stacks_fd,
        requests_fd=requests_fd,
    )
