"""A node fails or is stopped before all nodes have joined: no other node waits for it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.engines.hosts import MakeHosts
from tests.engines.together import Launch, all_gone, as_shell, end_all, launch_on, wait_for_all
from tests.kit import PROGRAMS, TOO_FEW_FILES, withdrew
from tests.variations import ordinary

pytestmark = pytest.mark.torch
SAYS = PROGRAMS / "nodes.py"
AT = ("--nnodes", "3", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=3,tp=2")
SHORT = ("--node-timeout", "5")
"""How long a node that withdraws lingers to notify those it has not reached."""


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.parametrize(
    ("wrong", "host", "backend"),
    ordinary(
        [
            *(("a broken program", host, "static") for host in (0, 1)),
            *(("a missing program", *row) for row in ((0, "static"), (1, "static"), (1, "c10d"))),
            ("a folder for logs that others may write to", 1, "static"),
            *(("too few descriptors", host, "static") for host in (0, 1)),
        ],
        "a broken program",
    ),
)
def test_what_one_node_cannot_run_ends_all(
    make_hosts: MakeHosts, tmp_path: Path, wrong: str, host: int, backend: str
) -> None:
    """Both nodes exit with the same code and reason, though a third node is missing."""
    hosts = make_hosts(2)
    (broken := tmp_path / "broken.py").write_text("print(")
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    its, code, why = {
        "a broken program": ([broken], 1, "SyntaxError: "),
        "a missing program": ([tmp_path / "lost.py"], 2, f"can't open file '{tmp_path}/lost.py'"),
        "a folder for logs that others may write to": (["--log-dir", shared, SAYS], 2, "--log-dir"),
        "too few descriptors": ([SAYS], 71, f"this launch needs 79 {TOO_FEW_FILES} 75"),
    }[wrong]
    limit = ["sh", "-c", 'ulimit -n 75; exec "$@"', "sh"] if its == [SAYS] else []
    # Else a difference between the programs might be the first error.
    words = ["--rdzv-backend", backend, *AT, *SHORT, "--allow-different-programs"]
    launches = [
        Launch(hosts, each, [*words, *(its if each == host else [SAYS])],
               around=limit if each == host else [])
        for each in (0, 1)
    ]  # fmt: skip

    assert end_all(launches) == [code, code], launches[0].text + launches[1].text
    text = launches[1 - host].text
    assert f"error: {withdrew(f'node{host}')}{why}" in text
    assert why in launches[host].text
    all_gone(hosts)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("host", "backend"), [(0, "static"), (1, "static"), (1, "c10d")])
def test_a_signal_to_a_waiting_node_ends_all(
    make_hosts: MakeHosts,
    host: int,
    backend: str,
    signum: signal.Signals,
    request: pytest.FixtureRequest,
) -> None:
    """The other node exits with the same code and names the node and the signal."""
    if backend == "static":
        request.getfixturevalue("fake_torch")
    hosts = make_hosts(2)
    launches = launch_on(hosts, "--rdzv-backend", backend, *AT, SAYS)
    wait_for_all(launches, "2 of 3 nodes joined")
    launches[host].send(signum)

    assert [as_shell(code) for code in end_all(launches)] == [128 + signum] * 2
    reason = f"{withdrew(f'node{host}')}it was stopped by {signum.name}"
    assert f"error: {reason}" in launches[1 - host].text
    all_gone(hosts)


TWO = ("--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--mesh", "dp=2,tp=2")
WRONG = {
    "sizes": (["--nproc-per-node", "4"], 2, "mesh `dp=2,tp=2` needs 4 workers"),
    "rank": (["--node-rank", "2"], 2, "--node-rank must be from 0 to 1, found 2"),
    "device": (["--device", "cuda"], 2, "cuda"),
    "option": (["--max-restarts", "few"], 2, "`few`"),
    "unknown option": (["--max-restrts=1"], 2, "no such option: --max-restrts"),
    "unknown and value": (["--max-restrts", "1"], 2, "no such option: --max-restrts"),
    "back end": (["--rdzv-backend", "none", "--rdzv-conf", "a=b"], 2, "unknown backend `none`"),
    "folder": (["--log-dir", "/proc/logs", "--tee", "3"], 2, "/proc/logs"),
    "handler": (["--event-log-handler", "lost"], 2, "`lost`"),
}
"""The arguments of the failing node, its exit code, and part of the reason."""


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("words", "code", "reason"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.usefixtures("fake_torch")
def test_a_node_that_cannot_be_planned_ends_all(
    make_hosts: MakeHosts, host: int, words: list[str], code: int, reason: str
) -> None:
    """Whatever is wrong with one node, the other exits alike and reports the reason."""
    hosts = make_hosts(2)
    launches = launch_on(hosts, *TWO, SAYS, each=lambda each: words if each == host else [])
    codes = end_all(launches)

    assert codes == [code] * 2, launches[0].text + launches[1].text
    text = launches[1 - host].text
    assert f"error: {withdrew(f'node{host}')}" in text
    assert reason in text.partition(withdrew(f"node{host}"))[2]
    all_gone(hosts)


@pytest.mark.nightly
def test_a_latecomer_is_told_why_there_is_no_launch(
    make_hosts: MakeHosts, fake_torch: Path
) -> None:
    """Node 0 has withdrawn before the other starts, and lingers to report it."""
    hosts = make_hosts(2)
    first = Launch(hosts, 0, [*TWO, "--nproc-per-node", "4", SAYS])
    first.wait_for("this node withdraws: ")
    second = Launch(hosts, 1, [*TWO, SAYS])

    assert end_all([first, second]) == [2, 2], first.text + second.text
    assert f"error: {withdrew('node0')}" in second.text


@pytest.mark.parametrize("speaks", [False, True], ids=["silent", "speaks"])
def test_a_port_that_is_taken_on_node_0_ends_all(
    make_hosts: MakeHosts, fake_torch: Path, speaks: bool
) -> None:
    """By a program that speaks another protocol, or is silent."""
    hosts = make_hosts(2)
    taker = hosts.popen(0, [sys.executable, "-c", TAKES_PORT, str(int(speaks))], stdout=-1)
    assert taker.stdout is not None
    assert taker.stdout.readline() == b"taken\n"
    launches = launch_on(hosts, *TWO, SAYS, each=lambda host: ["--node-rank", str(host)])

    assert end_all(launches) == [71, 71], launches[0].text + launches[1].text
    assert "error: port 29500 on 10.77.0.1 is in use" in launches[0].text
    assert "hint: another launch may still be running" in launches[0].text
    assert "no secret is set" not in launches[0].text
    assert f"{withdrew('node0')}port 29500 on 10.77.0.1 is in use" in launches[1].text
    taker.kill()
    taker.communicate()
    all_gone(hosts)


TAKES_PORT = """
import socket, sys
taken = socket.create_server(("10.77.0.1", 29500))
print("taken", flush=True)
kept = []
while True:
    kept.append(taken.accept()[0])
    if sys.argv[1] == "1":
        kept[-1].sendall(b"SSH-2.0-OpenSSH_9.2\\r\\n")
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("differs", "more"),
    [("secret", []), ("id", []), ("id", ["--rdzv-backend", "c10d", "--nnodes", "2:4"])],
    ids=["secret", "id", "id of c10d"],
)
def test_nodes_with_different_names_or_secrets_end(
    make_hosts: MakeHosts, fake_torch: Path, differs: str, more: list[str]
) -> None:
    """Neither can authenticate to the other; both report the difference and exit."""
    hosts = make_hosts(2)
    launches = [
        Launch(hosts, host,
               [*TWO, *more, *SHORT, "--rdzv-id", f"job{host * (differs == 'id')}", SAYS],
               env={"MESHRUN_SECRET": f"secret{host}"} if differs == "secret" else {})
        for host in (0, 1)
    ]  # fmt: skip

    assert end_all(launches) == [69, 69], launches[0].text + launches[1].text
    assert "belongs to another launch or has a different secret" in launches[1].text
    assert "10.77.0.2" in launches[0].text.partition("error: ")[2]
    assert (
        "a different --rdzv-id or MESHRUN_SECRET than node0, with --rdzv-id job0"
        in launches[0].text
    )
    assert f"--rdzv-id (here job{int(differs == 'id')}) and MESHRUN_SECRET" in launches[1].text


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_node_that_cannot_start_its_ranks_again_says_why(
    make_hosts: MakeHosts, fake_torch: Path, tmp_path: Path, host: int
) -> None:
    """Both launchers exit at once with that reason."""
    hosts = make_hosts(2)
    fails = tmp_path / "fails.py"
    fails.write_text(
        "import os, pathlib, signal\n"
        "attempt = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[1]\n"
        f"if os.environ['GROUP_RANK'] != '{host}' or attempt.name == 'attempt_1':\n"
        "    signal.pause()\n"
        "attempt.with_name('attempt_1').touch()\n"
        "raise ValueError('first')\n"
    )
    words = ["--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--max-restarts", "1", "-t", "3"]
    launches = launch_on(
        hosts, each=lambda each: [*words, "--log-dir", tmp_path / str(each), fails]
    )

    assert end_all(launches) == [71, 71], launches[0].text + launches[1].text
    for launch in launches:
        text = launch.text.rpartition("error: ")[2]
        assert text.startswith(f"on node{host}, cannot create `{tmp_path}/{host}/"), launch.text
    all_gone(hosts)
