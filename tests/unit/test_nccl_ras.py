"""NCCL's RAS service; a socket gives the answers recorded from NCCL 2.24."""

from __future__ import annotations

import socket
import threading

import pytest

from meshrun.host.reactor import Reactor
from meshrun.supervisor.nccl_ras import NcclRas, ras_address, select_findings

STATUS = """NCCL version 2.24.3 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         8         8         8   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  7 ranks have launched up to operation 812
  1 rank has launched up to operation 811
  Rank 6 -- GPU 6 managed by process 1483960 on node 172.16.64.211
"""
FOUND = [
    "Warnings",
    "#0-0 (27a079b828ff1a75) MISMATCH",
    "  Communicator ranks have different collective operation counts",
    "  7 ranks have launched up to operation 812",
    "  1 rank has launched up to operation 811",
    "  Rank 6 -- GPU 6 managed by process 1483960 on node 172.16.64.211",
]


def serve(listener: socket.socket, replies: dict[bytes, bytes]) -> None:
    """Answer the lines of one client, up to one that has no reply."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as lines:
        for line in lines:
            connection.sendall(replies.get(line, b""))
            if line not in replies or line == b"STATUS\n":
                return


def ask(replies: dict[bytes, bytes] | None) -> list[str]:
    """Return the findings from a service with these replies; ``None``: nothing listens."""
    answered: list[bool] = []
    reactor = Reactor()
    ras = NcclRas(reactor, lambda: answered.append(True))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if replies is None:
            listener.close()
        else:
            threading.Thread(target=serve, args=(listener, replies), daemon=True).start()
        ras.ask({"NCCL_RAS_ADDR": address})
        while not answered:
            reactor.turn()
    reactor.close()
    return ras.findings


def test_an_answer_moves_no_cursor() -> None:
    """Another user of this machine may listen at NCCL's port before NCCL does."""
    found = select_findings("Errors\n\x1b[2Ja\x07\x9b\n" + "b" * 10_000)

    assert found[:2] == ["Errors", r"\x1b[2Ja\x07\x9b"]
    assert len(found[2]) <= 1000


GREETING = {b"CLIENT PROTOCOL 2\n": b"SERVER PROTOCOL 2\n", b"TIMEOUT 1\n": b"OK\n"}


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        pytest.param({**GREETING, b"STATUS\n": STATUS.encode()}, FOUND, id="a mismatch"),
        pytest.param(
            {**GREETING, b"STATUS\n": STATUS.partition("Warnings")[0].encode()}, [], id="all well"
        ),
        pytest.param({b"CLIENT PROTOCOL 2\n": b"HTTP/1.1 400\n"}, [], id="another service"),
        pytest.param({}, [], id="a service that closes the connection"),
        pytest.param(None, [], id="no service"),
    ],
)
def test_what_nccl_reports(replies: dict[bytes, bytes] | None, expected: list[str]) -> None:
    """Errors and warnings are kept; any other service is given up on."""
    assert ask(replies) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("127.0.0.1", 28028)),
        ({"NCCL_RAS_ADDR": "localhost:1234"}, ("127.0.0.1", 1234)),
        ({"NCCL_RAS_ADDR": "[::1]:1234"}, ("::1", 1234)),
        ({"NCCL_RAS_ADDR": "nonsense"}, ("127.0.0.1", 28028)),
        ({"NCCL_RAS_ADDR": "localhost:65536"}, ("127.0.0.1", 28028)),
        ({"NCCL_RAS_ADDR": f"localhost:{'9' * 5000}"}, ("127.0.0.1", 28028)),
        ({"NCCL_RAS_ENABLE": "0"}, None),
    ],
)
def test_the_address_of_the_service(env: dict[str, str], expected: tuple[str, int] | None) -> None:
    assert ras_address(env) == expected


def test_a_long_answer_is_cut() -> None:
    assert len(select_findings("Errors\n" + "x\n" * 1000)) == 40
